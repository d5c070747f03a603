"""What a run looks at before each checkpoint: what a restore could not bring back, and what ranks have in common."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.distributed.agreement import Agreement
from framework.modules.structure import in_eval_mode
from framework.runtime.exits import Unfit
from framework.training.guard import Guard, ReplicasDiffer
from tests import faulty

ALONE = SimpleNamespace(rank=0, world_size=1, agreement=Agreement(None))


def trained(module: nn.Module, world: Any = ALONE, steps: int = 10) -> Guard:
    """Run steps, with an evaluation and a save after every second of them."""
    guard, x = Guard(module, world=world, watches_frozen=True), torch.rand(4, 3, 8, 8)
    for step in range(1, steps + 1):
        module(x)
        guard.step_taken()
        if step % 2 == 0:
            with in_eval_mode(module), torch.no_grad():
                module(x)
            guard.saving()
    return guard


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (faulty.LaterBuffer, "late is float32 [12] now, and was missing at the start"),
        (faulty.GrowingBuffer, "history is float32 [2, 12] now, and was float32 [1, 12] at the start"),
    ],
)
def test_a_model_that_no_run_could_continue_is_not_saved(kind: type[nn.Module], said: str) -> None:
    with pytest.raises(Unfit, match="model: ") as refused:
        trained(kind())
    assert said in str(refused.value)


class Twice(Agreement):
    """Another rank that has the same, but for its weights, which are `factor` times these."""

    def __init__(self, factor: float) -> None:
        super().__init__(None)
        self.factor = factor

    def decide_on_rank_0(self, value: Any, judge: Any) -> Any:
        fault, sketches = value
        theirs = {name: [norm * self.factor, total] for name, (norm, total) in sketches.items()}
        return judge({0: value, 1: (fault, theirs)})


def two(factor: float) -> Any:
    return SimpleNamespace(rank=0, world_size=2, agreement=Twice(factor))


def test_a_frozen_weight_that_a_forward_moves_is_refused_on_several_processes() -> None:
    trained(faulty.LateTeacher())
    with pytest.raises(Unfit, match="teacher.weight, which is frozen, has changed since the start"):
        trained(faulty.LateTeacher(), two(1.0))


def test_replicas_may_differ_by_rounding_alone() -> None:
    trained(faulty.Net(), two(1 + 1e-6))
    with pytest.raises(ReplicasDiffer, match="first.weight is not the same on ranks 0 and 1"):
        trained(faulty.Net(), two(1.01))
