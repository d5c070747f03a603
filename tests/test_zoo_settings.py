"""Precision, compilation and recomputation on models that nobody here wrote: they train, resume to the same bits, are evaluated."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Ended, assert_close, assert_same_bits, checked, command, finished, once
from tests.test_evaluate import evaluated, measured
from tests.test_resume import after_step, crash
from tests.test_zoo import line
from tests.zoo import make

# what is set, the precision of a plain run that computes the same, and how far the losses may be from its
SETTINGS = {
    "bf16": (["precision=bf16"], "fp32", 0.05),
    "fp16": (["precision=fp16"], "fp32", 0.05),
    "compiled": (["precision=fp32", "trainer.compile=true"], "fp32", 1e-3),
    "recomputed": (["precision=fp64", "trainer.activation_checkpointing=true"], "fp64", 1e-10),
}
MODELS = ["hf llama", "hf bert", "timm vit", "timm resnet", "nanogpt", "peft lora"]
NOT_FINITE = ("timm resnet", "bf16")  # nor in a plain loop: what torch's BatchNorm of 4 numbers gives in bf16 on a CPU
DROPS = ("hf bert", "nanogpt")  # dropout draws other numbers in a compiled program, the same under every strategy
STRATEGIES = {
    "single": [],
    "ddp": ["parallel=ddp", "launch.nproc_per_node=2"],
    "fsdp": ["parallel=fsdp", "launch.nproc_per_node=2"],
}
CELLS = [  # each model meets each strategy once, and each setting each strategy twice
    ("torchvision shufflenet" if (model, setting) == NOT_FINITE else model, setting, [*STRATEGIES][(first + second) % 3])
    for first, model in enumerate(MODELS) for second, setting in enumerate(name for name in SETTINGS if name != "compiled")
]  # fmt: skip
QUICK = [("hf llama", "bf16", "fsdp"), ("timm resnet", "fp16", "ddp"), ("hf bert", "recomputed", "ddp")]


def words_of(model: str, *settings: str) -> list[str]:
    return [*(word for word in line(model) if not word.startswith("precision=")), *settings, "checkpoint.every=2"]


def plain(model: str, precision: str) -> Ended:
    make(model)
    words = words_of(model, f"precision={precision}")
    return once(*words)


def check(model: str, setting: str, strategy: str, *, expected: Ended, compiled: Path, folder: Path) -> float:
    """Kill a run, go on with it, run it whole, evaluate it. What it compiles, it has from `compiled`, and leaves there.

    Return the loss of the first step.
    """
    settings, _, tolerance = SETTINGS[setting]
    words = words_of(model, *settings, *STRATEGIES[strategy])
    where = Path("default", checked(*words).run.id, "compiled")
    if compiled.exists():
        shutil.copytree(compiled, folder / "cut" / where)
    assert command(*words, root=folder / "cut", before=after_step(3, crash), timeout_s=300).code < 0
    programs = compiled_at(folder / "cut")
    assert bool(programs) == (setting == "compiled")
    cut = finished(*words, root=folder / "cut", timeout_s=300)
    assert compiled_at(folder / "cut") == programs
    if programs:
        shutil.copytree(folder / "cut" / where, folder / "whole" / where)
        shutil.copytree(folder / "cut" / where, compiled, dirs_exist_ok=True)
    whole = finished(*words, root=folder / "whole", timeout_s=300)
    assert_same_bits(cut, whole)
    if setting == "recomputed":
        assert_close(whole, expected)
    ours, theirs = ([row["loss"] for row in run.rows if row["split"] == "train"] for run in (whole, expected))
    within = 0.02 if setting == "compiled" and model in DROPS else tolerance
    assert ours[0] == pytest.approx(theirs[0], rel=within) and all(map(math.isfinite, ours))

    row = evaluated(whole.directory, *STRATEGIES[strategy], root=folder / "none")
    assert row["loss"] == pytest.approx(measured(whole, step=3, split=row["split"])["loss"], rel=1e-5)
    return float(ours[0])


def compiled_at(root: Path) -> dict[str, int]:
    """Return the compiled programs below a directory, each with its time."""
    return {str(file): file.stat().st_mtime_ns for file in root.glob("**/*.so")}


Plain = Callable[[str, str], Ended]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a C++ compiler does most of it: two minutes alone, more beside others
def test_compiled_it_does_so_under_each_strategy(tmp_path: Path) -> None:
    losses, model = [], "nanogpt"
    for strategy in STRATEGIES:  # one after the other: each takes what those before it have compiled
        expected, folder = plain(model, "fp32"), tmp_path / strategy
        losses.append(check(model, "compiled", strategy, expected=expected, compiled=tmp_path / "compiled", folder=folder))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
