"""The dry build's checks of an optimizer: it is built without storage, and takes a step with small parameters."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from framework.build import components
from framework.build.schedules import EACH_STEP, schedule
from framework.checkpoint.plain_state import NotSerializable, changed_values, encoded
from framework.config.schema import Node
from framework.optim.optimizers import Trainable, check_groups, hidden_matrices, rules_of, trainable
from framework.optim.turns import check_turns, turns_of
from framework.optim.update import averages_itself, group_values
from framework.preflight.refused import Refused, refusing
from framework.runtime.problem import Problem, shown


def require_turns(model: nn.Module, optimizer: Node, *, precision: str, divergence: str) -> None:
    """Refuse turns that do not divide the trained parameters, and options that would skip or scale a part of a step."""
    with refusing(ValueError, to=lambda error: Problem.of_line(f"optimizer.{error}")):
        if not (turns := turns_of(optimizer)):
            return
        check_turns(turns, names=[item.name for item in trainable(model, hidden=())])
    if precision == "fp16":
        raise Refused(
            "precision", "fp16, but its loss scale needs whole steps, and optimizer.turns divides them", "bf16 or fp32"
        )
    if divergence == "skip":
        what = "skip, but a step of several turns can fail in the middle, after an update"
        raise Refused("trainer.divergence.action", what, "raise or rollback")


def require_optimizer(model: nn.Module, optimizer: Node, scheduler: Node) -> torch.optim.Optimizer:
    """Return the optimizer. Refuse one that cannot be built or take a step, or with a state that a checkpoint cannot hold."""
    trained = trainable(model, hidden=hidden_matrices(model))
    with refusing(Exception, SystemExit, to=partial(Problem.of_error, "optimizer")):  # a user's optimizer may raise anything
        build = components.optimizer_builder(optimizer)
        built = build(trained)
        if any(group.get("lr", 0.0) is None for group in built.param_groups):
            what = f"null, but the run's schedule sets the rate of each step, and {type(built).__name__} chooses its own then"
            raise Refused("optimizer.lr", what, "a number; for an Adafactor of transformers, with relative_step=false, too")
        if groups := optimizer.get("groups"):
            alone: Node = {name: value for name, value in optimizer.items() if name != "groups"}
            with_options = built
            with suppress(Exception):  # it needs an option in its groups
                with_options = components.optimizer_builder(alone)(trained)
            options = {name: value for group in with_options.param_groups for name, value in group.items() if name != "params"}
            check_groups(groups, names=[item.name for item in trained], options=options)
        if fault := _step_fault(build(_small(trained, optimizer))):
            keeps = "an optimizer that keeps numbers, text and tensors, in lists or dictionaries"
            expected = "another optimizer, such as AdamW; for SAM, part=sharpness" if fault == _CLOSURE else keeps
            raise Refused("optimizer", f"{type(built).__name__} {fault}", expected)
    with refusing(Exception, to=partial(Problem.of_error, "scheduler")):
        lr, groups = optimizer.get("lr", built.param_groups[0]["lr"]), built.param_groups
        schedule(scheduler, total_steps=100, lr=lr, groups=groups, order=EACH_STEP)(1)
    return built


def _small(trained: Sequence[Trainable], optimizer: Node) -> list[Trainable]:
    """Return small parameters in the place of the trained ones: one for each number of dims, turn, and set of groups."""
    rules, turns, found = rules_of(optimizer.get("groups") or []), turns_of(optimizer), dict[tuple[int, ...], Trainable]()
    for item in trained:
        kind = (item.parameter.ndim, *(holds(item) for holds, _ in rules), *(turn.has(item.name) for turn in turns))
        small = nn.Parameter(torch.zeros([min(size, 2) for size in item.parameter.shape], dtype=item.parameter.dtype))
        found.setdefault(kind, item._replace(parameter=small))
    return list(found.values())


_CLOSURE = "needs a closure, which computes the loss several times, but a step has only one backward pass"


def _step_fault(optimizer: torch.optim.Optimizer) -> str:
    """Take a step. Return what a checkpoint would lose of the optimizer's state, or an empty text."""
    parameters = inspect.signature(type(optimizer).step).parameters
    if "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty:
        return _CLOSURE
    if averages_itself(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    before = group_values(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        if "closure" in parameters and ("NoneType" in str(error) or "closure" in str(error)):
            return _CLOSURE
        raise
    if odd := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        return f"keeps {shown(odd[0])} in its state, an entry that belongs to no parameter, and no checkpoint holds it"
    kept = [*changed_values(optimizer, before), *optimizer.state.values()]
    for key, value in (item for values in kept for item in values.items()):
        try:
            if not isinstance(value, Tensor):
                encoded(value)
        except NotSerializable as error:
            return f"keeps {key} as {error}, which no checkpoint holds"
    return ""
