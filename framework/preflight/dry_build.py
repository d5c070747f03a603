"""The construction of model and optimizer without storage: it finds problems that nothing else finds before the start."""

import dataclasses
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from framework.build import components
from framework.build.example import example_inputs
from framework.build.training import Builder
from framework.checkpoint.file_tensors import stored_tensors
from framework.checkpoint.weights import Fit
from framework.config.init_from import entries_of
from framework.config.modes import MODES
from framework.config.schema import INIT, Node, RunConfig
from framework.config.targets import locate
from framework.config.trainer import CheckpointSection, TrainerSection
from framework.config.validation import problems_of_build
from framework.distributed.mesh import resolve_axes
from framework.engine.forward import measures
from framework.engine.seam import Demands
from framework.modules.parts import blocks_of
from framework.modules.pretrained import pretrained_part
from framework.modules.structure import freeze_parameters, switch_off_dropout
from framework.modules.trace import give_example
from framework.optim.optimizers import hidden_matrices, trainable
from framework.optim.update import averages_itself
from framework.preflight.child import ChildFailure, in_child
from framework.preflight.optimizer import optimizer_problems, turns_problems
from framework.preflight.processes import axes_of
from framework.runtime.environment import Environment
from framework.runtime.problem import Problem
from framework.training.metrics import averaged_state
from framework.training.parts import ANSWERS, MOMENTS


def build_problems(build: Builder) -> list[Problem]:
    """Return the problems of a configuration's objects, and set the builder's `num_parameters`.

    This runs in a separate process, because the user's code may keep its results. A launcher's library, such as MPI, may not
    support a fork.
    """
    found = dry_build(build) if Environment.read().is_foreign else in_child(partial(dry_build, build))
    if isinstance(found, ChildFailure):
        return [Problem("model", f"could not be examined: {found}", "a model and an optimizer that can be built")]
    problems, build.num_parameters = found
    return problems


def dry_build(build: Builder) -> tuple[list[Problem], int]:
    """Build the optimizer and the model, if possible without storage, and run a batch's shape through it.

    Return the problems, and the model's number of parameters.
    """
    model, problems = _shapes_of(build.config.model, seed=build.config.seed)
    if model is None:
        return problems, 0
    return _problems(model, build), sum(parameter.numel() for parameter in model.parameters())


def _problems(model: nn.Module, build: Builder) -> list[Problem]:
    config = build.config
    if MODES[config.mode].about == "existing run":
        switch_off_dropout(model)
    if config.mode == "export" and (problems := _check_export(model, config.export.formats)):
        return problems
    if problems := _check_init(model, config.model.get("init_from")):
        return problems
    load = partial(build.source, "train")
    give_example(model, partial(example_inputs, build.dataset, load, dtype=torch.get_default_dtype()))
    if problems := _trainer_problems(model, config.trainer):
        return problems
    task, problems = _task(config.task, seed=config.seed)
    has_step = callable(getattr(task, "step", None))
    if problems := problems or _check_metrics(config.metric, num_processes=config.launch.most_processes):
        return problems
    parts, problems = _parts(config.part)
    averaging = _averaging(parts, ema_decay=config.trainer.ema_decay)
    if len(averaging) > 1:
        (key, value), (other, _) = averaging[:2]
        problems.append(Problem(key, f"{value}, but {other} averages the weights too", "one of them"))
    observer = _observer(config.mode, config.metric, parts if MODES[config.mode].about == "run" else {})
    if observer and observer != "mode" and not measures(task):
        what = "takes outputs and targets, but the task measures in its step()"
        problems.append(Problem(observer, what, f"{observer.partition('.')[0]}=none"))
    if problems:
        return problems
    demands = _demands(config.trainer, config.checkpoint, precision=config.precision.name, invariance=config.invariance)
    demands = dataclasses.replace(demands, averages=averaging[0] if averaging else None, parts=tuple(parts))
    if problems := turns_problems(model, config.optimizer, demands):
        return problems
    demands = dataclasses.replace(demands, turns=bool(config.optimizer.get("turns")))
    demands = dataclasses.replace(demands, own_step=has_step, observes=observer)
    if MODES[config.mode].about == "existing run":  # such a mode takes no step
        demands = dataclasses.replace(demands, eval_every=None, checkpoint_every=None, keep_best=0, averages=None, parts=())
        demands = dataclasses.replace(demands, scales_loss=False, recovers=None, turns=False)
    if problems := optimizer_problems(model, config.optimizer, config.scheduler):
        return problems
    built = components.optimizer_builder(config.optimizer)(trainable(model, hidden=hidden_matrices(model)))
    if MODES[config.mode].about == "run" and averages_itself(built):
        if demands.averages is not None:
            key, value = demands.averages
            return [Problem(key, f"{value}, but {type(built).__name__} averages the weights itself", "one of them")]
        demands = dataclasses.replace(demands, averages_itself=True)
    return _check_strategy(model, config.parallel, demands, num_processes=config.launch.most_processes)


def _trainer_problems(model: nn.Module, trainer: TrainerSection) -> list[Problem]:
    """Freeze the parameters that are not trained. Return what the trainer cannot do with this model."""
    try:
        freeze_parameters(model, trainer.freeze)
    except ValueError as error:
        return [Problem("trainer.freeze", str(error))]
    if left_out := _left_out(model):
        what = f"its own parameters() leaves out {left_out}, but here everything is trained that has requires_grad"
        cure = f"trainer.freeze=[{left_out.rpartition('.')[0] or left_out}.*], or requires_grad_(False)"
        return [Problem("model", what, cure)]
    if trainer.activation_checkpointing and not blocks_of(model):
        what = f"{trainer.activation_checkpointing}, but {type(model).__name__} has no known blocks that can be recomputed"
        return [Problem("trainer.activation_checkpointing", what, "false, or model.parts.blocks=PATH names them")]
    return []


def _shapes_of(node: Node, *, seed: int) -> tuple[nn.Module | None, list[Problem]]:
    try:
        model = components.shapes_of(node, seed=seed)
    except (Exception, SystemExit) as error:  # a user's model may raise anything
        return None, problems_of_build("model", node, error, own=(*INIT, "parts"))
    if not isinstance(model, nn.Module):
        return None, [Problem("model", f"{node['_target_']} gives a {type(model).__name__}", "a torch.nn.Module")]
    if lazy := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        what = f"{lazy[0]} has no shape before the first batch"
        return None, [Problem("model", what, "a layer with its sizes, not a lazy one")]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            what = f"{name} has the layout {tensor.layout}, which no checkpoint can hold and ddp cannot send"
            return None, [Problem("model", what, "a plain attribute, which the forward moves: self.graph.to(x)")]
    return model, []


def _left_out(model: nn.Module) -> str:
    """Return the first trained parameter that the model's own parameters() does not return."""
    if type(model).parameters is nn.Module.parameters:
        return ""
    own = {id(parameter) for parameter in model.parameters()}
    return next((name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own), "")


def _check_export(model: nn.Module, formats: Sequence[str] | None) -> list[Problem]:
    try:
        if "huggingface" in (formats or []):
            pretrained_part(model)
    except ValueError as error:
        return [Problem("export.formats", f"huggingface: {error}", "safetensors, pt2 or onnx")]
    return []


def _task(node: Node, *, seed: int) -> tuple[Any, list[Problem]]:
    try:
        task = components.task(node, seed=seed)
    except (Exception, SystemExit) as error:
        return None, problems_of_build("task", node, error)
    if measures(task) or callable(getattr(task, "step", None)):
        return task, []
    what = f"{node['_target_']} gives a {type(task).__name__} with neither loss() nor step()"
    return task, [Problem("task", what, "a task, as in framework/tasks/")]


def _observer(mode: str, metric: dict[str, Node], parts: dict[str, Any]) -> str | None:
    watching = (f"part.{name}" for name, part in parts.items() if hasattr(part, "observe"))
    return "mode" if mode == "predict" else "metric" if metric else next(watching, None)


def _check_init(model: nn.Module, init_from: Any) -> list[Problem]:
    """Refuse files if nothing in them fits the model, or not everything that must fit."""
    if not init_from:
        return []
    entries = entries_of(init_from)
    fit = Fit.of(stored_tensors(entries), model)
    what = f"not all of it fits this model, but strict is true: {'; '.join(fit.misplaced)}" if fit.misplaced else ""
    if not fit.fitting:
        what = f"nothing in {', '.join(entry.file for entry in entries)} fits this model"
    return [Problem("model.init_from", what, "; ".join(["its prefix and rename change names", *fit.faults]))] if what else []


def _check_metrics(nodes: dict[str, Node], *, num_processes: int) -> list[Problem]:
    """Refuse metrics that cannot be built, or with a value that would depend on the number of processes."""
    try:
        metrics = components.metrics(nodes)
    except ValueError as error:
        return [Problem.of_line(str(error))]
    for name, metric in metrics.items():
        if num_processes > 1 and (state := averaged_state(metric)):
            what = f"{type(metric).__name__} averages its state {state} over processes, and ignores their numbers of samples"
            return [Problem(f"metric.{name}", what, "one process, or a metric that keeps sums")]
    return []


def _parts(nodes: dict[str, Node]) -> tuple[dict[str, Any], list[Problem]]:
    """Build the parts; refuse parts that cannot be built, and parts that would never be called."""
    try:
        parts = components.loop_parts(nodes)
    except ValueError as error:
        return {}, [Problem.of_line(str(error))]
    known = (*MOMENTS, *ANSWERS)
    for name, part in parts.items():
        if not any(callable(getattr(part, method, None)) for method in known):
            what = f"a {type(part).__name__} has no method that the loop calls"
            return parts, [Problem(f"part.{name}", what, f"one of {', '.join(known)}")]
        if hasattr(part, "state_dict") != hasattr(part, "load_state_dict"):
            what = f"a {type(part).__name__} has only one of state_dict and load_state_dict: its state would be lost"
            return parts, [Problem(f"part.{name}", what, "both")]
    growing = [name for name, part in parts.items() if hasattr(part, "batch_size")]
    if len(growing) > 1:
        return parts, [Problem(f"part.{growing[1]}", f"sets the size of a batch, and so does part.{growing[0]}", "one of them")]
    return parts, []


def _averaging(parts: dict[str, Any], *, ema_decay: float | None) -> list[tuple[str, object]]:
    """Return the keys of the options that average the weights, with their values."""
    own = [("trainer.ema_decay", ema_decay)] if ema_decay is not None else []
    return [*own, *((f"part.{name}", type(part).__name__) for name, part in parts.items() if hasattr(part, "average_share"))]


def _demands(trainer: TrainerSection, checkpoint: CheckpointSection, *, precision: str, invariance: str) -> Demands:
    action = trainer.divergence.action
    return Demands(
        eval_every=trainer.eval_every,
        checkpoint_every=checkpoint.every,
        keep_best=checkpoint.keep_best,
        sync_batchnorm=trainer.sync_batchnorm,
        averages=None,
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
        return [Problem("parallel", what, "a strategy, as docs/extend.md shows")]
    if demands.bitwise and "bitwise" not in taken:
        what = "bitwise, but this strategy sums in a different order"
        return [Problem("invariance", what, "parallel=single, ddp or zero, or invariance=samples")]
    problems = getattr(inspect.getmodule(strategy), "problems", None)
    if problems is None:
        return []
    options: dict[str, Any] = {name: value for name, value in parallel.items() if name != "_target_"}
    options |= resolve_axes(axes_of(parallel), world_size=num_processes)
    return [_of_strategy(line) for line in problems(model, demands=demands, **options)]


def _of_strategy(line: str) -> Problem:
    """Return a strategy's line as a problem of the key at its start, or else of `parallel`."""
    names_key = line.partition(": ")[0].split(".")[0] in RunConfig.model_fields
    return Problem.of_line(line) if names_key else Problem.of_error("parallel", ValueError(line))
