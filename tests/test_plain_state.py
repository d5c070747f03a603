"""What optimizers and modules keep besides tensors: saved, resumed to the same bits, moved between strategies, or refused."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.canonical import restore, state_tensors
from framework.checkpoint.plain_state import NotSerializable, TrainingState, decoded, encoded, plain_state_of_all
from framework.checkpoint.state import PlainState
from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.modules.tensors import tensors_in
from tests.harness import assert_close, assert_same_bits, command, finished, once, refused
from tests.test_evaluate import evaluated, measured
from tests.test_resume import after_step, assert_survives_a_kill, crash, preempted

RUN = ["dataset=synthetic", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8",
       "model=mlp", "model.dim=12", "model.num_layers=2", "global_batch_size=8", "micro_batch_size=2", "precision=fp64",
       "scheduler=constant", "trainer.max_epochs=null", "trainer.max_steps=9", "trainer.eval_every=2", "trainer.log_every=1",
       "checkpoint.every=3"]  # fmt: skip
OPTIMIZERS = {
    "other types": ["optimizer._target_=tests.faulty.OfOtherTypes", "optimizer.lr=0.1"],
    "numbers everywhere": ["optimizer._target_=tests.faulty.Counting", "optimizer.lr=0.01"],
    "factored": ["optimizer._target_=tests.faulty.Factored", "optimizer.lr=0.1"],
    "schedule-free": ["optimizer._target_=schedulefree.AdamWScheduleFree", "optimizer.lr=0.01", "optimizer.warmup_steps=2"],
    "schedule-free SGD": ["optimizer._target_=schedulefree.SGDScheduleFree", "optimizer.lr=0.1"],
    "Prodigy": ["optimizer._target_=prodigyopt.Prodigy", "optimizer.lr=1.0"],
    "D-Adaptation": ["optimizer._target_=dadaptation.DAdaptAdam", "optimizer.lr=1.0"],
}
STRATEGIES = {
    "single": [],
    "ddp 2": ["parallel=ddp", "launch.nproc_per_node=2"],
    "fsdp 2": ["parallel=fsdp", "launch.nproc_per_node=2"],
    "pipeline 2": ["parallel=pipeline", "launch.nproc_per_node=2"],
    "zero 2": ["parallel=zero", "launch.nproc_per_node=2"],
}
SUMS_OVER_ALL = ("Prodigy", "D-Adaptation")  # they estimate one number from all parameters at once


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "optimizer"), [*zip(itertools.cycle(["fsdp 2", "single", "ddp 2"]), OPTIMIZERS)])
def test_killed_it_ends_with_the_same_bits(optimizer: str, strategy: str, tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS[optimizer], *STRATEGIES[strategy]]
    if optimizer in SUMS_OVER_ALL and strategy == "fsdp 2":
        assert any(said.startswith("optimizer: ") for said in refused(*line, "rehearse=true").splitlines())
        return
    assert_survives_a_kill(*line, at=8, root=tmp_path)


CHANGES = [("single", "fsdp 2"), ("fsdp 2", "pipeline 2"), ("pipeline 2", "ddp 2")]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["numbers everywhere", "schedule-free"])
@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_it_goes_on_under_another_strategy(optimizer: str, first: str, second: str, tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS[optimizer]]
    begun = preempted(*line, *STRATEGIES[first], at=4, root=tmp_path / "begun")
    ended = finished(*line, *STRATEGIES[second], f"run.resume={begun.directory}", root=tmp_path / "ended")
    assert_close(ended, once(*line))


@pytest.mark.slow
def test_evaluations_change_nothing_of_an_optimizer_that_averages(tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS["schedule-free"], "checkpoint.every=null"]
    often = finished(*line, "trainer.eval_every=1", root=tmp_path / "often")
    seldom = finished(*line, "trainer.eval_every=null", root=tmp_path / "seldom")
    assert all(torch.equal(often.weights[name], tensor) for name, tensor in seldom.weights.items())
    last = [row for row in often.rows if row["split"] == "test"]
    assert last == [row for row in seldom.rows if row["split"] == "test"]


def test_a_checkpoint_is_evaluated_as_training_does(tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS["schedule-free"], "trainer.max_steps=8", "checkpoint.keep_last=9"]
    ended = finished(*line, "checkpoint.every=4", root=tmp_path / "runs")
    row = evaluated(ended.directory, "eval.split=val", "run.checkpoint=4", root=tmp_path / "evaluations")
    assert row["loss"] == pytest.approx(measured(ended, step=4, split="val")["loss"], abs=1e-12)


@pytest.mark.slow
def test_the_extra_state_of_modules_is_saved_and_given_back(tmp_path: Path) -> None:
    line = [*RUN[:5], "model._target_=tests.faulty.Extra", *RUN[8:], "micro_batch_size=null"]
    whole = finished(*line, root=tmp_path / "whole")
    assert command(*line, root=tmp_path / "cut", before=after_step(5, crash)).code < 0
    cut = finished(*line, root=tmp_path / "cut")
    assert_same_bits(cut, whole)
    row = evaluated(cut.directory, "run.checkpoint=final", root=tmp_path / "evaluations")
    assert row["loss"] == pytest.approx(whole.summary["metrics"]["test"]["last"]["loss"], abs=1e-12)


# --- the values


VALUES = [None, True, 3, -0.1, math.inf, "text", [1, (2.5, "x")], {"a": {1: None}}, {}, torch.tensor([0.1, math.inf], dtype=torch.float64),
          torch.tensor(7), torch.zeros(2, 0), torch.tensor([[True, False]]), torch.ones(2, 3).T]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=map(repr, VALUES))
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = decoded(json.loads(json.dumps(encoded(value), allow_nan=False)))
    if isinstance(value, torch.Tensor):
        assert back.dtype == value.dtype and torch.equal(back, value) and back.shape == value.shape
        assert back.stride() == value.stride()
    else:
        assert back == value and type(back) is type(value)


def test_the_order_of_dims_in_memory_comes_back_because_sums_depend_on_it(tmp_path: Path) -> None:
    def made(*, is_used: bool) -> TrainingState:
        net, task = torch.nn.Linear(3, 4), torch.nn.Module()
        net.register_buffer("basis", torch.ones(2, 3).T if is_used else torch.ones(3, 2))
        task.register_buffer("plain", torch.ones(3, 2))
        optimizer = torch.optim.SGD(net.parameters())
        if is_used:
            optimizer.state[net.weight] = {
                "like": torch.ones(3, 4).T,
                "other": torch.ones(5, 2, 6).permute(2, 0, 1),
                "plain": torch.ones(2, 3),
            }
            optimizer.state[net.bias] = {"few": [torch.ones(2, 3).T]}
        return TrainingState(net, optimizer, None, task, None)

    world, saved, fresh = World.alone(), made(is_used=True), made(is_used=False)
    store = CheckpointStore(tmp_path, world=world, keep_last=1, keep_best=0, mode="min")
    store.save(1, state_tensors(saved), {})
    kept = plain_state_of_all(saved, initial=[{}], world=world).model_dump_json()
    restore(next(store.directory.iterdir()), PlainState.model_validate_json(kept), fresh, world=world)
    for of, found in zip(*(list(held.optimizer.state.values()) for held in (saved, fresh))):
        assert [one.stride() for one in tensors_in(found)] == [one.stride() for one in tensors_in(of)]
    assert fresh.module.get_buffer("basis").stride() == (1, 3) and torch.equal(
        fresh.module.get_buffer("basis"), torch.ones(3, 2)
    )


@pytest.mark.parametrize("value", [{1, 2}, object(), print, torch.zeros(100_000), 1j, [print]], ids=lambda v: type(v).__name__)
def test_what_is_no_plain_value_is_not_kept(value: Any) -> None:
    with pytest.raises(NotSerializable):
        encoded(value)


@pytest.mark.parametrize(
    "data", [{"tensor": [1], "shape": [1], "dtype": "load"}, {"float": 3}, {"x": 1}, {"tuple": 5}, {"list": None}]
)
def test_what_a_stranger_writes_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="not a value that a run writes"):
        decoded(data)
