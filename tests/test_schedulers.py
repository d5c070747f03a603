"""Schedulers of torch and of other libraries: the rates and the other options that they have in a script's own loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as of_torch
from torch import nn

from framework.build.schedules import schedule as schedule_of
from framework.build.training import Builder
from framework.config.schema import Node
from framework.data.order import Order
from framework.distributed.world import World
from framework.optim.optimizers import Trainable
from framework.optim.precision import PRECISIONS
from framework.optim.schedules import Schedule
from framework.optim.update import Update
from framework.preflight.optimizer import require_optimizer
from framework.preflight.refused import Refused
from tests.harness import Says, checked, command, finished, refused

TORCH = "torch.optim.lr_scheduler"
STEPS, EPOCH = 12, 4  # steps in all, and in an epoch


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    """Warm-up and then a cosine, as a function that builds them."""
    warmup, cosine = of_torch.LinearLR(optimizer, 0.1, total_iters=3), of_torch.CosineAnnealingLR(optimizer, 9)
    return of_torch.SequentialLR(optimizer, [warmup, cosine], [3])


WARMUP = [
    {"_target_": f"{TORCH}.LinearLR", "start_factor": 0.1, "total_iters": 3},
    {"_target_": f"{TORCH}.CosineAnnealingLR", "T_max": 9},
]
NODES: dict[str, tuple[Node, Callable[[Any], Any]]] = {
    "step": ({"_target_": f"{TORCH}.StepLR", "step_size": 2, "gamma": 0.5}, lambda o: of_torch.StepLR(o, 2, 0.5)),
    "nodes in a node": ({"_target_": f"{TORCH}.SequentialLR", "schedulers": WARMUP, "milestones": [3]}, sequence),
    "partial nodes": ({"_target_": f"{TORCH}.SequentialLR", "schedulers": [{**one, "_partial_": True} for one in WARMUP], "milestones": [3]}, sequence),
    "a function of the optimizer": ({"_target_": "tests.test_schedulers.sequence"}, sequence),
    "a chain": ({"_target_": f"{TORCH}.ChainedScheduler", "schedulers": WARMUP[:1]}, lambda o: of_torch.LinearLR(o, 0.1, total_iters=3)),
    "a cycle": ({"_target_": f"{TORCH}.CyclicLR", "base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}, lambda o: of_torch.CyclicLR(o, 0.01, 0.1, 3)),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def by_hand(make: Callable[[Any], Any], optimizer: torch.optim.Optimizer, *, every: str) -> list[dict[str, Any]]:
    """Return the options of each step in a loop that calls `scheduler.step()` after each step or epoch."""
    scheduler, found = make(optimizer), []
    for step in range(STEPS):
        (group,) = optimizer.param_groups
        found.append({name: group[name] for name in ("lr", "momentum", "betas") if name in group})
        optimizer.step()
        if every == "step" or (step + 1) % EPOCH == 0:
            scheduler.step()
    return found


def made(node: Node, optimizer: torch.optim.Optimizer, *, total_steps: int = STEPS) -> Schedule:
    order = Order(num_samples=EPOCH * 8, global_batch_size=8, seed=0, drop_last=False)
    groups = optimizer.param_groups
    return schedule_of(node, total_steps=total_steps, lr=0.1, groups=groups, order=order)


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", NODES)
def test_a_scheduler_sets_in_each_step_what_it_sets_in_a_script(name: str, kind: str, every: str) -> None:
    node, make = NODES[name]
    one, other = (OPTIMIZERS[kind]([nn.Parameter(torch.zeros(2))]) for _ in range(2))
    schedule, start = made({**node, "every": every}, one), {key: one.param_groups[0].get(key) for key in ("momentum", "betas")}
    for step in reversed(range(STEPS)):  # a pure function of the step
        expected = by_hand(make, OPTIMIZERS[kind]([nn.Parameter(torch.zeros(2))]), every=every)[step]
        assert 0.1 * schedule(step) == pytest.approx(expected["lr"], rel=1e-15, abs=0)
        assert {**start, **schedule.options(step, 0)} == {**start, **expected}
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"] == 0.1


class Halving(of_torch.LRScheduler):
    """Sets a rate that is no multiple of a group's own, and another option."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        return [max(0.02, base * 0.5**self.last_epoch) for base in self.base_lrs]


OF_GROUPS: dict[str, tuple[Node, Callable[[Any], Any]]] = {
    "one cycle": ({"_target_": f"{TORCH}.OneCycleLR", "max_lr": 0.1}, lambda o: of_torch.OneCycleLR(o, 0.1, total_steps=STEPS)),
    "a cycle": ({"_target_": f"{TORCH}.CyclicLR", "base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3, "every": "step"}, lambda o: of_torch.CyclicLR(o, 0.01, 0.2, 3)),
    "a least rate": ({"_target_": f"{TORCH}.CosineAnnealingLR", "T_max": 12, "eta_min": 0.02, "every": "step"}, lambda o: of_torch.CosineAnnealingLR(o, 12, 0.02)),
    "options": ({"_target_": "tests.test_schedulers.Halving", "every": "step"}, Halving),
    "a rate for each": ({"_target_": f"{TORCH}.OneCycleLR", "max_lr": [0.3, 0.1]}, lambda o: of_torch.OneCycleLR(o, [0.3, 0.1], total_steps=STEPS)),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_GROUPS)
def test_each_group_of_parameters_has_the_rate_and_options_of_a_script(name: str) -> None:
    def optimizer() -> torch.optim.Optimizer:
        groups = [
            {"params": [nn.Parameter(torch.zeros(2))], "lr": 0.01, "weight_decay": 0.3},
            {"params": [nn.Parameter(torch.ones(2))]},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)

    node, make = OF_GROUPS[name]
    ours, theirs = optimizer(), optimizer()
    trained = [Trainable(str(n), group["params"][0], False, False) for n, group in enumerate(ours.param_groups)]
    update = Update(ours, seed=0, peak_lr=0.1, schedule=made(node, ours), loss_scale=PRECISIONS["fp32"].loss_scale(), changes=[],
                    average=None, trained=trained)  # fmt: skip
    scheduler = make(theirs)
    for step in range(STEPS):
        for own, by_hand in zip(ours.param_groups, theirs.param_groups):
            own["params"][0].grad, by_hand["params"][0].grad = torch.ones(2), torch.ones(2)
        update.take(step, grad_norm=None)
        theirs.step()
        for own, by_hand in zip(ours.param_groups, theirs.param_groups):
            for option in ("lr", "momentum", "weight_decay"):
                assert own[option] == pytest.approx(by_hand[option], rel=1e-15), (step, option)
            assert torch.equal(own["params"][0], by_hand["params"][0])
        scheduler.step()


@pytest.mark.parametrize(
    ("node", "calls"),
    [({}, STEPS), ({"total_steps": None}, STEPS), ({"every": "epoch"}, STEPS // EPOCH), ({"epochs": 4, "steps_per_epoch": 5}, 20)],
    ids=["missing", "null", "epochs", "its own"],
)  # fmt: skip
def test_one_cycle_has_the_steps_of_the_run_unless_it_says_its_own(node: Node, calls: int) -> None:
    optimizer = OPTIMIZERS["sgd"]([nn.Parameter(torch.zeros(2))])
    schedule = made({"_target_": f"{TORCH}.OneCycleLR", "max_lr": 0.1, **node}, optimizer)
    expected = of_torch.OneCycleLR(OPTIMIZERS["sgd"]([nn.Parameter(torch.zeros(2))]), 0.1, total_steps=calls)
    for number in range(STEPS // EPOCH if "every" in node else STEPS):
        at = number * EPOCH if "every" in node else number
        assert 0.1 * schedule(at) == pytest.approx(expected.get_last_lr()[0], rel=1e-15)
        assert schedule.options(at, 0) == {name: expected.optimizer.param_groups[0][name] for name in ("lr", "momentum")}
        expected.optimizer.step()
        expected.step()


def test_a_function_of_transformers_builds_a_scheduler() -> None:
    optimizer = OPTIMIZERS["adam"]([nn.Parameter(torch.zeros(2))])
    schedule = made({"_target_": "transformers.get_linear_schedule_with_warmup", "num_warmup_steps": 3}, optimizer)
    assert [round(schedule(step) * 9, 9) for step in range(STEPS)] == [0, 3, 6, *range(9, 0, -1)]


def test_the_number_of_steps_that_the_run_gives_is_no_missing_key() -> None:
    target = "scheduler._target_=transformers.get_linear_schedule_with_warmup"
    line = ["model=mlp", target, "+scheduler.num_warmup_steps=3"]
    assert "num_training_steps" not in checked(*line).scheduler
    checked(*line, "+scheduler.num_training_steps=null")


def test_epochs_are_counted_by_their_steps_also_if_batches_grow() -> None:
    order = Order(num_samples=20, global_batch_size=8, seed=0, drop_last=False, grow=lambda seen: 4 if seen < 20 else 8)
    assert [order.epochs_before(step) for step in (9, *range(9))] == [2, 0, 0, 0, 0, 0, 1, 1, 1, 2]


def test_the_weights_are_those_of_the_script_with_its_momentum(tmp_path: Path) -> None:
    line = ["dataset=map_style", "dataset.train={_target_: tests.faulty_data.Points, n: 32}", "dataset.val={_target_: tests.faulty_data.Points, n: 4}",
            "dataset.test={_target_: tests.faulty_data.Points, n: 4}", "dataset.facts={num_classes: 4}", "model._target_=tests.faulty_data.Net",
            "optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1", "+optimizer.momentum=0.9", "global_batch_size=8", "precision=fp64",
            f"scheduler._target_={TORCH}.OneCycleLR", "+scheduler.max_lr=0.1", "trainer.max_epochs=3", "trainer.max_steps=null"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    assert "lr        4.00e-07 to 9.94e-02, 4.00e-07 in the last step" in ended.output
    build = Builder(checked(*line, "rehearse=false"), world=World.alone())
    model, source = build.model(), build.source("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = of_torch.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    loader = build.loader(source, "train", dp_rank=0, dp_size=1)
    for step, _ in zip(loader.train(0), range(STEPS)):
        (batch,) = step.micro_batches
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        scheduler.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, ended.weights[name], rtol=1e-12, atol=1e-14), name


class Drawn(of_torch.LRScheduler):
    def get_lr(self) -> list[float]:
        return [base * float(torch.rand(())) for base in self.base_lrs]


def test_a_scheduler_that_draws_is_refused_by_its_name() -> None:
    words = ["scheduler._target_=tests.test_schedulers.Drawn", "+scheduler.every=step", "rehearse=true"]
    assert refused("model=mlp", *words) == Says("scheduler: it has other rates each time ... function of the step ...")


def test_a_schedule_is_asked_for_all_steps_before_the_first(tmp_path: Path) -> None:
    words = [f"scheduler._target_={TORCH}.OneCycleLR", "+scheduler.max_lr=0.1", "+scheduler.total_steps=80"]
    ended = command("model=mlp", *words, "trainer.max_epochs=6", root=tmp_path / "runs")
    assert ended.code == 78 and "scheduler: it fails within the 120 steps of this run" in ended.output
    assert not list((tmp_path / "runs").glob("*/*/metrics.jsonl"))


def test_a_rate_that_vanishes_is_warned_of(tmp_path: Path) -> None:
    words = [f"scheduler._target_={TORCH}.StepLR", "+scheduler.step_size=1", "+scheduler.gamma=0.7", "trainer.max_epochs=3"]
    by_step = finished("model=mlp", *words, "+scheduler.every=step", root=tmp_path / "steps")
    assert "the learning rate is below 0.0001 of optimizer.lr from the middle of these 60 steps" in by_step.output
    by_epoch = finished("model=mlp", *words, "+scheduler.every=epoch", root=tmp_path / "epochs")
    assert "WARNING" not in by_epoch.output and "lr        9.80e-04 to 2.00e-03, 9.80e-04 in the last step" in by_epoch.output


# --- optimizers that need more than a list of vectors


class TwoKinds(torch.optim.SGD):
    """Its groups must say of which kind they are, as those of a public Muon with an AdamW inside."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        for group in (params := list(params)):
            if "kind" not in group:
                raise AssertionError
        super().__init__(params, lr=lr)


class OfMatrices(torch.optim.SGD):
    """Takes matrices only, as a public Muon."""

    def step(self, closure: Any = None) -> Any:
        if any(p.ndim < 2 for group in self.param_groups for p in group["params"] if p.grad is not None):
            raise AssertionError
        return super().step(closure)


class OwnRate(torch.optim.SGD):
    """Chooses its rate itself, as an Adafactor does by default."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        super().__init__(params, lr=1.0)
        self.param_groups[0]["lr"] = lr


def problems(model: nn.Module, **node: Any) -> list[str]:
    schedule = {"_target_": "framework.optim.schedules.constant", "warmup_steps": 0}
    try:
        require_optimizer(model, node, schedule)
    except Refused as refused:
        return [str(problem) for problem in refused.problems]
    return []


def test_an_optimizer_is_built_with_its_groups_and_tried_on_parameters_of_the_models_dims() -> None:
    kinds = [{"match": "*.weight", "kind": "sign"}, {"match": "*", "kind": "plain"}]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert problems(model, _target_="tests.test_schedulers.TwoKinds", groups=kinds) == []
    (problem,) = problems(model, _target_="tests.test_schedulers.TwoKinds")
    assert problem.startswith("optimizer: AssertionError, at ") and "test_schedulers.py" in problem and "in __init__" in problem
    (problem,) = problems(model, _target_="tests.test_schedulers.OfMatrices")
    assert problem.startswith("optimizer: AssertionError, at ")
    for layer in model:
        layer.bias.requires_grad_(False)
    assert problems(model, _target_="tests.test_schedulers.OfMatrices") == []
    (problem,) = problems(model, _target_="tests.test_schedulers.OwnRate")
    assert problem == Says("optimizer.lr: null, but the run's schedule sets the rate ... OwnRate chooses its own ...")
    assert problems(model, _target_="tests.test_schedulers.OwnRate", lr=0.1) == []
    (problem,) = problems(model, _target_="torch.optim.SGD", groups=[{"match": "*", "momentun": 0.5}])
    assert problem == Says("optimizer.groups: momentun: unknown option (did you mean momentum?)")
