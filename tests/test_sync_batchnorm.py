"""BatchNorm over all processes: what one process computes that takes the whole batch at once."""

from pathlib import Path

import pytest

from tests.harness import Ended, assert_close, finished
from tests.test_conformance import SMALL

# batches of 14 and one of 10: shares of 5, 5 and 4; of a batch of 2, one rank of three has nothing
RUN = [*SMALL, "precision=fp64", "model=cnn", "model.channels=[4,8]", "model.norm=batch", "global_batch_size=14",
       "trainer.max_epochs=null", "trainer.max_steps=10", "trainer.log_every=1", "trainer.eval_every=5",
       "trainer.clip_grad_norm=0.5", "checkpoint.every=null"]  # fmt: skip
SYNC = "trainer.sync_batchnorm=true"


@pytest.fixture(scope="session", params=[14, 2])
def one_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Ended]:
    line = [*RUN, f"global_batch_size={request.param}"]
    return line, finished(*line, root=tmp_path_factory.mktemp("one") / "runs")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 3),
        ("fsdp", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("ddp", 2), ("fsdp", 3), ("zero", 3), ("hsdp", 4), ("parameter-server", 3)]),
    ],
)  # fmt: skip
def test_synchronised_statistics_are_those_of_the_whole_batch(
    strategy: str, ranks: int, one_process: tuple[list[str], Ended], tmp_path: Path
) -> None:
    line, alone = one_process
    run = finished(*line, SYNC, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert_close(run, alone)
    assert "depend on the number of processes" not in run.output


@pytest.mark.quick(1)
def test_without_it_they_are_not(one_process: tuple[list[str], Ended], tmp_path: Path) -> None:
    line, alone = one_process
    run = finished(*line, "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "runs")
    with pytest.raises(AssertionError):
        assert_close(run, alone)
