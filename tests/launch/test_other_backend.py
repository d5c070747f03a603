"""A back end of another package moves a run's data; the run is the same, and goes on over gloo."""

import os
from pathlib import Path

import pytest

from tests.harness import Says, assert_same_bits, command, finished, refused
from tests.test_resume import RUN

OTHER = ["backend=other", "backend.name=counting", "backend.module=tests.counting_backend"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "local-sgd"])
def test_its_group_moves_what_training_sends(strategy: str, tmp_path: Path) -> None:
    line = [*RUN, f"parallel={strategy}", "launch.nproc_per_node=2", "trainer.eval_every=null", "checkpoint.every=null"]
    folder = tmp_path / "counts"
    folder.mkdir()
    other = finished(*line, *OTHER, root=tmp_path / "other", before=lambda: os.environ.update(COUNTING_BACKEND=str(folder)))
    assert_same_bits(other, finished(*line, root=tmp_path / "gloo"))
    assert len((folder / "allreduce").read_text()) >= 2 * (21 if strategy == "ddp" else 3)


@pytest.mark.slow
def test_a_strategy_whose_collectives_it_lacks_is_refused_before_the_start() -> None:
    line = [*RUN, *OTHER, "parallel=fsdp", "launch.nproc_per_node=2", "rehearse=true"]
    said = refused(*line)
    assert "parallel: a step on 2 processes fails with this model" in said
    assert "(parallel=zero; " in said  # which only sums and broadcasts


def test_what_is_not_there_is_refused_before_the_start(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        ended = command(*RUN, "parallel=ddp", "launch.nproc_per_node=2", *words, root=tmp_path / "runs")
        assert ended.code == 78
        return ended.output

    assert refused("backend=other", "backend.name=xccl", "backend.module=no_such_package") == Says(
        "backend.name: no_such_package cannot be imported: ModuleNotFoundError ..."
    )
    assert refused("backend=other", "backend.name=absent", "backend.module=tests.counting_backend") == Says(
        "backend.name: tests.counting_backend registers no back end absent ... counting ..."
    )
    assert refused("backend=other") == Says("backend.name: null ... backend.module=PACKAGE")
    assert refused("backend.name=xccl") == Says("backend.name: xccl ... gloo ... backend=other ... backend.module=PACKAGE")
    assert refused("backend=other", "backend.name=gloo", "backend.module=tests.counting_backend") == Says(
        "backend.name: gloo, but backend.module=tests.counting_backend ..."
    )
