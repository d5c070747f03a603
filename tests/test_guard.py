"""What a run looks at before each checkpoint: what has begun to change, what has moved, what ranks have in common."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from framework.distributed.agreement import Agreement
from framework.modules.aside import digests
from framework.modules.structure import in_eval_mode
from framework.runtime.exits import Unfit
from framework.training import guard
from framework.training.guard import Guard, ReplicasDiffer
from tests import faulty
from tests.harness import finished

ALONE = SimpleNamespace(rank=0, world_size=1, agreement=Agreement(None))


def looking_at(module: nn.Module, world: Any = ALONE, **others: object) -> Guard:
    holders = {"model": module, **{f"part.{name}": part for name, part in others.items()}}
    return Guard(holders, module=module, world=world, own=["tests.faulty"], without=[])


def trained(module: nn.Module, world: Any = ALONE, steps: int = 10) -> Guard:
    """Run steps, with an evaluation and a save after every second of them."""
    guard, x = looking_at(module, world), torch.rand(4, 3, 8, 8)
    for step in range(1, steps + 1):
        module(x)
        guard.step_taken()
        if step % 2 == 0:
            guard.evaluating()
            with in_eval_mode(module), torch.no_grad():
                module(x)
            guard.evaluated("val")
            guard.saving(dict)
    return guard


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (faulty.LateEntry, "model.stats['n']"),
        (faulty.LateThreshold, "model.threshold"),
        (faulty.LateData, "model.hidden"),
        (faulty.LateTable, "model.table"),
        (faulty.Retells, None),
        (faulty.Net, None),
    ],
)
def test_what_begins_late_is_warned_of_once(kind: type[nn.Module], place: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=guard.LOGGER.name):
        guard.LOGGER.addHandler(caplog.handler)
        trained(kind())
        guard.LOGGER.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if "for the first time" in record.getMessage()]
    assert [text.split(" has changed")[0] for text in dict.fromkeys(said)] == ([] if place is None else [place])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_warn_once_and_go_on(strategy: str, tmp_path: Path) -> None:
    line = ["model._target_=tests.faulty.LateEntry", "dataset=synthetic", "dataset.image_size=8", "global_batch_size=8",
            "trainer.max_epochs=null", "trainer.max_steps=10", "checkpoint.every=2", f"parallel={strategy}", "launch.nproc_per_node=2"]  # fmt: skip
    ended = finished(*line, "rehearse=true", root=tmp_path / "runs")
    assert ended.output.count("model.stats['n'] has changed for the first time since the start") == 1, ended.output


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

    def judged(self, value: Any, judge: Any) -> Any:
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


class Part:
    def __init__(self) -> None:
        self.value: Any = None


@pytest.mark.parametrize(
    ("value", "declared", "is_known"),
    [
        (np.arange(4.0), torch.arange(4.0, dtype=torch.float64), True),
        (np.arange(4.0), [0.0, 1.0, 2.0, 3.0], True),
        (torch.arange(4), [0, 1, 2, 3], True),
        (torch.tensor(2.5), 2.5, True),
        (7, torch.tensor(7), True),
        ({"a": [1, 2]}, {"b": [2, 1]}, True),
        (np.arange(4.0), torch.ones(4, dtype=torch.float64), False),
        (7, 8, False),
    ],
    ids=str,
)
def test_what_a_part_declares_in_another_form_is_known(
    value: object, declared: object, is_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    part, module = Part(), faulty.Net()
    guarding = looking_at(module, mine=part)
    for _ in range(3):
        guarding.step_taken()
    part.value = value

    def state() -> Mapping[str, Iterable[object]]:
        return {"part.mine": [declared]}

    guard.LOGGER.addHandler(caplog.handler)
    guarding.saving(state)
    guard.LOGGER.removeHandler(caplog.handler)
    assert ("part.mine.value" in caplog.text) != is_known, caplog.text


def test_what_has_no_numbers_has_no_digest_of_them() -> None:
    class Sharded:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise RuntimeError(".numpy() is not supported for tensor subclasses")

    assert digests([[0.5, Sharded()]]) == digests([[0.5, Sharded()]])
