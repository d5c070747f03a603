"""The optimizers and schedulers that `configure_optimizers` returns, for the parameters that a strategy has."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from extras.from_lightning.driver import FromTrainer
from extras.from_lightning.module import driven, has_own
from extras.from_lightning.rates import PLACE, Configured
from framework.modules.tensors import by_mesh
from framework.optim.optimizers import Trainable

_ANY = 1000  # steps of a run, where only a scheduler that is not used needs their number
Make = Callable[[], Any]  # builds the LightningModule


def configured_by(module: Make, **known: Any) -> list[Configured]:
    """Return what `configure_optimizers` returns. `known` are values of `self.trainer`. ValueError for what cannot be used."""
    try:
        with torch.device("meta"):
            made = driven(module)
    except (NotImplementedError, RuntimeError):  # its constructor needs numbers
        made = driven(module)
    made.trainer = FromTrainer(**known, model=made)  # type: ignore[assignment]
    found = made.configure_optimizers()
    optimizers, schedulers = _sorted(found)
    if not optimizers:
        raise ValueError(f"module: configure_optimizers returns {type(found).__name__}, and no optimizer")
    of_optimizers = [id(entry["scheduler"].optimizer) for entry in schedulers]
    if len(set(of_optimizers)) < len(of_optimizers):
        raise ValueError("module: configure_optimizers returns two schedulers for one optimizer (ChainedScheduler of both)")
    own = {id(parameter): name for name, parameter in made.named_parameters()}
    by_optimizer = {id(entry["scheduler"].optimizer): entry for entry in schedulers}
    is_automatic, has_own_step = made.automatic_optimization, has_own(made, "lr_scheduler_step")
    steps_itself = not is_automatic or has_own_step or has_own(made, "optimizer_step")
    configured = []
    for optimizer in optimizers:
        names = [[own[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        entry = by_optimizer.get(id(optimizer), {})
        scheduler, interval = entry.get("scheduler"), entry.get("interval", "epoch")
        takes_metric = isinstance(scheduler, ReduceLROnPlateau) or (
            scheduler is not None and not has_own_step and _takes_metric(scheduler)
        )
        follows = entry.get("monitor", "") if takes_metric and is_automatic else None
        frequency = entry.get("frequency", 1)
        by_batch = interval == "step" and frequency > 1  # Lightning counts the batches of each epoch
        configured.append(Configured(optimizer, names, scheduler, interval, frequency, follows, steps_itself or by_batch))
    return configured


def _takes_metric(scheduler: Any) -> bool:
    return any(one.default is one.empty for one in inspect.signature(scheduler.step).parameters.values())


def _sorted(found: Any) -> tuple[list[torch.optim.Optimizer], list[Mapping[str, Any]]]:
    """Return the optimizers, and an entry for each scheduler, of any form that `configure_optimizers` may return."""
    if isinstance(found, torch.optim.Optimizer):
        return [found], []
    if isinstance(found, Mapping):
        scheduler = found.get("lr_scheduler")
        return [found["optimizer"]], [] if scheduler is None else [_entry(scheduler)]
    if isinstance(found, (list, tuple)) and len(found) == 2 and all(isinstance(part, (list, tuple)) for part in found):
        return list(found[0]), [_entry(scheduler) for scheduler in found[1]]
    parts = [_sorted(part) for part in found] if isinstance(found, (list, tuple)) else []
    return [one for optimizers, _ in parts for one in optimizers], [one for _, entries in parts for one in entries]


def _entry(scheduler: Any) -> Mapping[str, Any]:
    return scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


# --- the optimizer


def configured(
    trained: list[Trainable], *, module: Make, max_epochs: int | None = None, number: int = 0
) -> torch.optim.Optimizer:
    """Return an optimizer of `configure_optimizers` with the trained parameters of these names in its groups."""
    made, names = configured_by(module, max_epochs=max_epochs, num_steps=_ANY)[number][:2]
    by_name = {item.name: item.parameter for item in trained}
    groups: list[dict[str, Any]] = []
    for place, (group, own) in enumerate(zip(made.param_groups, names)):
        options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        options |= {"lr": group.get("initial_lr", group["lr"]), PLACE: place}  # before a scheduler has changed it
        mine = [by_name[name] for name in own if name in by_name]
        groups += [{"params": members, **options} for members in by_mesh(mine)]
    if not groups:  # this rank updates nothing
        groups = [{**made.param_groups[0], "params": [item.parameter for item in trained], PLACE: 0}]
    made.param_groups = groups
    return made


def completed(node: dict[str, Any], *, module: Make, max_epochs: int | None = None, **_: Any) -> dict[str, Any]:
    """Return the optimizer's node with a turn for each optimizer, if there are several: a step takes one after the other."""
    found = configured_by(module, max_epochs=max_epochs, num_steps=_ANY)
    if len(found) == 1:
        return node
    turns: dict[str, Any] = {}
    names_by_number = names_of_turns(found)
    for number in order_of_steps(module, len(found)):
        name, one = names_by_number[number], found[number]
        scheduler = {"_target_": f"{schedule.__module__}.{schedule.__name__}", "module": node["module"], "number": number}
        turns[name] = {"match": [name for names in one.names for name in names], **node, "number": number}
        turns[name]["scheduler"] = _with_unit(scheduler | {"max_epochs": node.get("max_epochs")}, one)
    return node | {"turns": turns}


configured.completed = completed  # type: ignore[attr-defined]


def names_of_turns(found: Sequence[Configured]) -> list[str]:
    """Return the names of several optimizers: those of the modules whose parameters they have."""
    tops = ["_".join(dict.fromkeys(name.split(".")[0] for names in one.names for name in names)) for one in found]
    names = tops if len(set(tops)) == len(tops) else [f"optimizer_{number}" for number in range(len(found))]
    return [f"turn_{name}" for name in names]  # so that its column is none of those that a module logs


def order_of_steps(module: Make, count: int) -> list[int]:
    """Return the numbers of the optimizers in the order in which the source of the training_step steps them.

    If the source does not show them all, this is the order of `configure_optimizers`.
    """
    try:
        step: Any = getattr(module, "func", module).training_step  # type: ignore[union-attr]  # AttributeError for a function
        body = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, AttributeError, SyntaxError):
        return [*range(count)]
    numbers: dict[str, int] = {}
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("self.optimizers("):
            (target,) = node.targets
            parts = target.elts if isinstance(target, ast.Tuple) else []
            names = [ast.unparse(part) for part in parts] or [f"{ast.unparse(target)}[{number}]" for number in range(count)]
            numbers |= {name: number for number, name in enumerate(names)}
    calls = [node.func for node in ast.walk(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    steps = sorted((call.end_lineno or 0, ast.unparse(call.value)) for call in calls if call.attr == "step")
    found = dict.fromkeys(numbers[name] for _, name in steps if name in numbers)
    return [*found] if len(found) == count else [*range(count)]


# --- the schedule


def schedule(
    optimizer: torch.optim.Optimizer, *, module: Make, max_epochs: int | None = None, total_steps: int | None = None,
    number: int = 0,
) -> "_Followed":  # fmt: skip
    """Return the scheduler of an optimizer of `configure_optimizers`, for an optimizer with its groups.

    `total_steps` is the number of the scheduler's steps: what `self.trainer.estimated_stepping_batches` is, if these are the
    steps of the run.
    """
    by_epoch = _steps_by_epoch(configured_by(module, max_epochs=max_epochs, num_steps=_ANY)[number])
    known = {} if total_steps is None or by_epoch else {"num_steps": total_steps, "max_steps": total_steps}
    return _Followed(optimizer, configured_by(module, max_epochs=max_epochs, **known)[number])


class _Followed:
    """A scheduler of another optimizer, whose options the optimizer follows."""

    def __init__(self, optimizer: torch.optim.Optimizer, configured: Configured) -> None:
        self._optimizer, self._configured, self._calls = optimizer, configured, 0  # `_calls`: at the ends of epochs
        if configured.is_function_of_steps:
            self._follow()

    def step(self) -> None:
        self._calls += 1
        if self._configured.is_function_of_steps and self._calls % self._configured.frequency == 0:
            self._configured.optimizer.step()  # it has no gradients; torch warns if the scheduler steps first
            self._configured.scheduler.step()
            self._follow()

    def _follow(self) -> None:
        for group in self._optimizer.param_groups:
            there = self._configured.optimizer.param_groups[group[PLACE]]
            group.update({name: value for name, value in there.items() if name not in ("params", "initial_lr")})


def with_unit(node: dict[str, Any], *, module: Make, max_epochs: int | None = None, **_: Any) -> dict[str, Any]:
    """Return the schedule's node with the unit in which the scheduler steps."""
    return _with_unit(node, configured_by(module, max_epochs=max_epochs, num_steps=_ANY)[0])


def _with_unit(node: dict[str, Any], configured: Configured) -> dict[str, Any]:
    return node | ({"every": "epoch"} if _steps_by_epoch(configured) else {})


def _steps_by_epoch(configured: Configured) -> bool:
    return configured.is_function_of_steps and configured.interval == "epoch"


schedule.completed = with_unit  # type: ignore[attr-defined]
