"""Building the model and the optimizer without storage: problems that only they can find, before the run starts."""

import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.build import components
from framework.checkpoint.tensors import read_header
from framework.checkpoint.weights import Fit
from framework.config.modes import MODES
from framework.config.schema import CheckpointSection, Node, RunConfig, TrainerSection
from framework.config.targets import locate
from framework.distributed.mesh import resolve_axes
from framework.engine.seam import Demands
from framework.modules.structure import freeze_parameters, switch_off_dropout
from framework.optim.optimizers import check_groups, hidden_matrices, stand_in, trainable
from framework.preflight.processes import axes_of
from framework.runtime.problem import Problem


def dry_build(config: RunConfig) -> list[Problem]:
    """Build the model without storage and the optimizer, run a batch's shape through, and return the problems."""
    try:
        with torch.device("meta"):
            model = components.model(config.model, seed=config.seed)
    except (Exception, SystemExit) as error:  # a model of the user's may raise anything
        return [Problem.of_error("model", error)]
    if not isinstance(model, nn.Module):
        return [Problem("model", f"{config.model['_target_']} gives a {type(model).__name__}", "a torch.nn.Module")]
    if lazy := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        return [Problem("model", f"{lazy[0]} has no shape before the first batch", "a layer with its sizes, not a lazy one")]
    if MODES[config.mode].about == "existing run":
        switch_off_dropout(model)
    if (path := config.model.get("init_from")) and not (fit := Fit.of(read_header(Path(path)), model)).fitting:
        return [Problem("model.init_from", f"nothing in {path} fits this model", "; ".join(fit.faults))]
    try:
        freeze_parameters(model, config.trainer.freeze)
    except ValueError as error:
        return [Problem("trainer.freeze", str(error))]
    try:
        task = components.task(config.task)
    except Exception as error:
        return [Problem.of_error("task", error)]
    if not callable(getattr(task, "loss", None)) or not callable(getattr(task, "metrics", None)):
        what = f"{config.task['_target_']} gives a {type(task).__name__} without loss() and metrics()"
        return [Problem("task", what, "a task, as in framework/tasks/")]
    demands = _demands(config.trainer, config.checkpoint, precision=config.precision.name, invariance=config.invariance)
    if MODES[config.mode].about == "existing run":  # such a mode takes no step
        demands = dataclasses.replace(demands, eval_every=None, checkpoint_every=None, ema_decay=None, grad_noise=None)
        demands = dataclasses.replace(demands, scales_loss=False, recovers=None)
    return (
        _check_optimizer(model, config.optimizer, config.scheduler)
        or _check_strategy(model, config.parallel, demands, num_processes=config.launch.most_processes)
        or _check_forward(model, components.example(components.dataset(config.dataset).info))
    )


def _check_optimizer(model: nn.Module, optimizer: Node, scheduler: Node) -> list[Problem]:
    """Refuse an optimizer that cannot be built or stepped, or whose state a checkpoint cannot hold."""
    trained = trainable(model, hidden=hidden_matrices(model))
    try:
        if groups := optimizer.get("groups"):
            rest = components.optimizer_builder({name: value for name, value in optimizer.items() if name != "groups"})
            options = {name: value for group in rest(trained).param_groups for name, value in group.items() if name != "params"}
            check_groups(groups, names=[item.name for item in trained], options=options)
            for entry in groups:  # a value that torch refuses only in a step
                everywhere = {**optimizer, "groups": [{**entry, "match": "*"}]}
                _step_fault(components.optimizer_builder(everywhere)(stand_in(torch.device("cpu"))))
        build = components.optimizer_builder(optimizer)
        built = build(trained)
        if fault := _step_fault(build(stand_in(torch.device("cpu")))):
            expected = "an optimizer that keeps tensors for each parameter, as those of torch.optim do"
            return [Problem("optimizer", f"{type(built).__name__} {fault}", expected)]
    except (Exception, SystemExit) as error:  # an optimizer of the user's may raise anything
        return [Problem.of_error("optimizer", error)]
    try:
        lr = optimizer.get("lr", built.param_groups[0]["lr"])
        components.share_of_peak(scheduler, total_steps=100, lr=lr)(1)
    except Exception as error:
        return [Problem.of_error("scheduler", error)]
    return []


def _step_fault(optimizer: torch.optim.Optimizer) -> str:
    """Take a step with one number. Returns what a checkpoint would lose of the optimizer's state, or an empty text."""
    parameters = inspect.signature(type(optimizer).step).parameters
    if "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty:
        return "takes steps by a closure, but a step here has one backward pass"
    before = [{key: copy.copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for group, values in zip(optimizer.param_groups, before):
        for key, value in values.items():
            if not isinstance(value, Tensor) and group[key] != value:
                return f"counts in its parameter groups ({key}), which no checkpoint holds"
    for state in optimizer.state.values():
        for key, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                return f"keeps {key} as a {type(value).__name__}, which no checkpoint holds"
    return ""


def _demands(trainer: TrainerSection, checkpoint: CheckpointSection, *, precision: str, invariance: str) -> Demands:
    action = trainer.divergence.action
    return Demands(
        eval_every=trainer.eval_every,
        checkpoint_every=checkpoint.every,
        sync_batchnorm=trainer.sync_batchnorm,
        ema_decay=trainer.ema_decay,
        grad_noise=trainer.grad_noise.eta,
        scales_loss=precision == "fp16",
        recovers=None if action == "raise" else action,
        bitwise=invariance == "bitwise",
    )


def _check_strategy(model: nn.Module, parallel: Node, demands: Demands, *, num_processes: int) -> list[Problem]:
    """Ask the strategy's module, if it has a function `problems`, whether the strategy can run this model."""
    strategy = locate(parallel["_target_"])
    taken = inspect.signature(strategy).parameters
    if not ({"world", "forward"} <= taken.keys() or any(one.kind is one.VAR_KEYWORD for one in taken.values())):
        what = f"{parallel['_target_']} takes no world and forward"
        return [Problem("parallel", what, "a strategy, as in framework/parallel/single.py")]
    if demands.bitwise and "bitwise" not in taken:
        what = "bitwise, but this strategy sums in an order of its own collectives"
        return [Problem("invariance", what, "parallel=single, ddp or zero, or invariance=samples")]
    problems = getattr(inspect.getmodule(strategy), "problems", None)
    if problems is None:
        return []
    options: dict[str, Any] = {name: value for name, value in parallel.items() if name != "_target_"}
    options |= resolve_axes(axes_of(parallel), world_size=num_processes)
    return [_of_strategy(line) for line in problems(model, demands=demands, **options)]


def _of_strategy(line: str) -> Problem:
    """Return a strategy's line as a problem of the key at its beginning, else of `parallel`."""
    names_key = line.partition(": ")[0].split(".")[0] in RunConfig.model_fields
    return Problem.of_line(line) if names_key else Problem.of_error("parallel", ValueError(line))


def _check_forward(model: nn.Module, batch: Tensor | None) -> list[Problem]:
    """Refuse a model that cannot take a batch of this data. Only shapes are computed."""
    if batch is None:
        return []
    try:
        with torch.no_grad(), torch.device("meta"):
            model.eval()(batch)
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, NotImplementedError) or "meta" in text:  # the model needs numbers, not only shapes
            return []
        what = f"does not take a batch of shape {list(batch.shape)} of this dataset"
        return [Problem("model", what, f"{text[:200]}; choose another model or dataset")]
    return []
