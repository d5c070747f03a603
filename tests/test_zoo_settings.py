"""Compilation of a model that nobody here wrote: it trains under each strategy, resumes to the same bits, is evaluated."""

import math
import shutil
from pathlib import Path

import pytest

from tests.harness import Ended, assert_same_bits, command, finished, once
from tests.test_evaluate import evaluated, measured
from tests.test_resume import after_step, crash
from tests.test_zoo import line
from tests.zoo import make

MODEL = "nanogpt"  # its dropout draws other numbers in a compiled program, the same under every strategy
STRATEGIES = {
    "single": [],
    "ddp": ["parallel=ddp", "launch.nproc_per_node=2"],
    "fsdp": ["parallel=fsdp", "launch.nproc_per_node=2"],
}


def words_of(*settings: str) -> list[str]:
    words = [*(word for word in line(MODEL) if not word.startswith("precision=")), "precision=fp32", "checkpoint.every=2"]
    return [*words, *settings]


def check(strategy: str, *, expected: Ended, compiled: Path, folder: Path) -> float:
    """Kill a run, go on with it, run it whole, evaluate it. What it compiles, it has from `compiled`, and leaves there.

    Return the loss of the first step.
    """
    words = words_of("trainer.compile=true", *STRATEGIES[strategy])
    if compiled.exists():
        shutil.copytree(compiled, folder / "cut")
    assert command(*words, root=folder / "cut", before=after_step(3, crash), timeout_s=300).code < 0
    programs = compiled_at(folder / "cut")
    cut = finished(*words, root=folder / "cut", timeout_s=300)
    assert programs and compiled_at(folder / "cut") == programs
    (programs_of_runs,) = (folder / "cut").glob(".compiled-*")
    for root in (folder / "whole", compiled):
        shutil.copytree(programs_of_runs, root / programs_of_runs.name, dirs_exist_ok=True)
    whole = finished(*words, root=folder / "whole", timeout_s=300)
    assert_same_bits(cut, whole)
    ours, theirs = ([row["loss"] for row in run.rows if row["split"] == "train"] for run in (whole, expected))
    assert ours[0] == pytest.approx(theirs[0], rel=0.02) and all(map(math.isfinite, ours))
    row = evaluated(whole.directory, *STRATEGIES[strategy], root=folder / "none")
    assert row["loss"] == pytest.approx(measured(whole, step=3, split=row["split"])["loss"], rel=1e-5)
    return float(ours[0])


def compiled_at(root: Path) -> dict[str, int]:
    """Return the compiled programs below a directory, each with its time."""
    return {str(file): file.stat().st_mtime_ns for file in root.glob("**/*.so")}


@pytest.mark.slow
@pytest.mark.timeout(900)  # a C++ compiler does most of it: two minutes alone, more beside others
def test_compiled_it_does_so_under_each_strategy(tmp_path: Path) -> None:
    losses = []
    make(MODEL)
    for strategy in STRATEGIES:  # one after the other: each takes what those before it have compiled
        expected = once(*words_of())
        losses.append(check(strategy, expected=expected, compiled=tmp_path / "compiled", folder=tmp_path / strategy))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
