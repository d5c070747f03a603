"""What the benchmarks count, as opposed to time, is checked here."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import slow_but

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["fsdp, 2"], ["ddp, 2", "zero, 4", "fsdp, 2", "hsdp, 2 x 2"]))
def test_a_process_holds_what_the_arithmetic_says(strategy: str) -> None:
    memory = load("memory")
    overrides, expected = memory.STRATEGIES[strategy]
    num_parameters, ranks = memory.measure(overrides)
    assert sum(ranks) / len(ranks) / num_parameters == pytest.approx(expected, rel=0.1)
