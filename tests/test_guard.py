"""What a run looks at before each checkpoint: whether ranks have the same weights."""

from types import SimpleNamespace
from typing import Any

import pytest

from framework.distributed.agreement import Agreement
from framework.training.guard import ReplicasDiffer, require_equal_replicas
from tests.faulty import Net


class Twice(Agreement):
    """Another rank that has the same, but for its weights, which are `factor` times these."""

    def __init__(self, factor: float) -> None:
        super().__init__(None)
        self.factor = factor

    def judged(self, value: Any, judge: Any) -> Any:
        return judge({0: value, 1: {name: [norm * self.factor, total] for name, (norm, total) in value.items()}})


def two(factor: float) -> Any:
    return SimpleNamespace(rank=0, world_size=2, agreement=Twice(factor))


def test_replicas_may_differ_by_rounding_alone() -> None:
    require_equal_replicas(Net(), world=two(1 + 1e-6))
    with pytest.raises(ReplicasDiffer, match="first.weight is not the same on ranks 0 and 1"):
        require_equal_replicas(Net(), world=two(1.01))
