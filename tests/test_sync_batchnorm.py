"""BatchNorm over all processes: what one process computes that takes the whole batch at once."""

from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.harness import Says, assert_close, finished, once, refused
from tests.test_conformance import SMALL

# batches of 14 and one of 10: shares of 5, 5 and 4; of a batch of 2, one rank of three has nothing
RUN = [*SMALL, "precision=fp64", "model=cnn", "model.channels=[4,8]", "model.norm=batch", "global_batch_size=14",
       "trainer.max_epochs=null", "trainer.max_steps=10", "trainer.log_every=1", "trainer.eval_every=5",
       "trainer.clip_grad_norm=0.5", "checkpoint.every=null"]  # fmt: skip
SYNC = "trainer.sync_batchnorm=true"


SIZES = pytest.mark.parametrize("size", [14, 2])


@pytest.mark.quick(1)
@SIZES
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 3),
        ("fsdp", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("ddp", 2), ("fsdp", 3), ("zero", 3), ("hsdp", 4), ("parameter-server", 3)]),
    ],
)  # fmt: skip
def test_synchronised_statistics_are_those_of_the_whole_batch(strategy: str, ranks: int, size: int, tmp_path: Path) -> None:
    line = [*RUN, f"global_batch_size={size}"]
    run = finished(*line, SYNC, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert_close(run, once(*line))
    assert "depend on the number of processes" not in run.output


class Activated(nn.BatchNorm1d):
    """As timm's layers do it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Net(nn.Sequential):
    def __init__(self) -> None:
        first, second = (nn.Linear(size, 12, bias=False) for size in (192, 12))
        norm = nn.SyncBatchNorm(12)  # torch's own runs only on GPUs
        super().__init__(nn.Flatten(), first, Activated(12), second, norm, nn.Linear(12, 10))


@pytest.mark.slow
def test_a_layer_keeps_what_it_does_besides_and_the_rehearsal_sees_one_that_normalises_itself(tmp_path: Path) -> None:
    # the last batch has two samples, one on each process
    short = ["dataset.num_train=58", "rehearse=true"]
    line, two = [*RUN, f"model._target_={__name__}.Net", SYNC, *short], ["parallel=ddp", "launch.nproc_per_node=2"]
    line = [word for word in line if not word.startswith(("model=", "model.channels", "model.norm"))]
    together = finished(*line, *two, root=tmp_path / "two")
    assert_close(together, finished(*line, root=tmp_path / "one"))
    assert "depend on the number of processes" not in together.output
    in_micro_batches = finished(*line, *two, "micro_batch_size=4", root=tmp_path / "cut")
    assert "trainer.sync_batchnorm: the statistics are of one micro-batch of each process" in in_micro_batches.output
    with_own = [word.replace(".Net", ".OwnNet") for word in line]
    assert refused(*with_own, *two) == Says("parallel: 2 processes compute different results ... loss of step 1 is ...")


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        normal = (x - x.mean(0)) / x.std(0) if self.training else x
        return normal * self.weight + self.bias


class OwnNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 12), Own(12), nn.Linear(12, 10))


@pytest.mark.quick(1)
@SIZES
def test_without_it_they_are_not(size: int, tmp_path: Path) -> None:
    line = [*RUN, f"global_batch_size={size}"]
    run = finished(*line, "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "runs")
    with pytest.raises(AssertionError):
        assert_close(run, once(*line))
