"""parallel.bucket_cap_mb=auto: measured on the run's first step, without a trace, the same on all ranks, and kept on resume."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.checkpoint.manifest import read_state
from framework.parallel import bucket_size
from tests.harness import Says, assert_same_bits, command, finished, slow_but, together
from tests.test_resume import RUN, after_step, crash, preempt

THREE = ["parallel=ddp", "launch.nproc_per_node=3"]
AUTO = [*THREE, "parallel.bucket_cap_mb=auto"]


def prefer(size: int) -> Callable[[], None]:
    """Return what makes a size the fastest."""

    def plant() -> None:
        def fastest(times: dict[int, float]) -> int:
            assert size in times
            return size

        bucket_size.fastest = fastest  # type: ignore[assignment]

    return plant


@pytest.mark.parametrize("size", slow_but([1], [1, 25, 100]))
def test_measuring_leaves_no_trace(size: int, tmp_path: Path) -> None:
    """BatchNorm, dropout, augmentation, and an average of the weights: the same bits as with the size itself."""
    measured = finished(*RUN, *AUTO, root=tmp_path / "auto", before=prefer(size))
    assert_same_bits(measured, finished(*RUN, *THREE, f"parallel.bucket_cap_mb={size}", root=tmp_path / "fixed"))
    (line,) = [line for line in measured.output.splitlines() if line.startswith("parallel.bucket_cap_mb: ")]
    assert line.endswith(f"{size} is chosen") and len(re.findall(r"[\d.]+ ms", line)) == 4


@pytest.mark.parametrize("act", slow_but([crash], [preempt, crash]))
def test_a_resume_takes_the_size_that_was_measured(act: Callable[[], None], tmp_path: Path) -> None:
    """Also where another would be the fastest now."""
    stopped = command(*RUN, *AUTO, root=tmp_path / "runs", before=together(prefer(5), after_step(10, act)))
    assert stopped.code != 0
    newest = max(stopped.directory.glob("checkpoints/step_*"))
    assert read_state(newest)["measured"] == {"bucket_cap_mb": 5}
    ended = finished(*RUN, *AUTO, root=tmp_path / "runs", before=prefer(100))
    assert "bucket_cap_mb" not in ended.output
    assert_same_bits(ended, finished(*RUN, *THREE, "parallel.bucket_cap_mb=5", root=tmp_path / "fixed"))


def test_the_slowest_rank_decides(tmp_path: Path) -> None:
    def differ() -> None:
        from framework.distributed.agreement import Agreement

        original = Agreement.largest

        def largest(self: Agreement, number: float) -> float:
            assert self.group is not None
            rank = self.group.rank()
            given = original(self, number if number > 100 else 10.0 * rank + number)  # rank 2 is slow, by the same amount
            (tmp_path / f"rank_{rank}").open("a").write(f"{given}\n")
            return given

        Agreement.largest = largest  # type: ignore[method-assign]

    finished(*RUN, *AUTO, "trainer.max_epochs=1", root=tmp_path / "runs", before=differ)
    one, two, three = ((tmp_path / f"rank_{rank}").read_text().splitlines() for rank in range(3))
    assert one == two == three and len([number for number in one if 20 < float(number) < 30]) >= 4


@pytest.mark.parametrize(
    ("times", "size"), [({25: 1.0, 1: 0.97, 5: 2.0}, 25), ({25: 1.0, 1: 0.9, 5: 0.8}, 5), ({25: 1.0, 1: 1.0}, 25)]
)
def test_a_size_must_be_clearly_faster_than_the_usual_one(times: dict[int, float], size: int) -> None:
    assert bucket_size.fastest(times) == size


def test_alone_nothing_is_measured(tmp_path: Path) -> None:
    alone = finished(*RUN, "parallel=ddp", "parallel.bucket_cap_mb=auto", root=tmp_path / "runs")
    assert "bucket_cap_mb" not in alone.output


def test_under_bitwise_invariance_it_changes_nothing(tmp_path: Path) -> None:
    line = [*RUN, "trainer.max_epochs=1", "invariance=bitwise", "micro_batch_size=4", "parallel=ddp", "launch.nproc_per_node=2"]
    auto = finished(*line, "parallel.bucket_cap_mb=auto", root=tmp_path / "auto")
    assert_same_bits(auto, finished(*line, root=tmp_path / "fixed"))


def test_what_cannot_be_is_refused_before_the_start(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        ended = command(*RUN, *THREE, *words, root=tmp_path / "runs")
        assert ended.code == 78
        return ended.output

    hook = "parallel.hook._target_=tests.own_parts.Silent"
    assert refused("parallel.bucket_cap_mb=auto", hook, "checkpoint.every=null") == Says(
        "parallel.bucket_cap_mb: auto ... parallel.hook ..."
    )
    assert refused("parallel.bucket_cap_mb=most") == Says("parallel.bucket_cap_mb: most ... auto")
    assert refused("parallel.bucket_cap_mb=0") == Says("parallel.bucket_cap_mb: 0 ...")
