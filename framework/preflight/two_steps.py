"""The observations of one process (of one or a few) in two steps with a strategy."""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.training import Builder
from framework.checkpoint.canonical import model_tensors, state_tensors
from framework.checkpoint.plain_state import plain_state_of, require_same_parts
from framework.data.source import Source
from framework.engine.engine import Engine
from framework.engine.seam import Step
from framework.modules.tensors import first_tensor, whole
from framework.preflight.differences import real
from framework.preflight.findings import Finding, Refused, blamed
from framework.preflight.player import Player, in_whole_batches

# updates after the two steps, for an optimizer that looks at several parameters only after some steps
_UPDATES, _UPDATES_IF_LARGE, _SMALL, _UPDATES_S = 50, 10, 10_000_000, 2.0  # updates; parameters; seconds
_SAMPLED = 1 << 16  # numbers of a tensor
_LEAST = 1e-6  # of a scale in float64: an activation is near 1
_SEARCHED, _SEARCH_S = 16, 0.5  # steps to search, and seconds, for a step that is hard for a strategy

Sketch = tuple[float, float]  # of a tensor: its norm, and a projection


@dataclass
class Seen:
    """The computations of one rank: sketches of whole tensors, by name."""

    outputs: dict[str, Sketch] = field(default_factory=dict)  # of modules in the first micro-batch, in the order of their ends
    gradients: list[dict[str, Sketch]] = field(default_factory=list)  # of each step
    weights: dict[str, Sketch] = field(default_factory=dict)  # after two steps
    updated: dict[str, Sketch] = field(default_factory=dict)  # after more updates
    buffers: dict[str, Sketch] = field(default_factory=dict)  # that checkpoints hold, after two steps
    scales: dict[str, float] = field(default_factory=dict)  # of buffers: the norm from which rounding is judged
    early: dict[str, Sketch] = field(default_factory=dict)  # buffers after the first step, on the ranks with its first samples
    sums: list[dict[str, float]] = field(default_factory=list)  # of each step, and of an evaluation
    columns: list[dict[str, Any]] = field(default_factory=list)  # of the parts, in the row of each step
    restored: list[dict[str, Sketch]] = field(default_factory=list)  # gradients of a step, and again after a restore before it
    kept: dict[str, Any] = field(default_factory=dict)  # the values in the optimizer's groups, by parameter and key
    first: int = 0  # the number of the first step
    num_updates: int = 0  # after the two steps
    do_part: bool = False  # its samples enter different modules
    fault: str = ""
    asks: str = ""  # the first call of torch.distributed by the model's own code
    of_part: Finding | None = None  # a fault of a part, with any strategy


def sketch(tensor: Tensor) -> Sketch:
    """Return two numbers that distinguish tensors: the norm, and the product with a fixed vector without a period."""
    flat = real(whole(tensor.detach())).reshape(-1).double()
    ramp = torch.arange(flat.numel(), dtype=torch.float64)
    product = flat * torch.sin(ramp * ramp % 1000.0 + ramp)
    return float(flat.norm()), float(product.sum())  # a dot product of MKL rounds as its threads are free


def sketches(module: nn.Module) -> dict[str, Sketch]:
    """Return sketches of a module's parameters and buffers; for large tensors, of some of their numbers."""
    tensors = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    plain = {name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided and not tensor.is_meta}
    return {name: sketch(tensor.reshape(-1)[:: -(-tensor.numel() // _SAMPLED) or 1]) for name, tensor in plain.items()}


def _steps(build: Builder, source: Source, engine: Engine, *, first: int, count: int) -> Iterator[tuple[int, Step]]:
    whole = in_whole_batches(build, source)
    loader = whole.loader(source, "train", dp_rank=engine.dp_rank, dp_size=engine.dp_size)
    loader.num_workers = 0
    return itertools.islice(enumerate(loader.train(0)), first, first + count)


def first_to_part(build: Builder, source: Source) -> tuple[int, bool]:
    """Return the step, of the first few, where the modules that two processes' samples enter differ most; and if they differ.

    Strategies differ in how they handle modules that a forward skips, at random or depending on its samples.
    """
    player = Player(build)
    paths: list[list[nn.Module]] = []
    if isinstance(player.module, torch.jit.ScriptModule):
        return 0, False
    player.module.register_forward_pre_hook(lambda *_: paths.append([]), prepend=True)
    for part in player.module.modules():
        if not isinstance(part, torch.jit.ScriptModule):  # scripted modules take no hooks
            part.register_forward_pre_hook(lambda part, _: paths[-1].append(part))
    best, most, until = 0, 0, time.monotonic() + _SEARCH_S
    for index, step in _steps(build, source, player.engine, first=0, count=_SEARCHED):
        paths.clear()
        player.forward_backward(step, index=index)
        half, everything = -(-len(paths) // 2), set[nn.Module]().union(*paths)
        apart = sum(one != other for one, other in zip(paths, paths[half:]))
        # the last sample of a share: its gradients are summed
        lacking = sum(set(path) != everything for path in (paths[half - 1], paths[-1]))
        if apart + lacking > most:
            best, most = index, apart + lacking
        if most == half + 2 or time.monotonic() > until:
            break
    return best, most > 0


def two_steps(build: Builder, source: Source, seen: Seen) -> None:
    """Take two steps from `seen.first`, `seen.num_updates` more updates with the last gradients, and evaluate a batch.

    Record the results in `seen`. With 0 updates, take as many as the model's size allows. Collective.
    """
    player = Player(build)
    engine = player.engine
    for index, step in _steps(build, source, engine, first=seen.first, count=2):
        is_first = index == seen.first
        if is_first:
            engine.warm_up()
        with _outputs(engine.module, seen.outputs if is_first and engine.dp_rank == 0 else {}):
            sums = player.forward_backward(step, index=index)
        seen.sums.append({name: float(value) for name, value in sums.items()})
        seen.gradients.append(_gradients(engine.module))
        if is_first and engine.dp_rank == 0:
            seen.early = {name: sketch(buffer) for name, buffer in engine.module.named_buffers()}
        player.take(index)
        seen.columns.append(player.columns)
    kept = plain_state_of(player.held(), initial=player.update.initial)
    states = {name: sketch(tensor) for name, tensor in player.parts.tensors().items()}
    try:
        with blamed("part", "its state cannot be saved", "see docs/parts.md"):
            require_same_parts([part.parts for part in build.world.agreement.gather(kept)])
            require_same_parts(build.world.agreement.gather(states))
    except Refused as refused:
        seen.of_part = refused.finding
    for group in kept.groups:
        seen.kept |= {f"{key} (of {name})": value for name in group.names for key, value in group.values.items()}
    for name, values in kept.numbers.items():
        seen.kept |= {f"state {key} (of {name})": value for key, value in values.items()}
    seen.weights = {name: sketch(parameter) for name, parameter in engine.module.named_parameters()}
    seen.weights |= {f"the state of part.{name}": state for name, state in states.items()}
    is_small = sum(parameter.numel() for parameter in engine.module.parameters()) < _SMALL
    count, within_s = (seen.num_updates, math.inf) if seen.num_updates else (_UPDATES, _UPDATES_S)
    count = count if is_small else min(count, _UPDATES_IF_LARGE)
    seen.num_updates = player.take_more(count, first=seen.first + 2, within_s=within_s)
    for name, tensor in state_tensors(player.held()).items():
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            what = f"{name} is an unfinished sum over the processes, which no checkpoint holds (full_tensor() takes it)"
            raise Refused("optimizer", what, "parallel=ddp")
    seen.updated = {name: sketch(parameter) for name, parameter in engine.module.named_parameters()}
    seen.updated |= {f"the state of part.{name}": sketch(tensor) for name, tensor in player.parts.tensors().items()}
    loader = build.loader(source, "val", dp_rank=engine.dp_rank, dp_size=engine.dp_size)
    loader.num_workers = 0
    engine.sync_buffers()
    names = {f"model/{name}": name for name, _ in engine.module.named_buffers()}
    buffers = {names[key]: tensor for key, tensor in model_tensors(engine.module).items() if key in names}
    seen.buffers = {name: sketch(tensor) for name, tensor in buffers.items()}
    alike = {name: (name.rpartition(".")[0], tensor.shape, tensor.is_floating_point()) for name, tensor in buffers.items()}
    for name, kind in alike.items():  # a mean near zero has the scale of the variance beside it, not that of its rounding
        beside = max(seen.buffers[other][0] for other in alike if alike[other] == kind)
        seen.scales[name] = max(_LEAST, beside) if kind[2] else 0.0
    seen.sums.append({name: float(value) for name, value in player.evaluate(next(loader.evaluate()), shares=[1.0]).items()})


def _gradients(module: nn.Module) -> dict[str, Sketch]:
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {name: sketch(torch.zeros(()) if gradient is None else gradient) for name, gradient in gradients.items()}


def restored_step(build: Builder, source: Source, seen: Seen) -> None:
    """Take a step, and compute the next one twice: as it follows, and by a new model, with a save and a restore between.

    Record in `seen.restored` the gradients; nothing if the run cannot be saved there. Collective.
    """
    player, again = Player(build), Player(build.altered())
    (index, step), (following, second) = _steps(build, source, player.engine, first=seen.first, count=2)
    player.engine.warm_up()
    player.forward_backward(step, index=index)
    player.take(index)
    if not player.parts.can_save(is_ending=False):
        return
    player.engine.sync_buffers()
    again.engine.warm_up()
    again.restore(*player.state())
    for one in (player, again):
        one.forward_backward(second, index=following)
        seen.restored.append(_gradients(one.engine.module))


@contextmanager
def _outputs(module: nn.Module, outputs: dict[str, Sketch]) -> Iterator[None]:
    """Record in `outputs` the first tensor that each module returns at its first call."""
    handles = []
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue

        def note(part: nn.Module, _: object, output: Any, name: str = name) -> None:
            tensor = first_tensor(output)
            if name not in outputs and type(tensor) is Tensor and tensor.is_floating_point():
                found = sketch(tensor)
                if found[0] == found[0] or any(True for _ in nn.Module.parameters(part)):  # or a stage has skipped it
                    outputs[name] = found

        handles.append(part.register_forward_hook(note))
    yield
    for handle in handles:
        handle.remove()
