"""The construction of model and optimizer without storage: it finds problems that nothing else finds before the start."""

import inspect
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
from framework.config.targets import asked, locate
from framework.config.trainer import TrainerSection
from framework.config.validation import problems_of_build
from framework.distributed.mesh import resolve_axes
from framework.engine.forward import measures
from framework.engine.seam import Demands
from framework.modules.parts import blocks_of
from framework.modules.pretrained import pretrained_part
from framework.modules.structure import freeze_parameters, switch_off_dropout
from framework.modules.summary import summary
from framework.modules.trace import example_of, give_example
from framework.optim.update import averages_itself
from framework.preflight.child import ChildFailure, in_child
from framework.preflight.optimizer import require_optimizer, require_turns
from framework.preflight.processes import axes_of
from framework.preflight.refused import Refused, refusing
from framework.runtime.environment import Environment
from framework.runtime.problem import Problem
from framework.training.metrics import averaged_state
from framework.training.parts import ANSWERS, MOMENTS


def build_problems(build: Builder, *, is_shown: bool = False) -> list[Problem]:
    """Return the problems of a configuration's objects, and set the builder's `summary`, with shapes if it `is_shown`.

    This runs in a separate process, because the user's code may keep its results. A launcher's library, such as MPI, may not
    support a fork.
    """
    work = partial(dry_build, build, is_shown=is_shown)
    found = work() if Environment.read().is_foreign else in_child(work)
    if isinstance(found, ChildFailure):
        return [Problem("model", f"could not be examined: {found}", "a model and an optimizer that can be built")]
    problems, build.summary = found
    return problems


def dry_build(build: Builder, *, is_shown: bool = False) -> tuple[list[Problem], list[dict[str, Any]]]:
    """Build the optimizer and the model, if possible without storage, and run a batch's shape through it.

    Return the problems, and a table of the model's modules (framework/modules/summary.py).
    """
    try:
        model = _shapes_of(build.config.model, seed=build.config.seed)
        _require_objects(model, build)
    except Refused as refused:
        return refused.problems, []
    return [], summary(model, example=example_of(model) if is_shown else None)


def _shapes_of(node: Node, *, seed: int) -> nn.Module:
    with refusing(Exception, SystemExit, to=partial(problems_of_build, "model", node, own=(*INIT, "parts"))):
        model = components.shapes_of(node, seed=seed)  # a user's model may raise anything
    if not isinstance(model, nn.Module):
        raise Refused("model", f"{node['_target_']} gives a {type(model).__name__}", "a torch.nn.Module")
    if lazy := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise Refused("model", f"{lazy[0]} has no shape before the first batch", "a layer with its sizes, not a lazy one")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            what = f"{name} has the layout {tensor.layout}, which no checkpoint can hold and ddp cannot send"
            raise Refused("model", what, "a plain attribute, which the forward moves: self.graph.to(x)")
    return model


def _require_objects(model: nn.Module, build: Builder) -> None:
    """Refuse objects that cannot be built, or do not fit each other."""
    config, is_run = build.config, MODES[build.config.mode].about == "run"
    if not is_run:
        switch_off_dropout(model)
    if config.mode == "export" and "huggingface" in (config.export.formats or []):
        expected = "safetensors, pt2 or onnx"
        with refusing(ValueError, to=lambda error: Problem("export.formats", f"huggingface: {error}", expected)):
            pretrained_part(model)
    _require_init(model, config.model.get("init_from"))
    load = partial(build.source, "train")
    give_example(model, partial(example_inputs, build.dataset, load, dtype=torch.get_default_dtype()))
    _require_trainable(model, config.trainer)
    with refusing(Exception, SystemExit, to=partial(problems_of_build, "task", config.task)):
        task = components.task(config.task, seed=config.seed)
    has_step, num_processes = callable(getattr(task, "step", None)), config.launch.most_processes
    if not (measures(task) or has_step):
        what = f"{config.task['_target_']} gives a {type(task).__name__} with neither loss() nor step()"
        raise Refused("task", what, "a task, as in framework/tasks/")
    _require_metrics(config.metric, num_processes=num_processes)
    parts = _parts(config.part)
    observer = _observer(config.mode, config.metric, parts if is_run else {})
    if observer and observer != "mode" and not measures(task):
        what = "takes outputs and targets, but the task measures in its step()"
        raise Refused(observer, what, f"{observer.partition('.')[0]}=none")
    precision, divergence = config.precision.name, config.trainer.divergence.action
    require_turns(model, config.optimizer, precision=precision, divergence=divergence)
    optimizer = require_optimizer(model, config.optimizer, config.scheduler)
    if config.precision.optimizer_state and averages_itself(optimizer):
        what = f"bf16, but {type(optimizer).__name__} needs its states outside of its steps too"
        raise Refused("precision.optimizer_state", what, "null")
    demands = Demands(  # a mode about an existing run takes no step
        eval_every=config.trainer.eval_every if is_run else None,
        checkpoint_every=config.checkpoint.every if is_run else None,
        sync_batchnorm=config.trainer.sync_batchnorm,
        averages=_averaging(parts, optimizer, ema_decay=config.trainer.ema_decay) if is_run else None,
        scales_loss=is_run and precision == "fp16",
        recovers=divergence if is_run and divergence != "raise" else None,
        bitwise=config.invariance == "bitwise",
        own_step=has_step,
        turns=is_run and bool(config.optimizer.get("turns")),
        observes=observer,
        parts=tuple(parts) if is_run else (),
        keep_best=config.checkpoint.keep_best if is_run else 0,
        averages_itself=is_run and averages_itself(optimizer),
    )
    _require_strategy(model, config.parallel, demands, num_processes=num_processes)


def _require_init(model: nn.Module, init_from: Any) -> None:
    """Refuse files if nothing in them fits the model, or not everything that must fit."""
    if not init_from:
        return
    entries = entries_of(init_from)
    fit = Fit.of(stored_tensors(entries), model)
    what = f"not all of it fits this model, but strict is true: {'; '.join(fit.misplaced)}" if fit.misplaced else ""
    if not fit.fitting:
        what = f"nothing in {', '.join(entry.file for entry in entries)} fits this model"
    if what:
        raise Refused("model.init_from", what, "; ".join(["its prefix and rename change names", *fit.faults]))


def _require_trainable(model: nn.Module, trainer: TrainerSection) -> None:
    """Freeze the parameters that are not trained. Refuse what the trainer cannot do with this model."""
    with refusing(ValueError, to=lambda error: Problem("trainer.freeze", str(error))):
        freeze_parameters(model, trainer.freeze)
    if type(model).parameters is not nn.Module.parameters:
        own = {id(parameter) for parameter in model.parameters()}
        for name in (name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own):
            what = f"its own parameters() leaves out {name}, but here everything is trained that has requires_grad"
            raise Refused("model", what, f"trainer.freeze=[{name.rpartition('.')[0] or name}.*], or requires_grad_(False)")
    if trainer.activation_checkpointing and not blocks_of(model):
        what = f"{trainer.activation_checkpointing}, but {type(model).__name__} has no known blocks that can be recomputed"
        raise Refused("trainer.activation_checkpointing", what, "false, or model.parts.blocks=PATH names them")


def _observer(mode: str, metric: dict[str, Node], parts: dict[str, Any]) -> str | None:
    watching = (f"part.{name}" for name, part in parts.items() if hasattr(part, "observe"))
    return "mode" if mode == "predict" else "metric" if metric else next(watching, None)


def _require_metrics(nodes: dict[str, Node], *, num_processes: int) -> None:
    """Refuse metrics that cannot be built, or with a value that would depend on the number of processes."""
    with refusing(ValueError, to=lambda error: Problem.of_line(str(error))):
        metrics = components.metrics(nodes)
    for name, metric in metrics.items():
        if num_processes > 1 and (state := averaged_state(metric)):
            what = f"{type(metric).__name__} averages its state {state} over processes, and ignores their numbers of samples"
            raise Refused(f"metric.{name}", what, "one process, or a metric that keeps sums")


def _parts(nodes: dict[str, Node]) -> dict[str, Any]:
    """Build the parts; refuse parts that cannot be built, and parts that would never be called."""
    with refusing(ValueError, to=lambda error: Problem.of_line(str(error))):
        parts = components.loop_parts(nodes)
    known = (*MOMENTS, *ANSWERS)
    for name, part in parts.items():
        if not any(callable(getattr(part, method, None)) for method in known):
            what = f"a {type(part).__name__} has no method that the loop calls"
            raise Refused(f"part.{name}", what, f"one of {', '.join(known)}")
        if hasattr(part, "state_dict") != hasattr(part, "load_state_dict"):
            what = f"a {type(part).__name__} has only one of state_dict and load_state_dict: its state would be lost"
            raise Refused(f"part.{name}", what, "both")
    growing = [name for name, part in parts.items() if hasattr(part, "batch_size")]
    if len(growing) > 1:
        raise Refused(f"part.{growing[1]}", f"sets the size of a batch, and so does part.{growing[0]}", "one of them")
    return parts


def _averaging(
    parts: dict[str, Any], optimizer: torch.optim.Optimizer, *, ema_decay: float | None
) -> tuple[str, object] | None:
    """Return the key of the option that averages the weights, with its value; refuse several."""
    found: list[tuple[str, object]] = [("trainer.ema_decay", ema_decay)] if ema_decay is not None else []
    found += ((f"part.{name}", type(part).__name__) for name, part in parts.items() if hasattr(part, "average_share"))
    others = [f"{key} averages the weights too" for key, _ in found[1:]]
    others += [f"{type(optimizer).__name__} averages the weights itself"] if averages_itself(optimizer) else []
    if found and others:
        raise Refused(found[0][0], f"{found[0][1]}, but {others[0]}", "one of them")
    return found[0] if found else None


def _require_strategy(model: nn.Module, parallel: Node, demands: Demands, *, num_processes: int) -> None:
    """Ask the strategy's module, if it has a function `problems`, whether the strategy can run this model."""
    strategy = locate(parallel["_target_"])
    taken = inspect.signature(strategy).parameters
    if not ({"world", "forward"} <= taken.keys() or any(one.kind is one.VAR_KEYWORD for one in taken.values())):
        what = f"{parallel['_target_']} takes no world and forward"
        raise Refused("parallel", what, "a strategy, as docs/extend.md shows")
    if demands.bitwise and "bitwise" not in taken:
        what = "bitwise, but this strategy sums in a different order"
        raise Refused("invariance", what, "parallel=single, ddp or zero, or invariance=samples")
    sizes = resolve_axes(axes_of(parallel), world_size=num_processes)
    if lines := asked(parallel, "problems", model, otherwise=[], demands=demands, **sizes):
        raise Refused.of([_of_strategy(line) for line in lines])


def _of_strategy(line: str) -> Problem:
    """Return a strategy's line as a problem of the key at its start, or else of `parallel`."""
    names_key = line.partition(": ")[0].split(".")[0] in RunConfig.model_fields
    return Problem.of_line(line) if names_key else Problem.of_error("parallel", ValueError(line))
