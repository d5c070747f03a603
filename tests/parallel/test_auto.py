"""parallel=auto: what it chooses, and that the choice changes nothing."""

from pathlib import Path

import pytest
from torch import nn

from framework.parallel.auto import choose
from tests.harness import assert_close, finished
from tests.test_conformance import MODELS, RUN


@pytest.mark.parametrize(
    ("num_ranks", "budget", "choice", "held"),
    [
        (1, 0, "single", 4 * 400 + 80),
        (4, 1700, "ddp", 4 * 400 + 80),
        (4, 1600, "zero", 2 * 400 + 80 + 200),
        (4, 1000, "fsdp", 420),
        (4, 10, "fsdp", 420),
    ],
)
def test_the_plainest_that_fits_is_chosen(num_ranks: int, budget: float, choice: str, held: float) -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 2, bias=False))
    model[1].requires_grad_(False)
    assert choose(model, num_ranks=num_ranks, budget=budget) == (choice, held)


@pytest.mark.slow
def test_whatever_is_chosen_computes_the_same(tmp_path: Path) -> None:
    one = finished(*RUN, *MODELS["mlp"], "parallel=auto", root=tmp_path / "one")
    assert "parallel=auto: single, with " in one.output
    kib = 1 / 2**20
    size = 8 * one.summary["parameters"] / 2**10 * kib  # GiB of the parameters, in float64
    for choice, memory in {"ddp": 4.1 * size, "zero": 3.1 * size, "fsdp": 2.5 * size}.items():
        line = [*RUN, *MODELS["mlp"], "parallel=auto", f"parallel.memory_gib={memory:.12f}", "launch.nproc_per_node=2"]
        run = finished(*line, root=tmp_path / choice)
        assert run.output.count(f"parallel=auto: {choice}, with ") == 1
        assert_close(run, one)
