"""The third of a rehearsal's short runs: what each process computes in two steps, and how that differs from one process."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.training import Builder
from framework.checkpoint.canonical import model_tensors, state_tensors
from framework.checkpoint.format import dtype_name
from framework.checkpoint.plain_state import changed_values, require_same_parts
from framework.data.source import Source
from framework.modules.tensors import first_tensor
from framework.preflight.differences import differ, other_column, untouched
from framework.preflight.player import Player
from framework.preflight.refused import Refused, blamed
from framework.preflight.sketches import TOLERANCE, Sketch, distance, far, sketch
from framework.runs.metrics_file import Row
from framework.runtime.problem import shown
from framework.runtime.torch_internals import is_of_functorch

# updates after the two steps, for an optimizer that looks at several parameters only after some steps
_UPDATES, _UPDATES_IF_LARGE, _SMALL, _UPDATES_S = 50, 10, 10_000_000, 2.0  # updates; parameters; seconds
_FACTORS = 1e2, 1e-4  # of the gradients of two more updates: an optimizer may have a threshold
_ROUNDED = 1.0 + 2.0**-46  # a factor: an optimizer that amplifies rounding takes other steps, whatever the strategy
_LEAST = 1e-6  # of a scale in float64: an activation is near 1
_SEARCHED, _SEARCH_S = 16, 0.5  # steps to search, and seconds, for a step that is hard for a strategy

_LATE = 1e-3  # a tolerance for gradients after many updates


@dataclass
class Seen:
    """The computations of one rank: sketches of whole tensors, by name."""

    # of modules in the first micro-batch, in the order of their ends, by name and shape: a strategy may cut an output
    outputs: dict[tuple[str, torch.Size], Sketch] = field(default_factory=dict)
    gradients: list[dict[str, Sketch]] = field(default_factory=list)  # of the two steps, and of one after more updates
    updated: dict[str, Sketch] = field(default_factory=dict)  # the weights, after more updates
    buffers: dict[str, Sketch] = field(default_factory=dict)  # that checkpoints hold, after two steps
    scales: dict[str, float] = field(default_factory=dict)  # of buffers: the norm from which rounding is judged
    rows: list[Row] = field(default_factory=list)  # of each step, and of an evaluation
    restored: dict[str, Sketch] = field(default_factory=dict)  # the last gradients again, after a restore before their step
    first: int = 0  # the number of the first step
    num_updates: int = 0  # after the two steps
    do_part: bool = False  # its samples enter different modules
    fault: str = ""
    unfinished: str = ""  # what it lacked
    asks: str = ""  # the first call of torch.distributed by the model's own code
    crossing: str = ""  # the first place in the model's own code that needs a tensor which a pipeline does not send
    finding: tuple[str, str, str] | None = None  # the key, the text and the remedy of a fault with any strategy
    then: "list[Seen]" = field(default_factory=list)  # of rank 0: what all ranks have computed afterwards


def _player(build: Builder, source: Source, *, folder: Path) -> Player:
    """Return a trainer. Code that names no dtype makes tensors in that of the weights, because the run may be in float32."""
    player = Player(build, sources={"train": source, "val": source}, folder=folder)
    in_dtype, engine = _default_dtype(build.precision.parameters), player.engine
    engine.train, engine.evaluate = in_dtype(engine.train), in_dtype(engine.evaluate)  # type: ignore[method-assign]
    return player


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def first_to_part(build: Builder, source: Source, *, folder: Path) -> tuple[int, bool]:
    """Return the step, of the first few, where the modules that two processes' samples enter differ most; and if they differ.

    Strategies differ in how they handle modules that a forward skips, at random or depending on its samples.
    """
    player = _player(build, source, folder=folder)
    paths: list[list[nn.Module]] = []
    if isinstance(player.module, torch.jit.ScriptModule):
        return 0, False
    player.module.register_forward_pre_hook(lambda *_: paths.append([]), prepend=True)
    for part in player.module.modules():
        if not isinstance(part, torch.jit.ScriptModule):  # scripted modules take no hooks
            part.register_forward_pre_hook(lambda part, _: paths[-1].append(part))
    best, most, until = 0, 0, time.monotonic() + _SEARCH_S
    start, following = player.begin(0)
    for index, step in enumerate(itertools.chain([start], itertools.islice(following, _SEARCHED - 1))):
        paths.clear()
        player.gradients(step, index=index)
        half, everything = -(-len(paths) // 2), set[nn.Module]().union(*paths)
        apart = sum(one != other for one, other in zip(paths, paths[half:]))
        # the last sample of a share: its gradients are summed
        lacking = sum(set(path) != everything for path in (paths[half - 1], paths[-1]))
        if apart + lacking > most:
            best, most = index, apart + lacking
        if most == half + 2 or time.monotonic() > until:
            break
    return best, most > 0


def two_steps(build: Builder, source: Source, seen: Seen, *, folder: Path) -> None:
    """Take two steps from `seen.first`, `seen.num_updates` more updates with the last gradients, and evaluate a batch.

    Record the results in `seen`. With 0 updates, take as many as the model's size allows. Collective.
    """
    player = _player(build, source, folder=folder)
    engine = player.engine
    step, following = player.begin(seen.first)
    for is_first in (True, False):
        with _outputs(engine.module, seen.outputs if is_first and engine.dp_rank == 0 else {}):
            player.take(step)
        seen.gradients.append(gradients_of(player))
        if is_first:
            step = next(following)
    player.watch.factor = 1.0 if build.world.world_size == 1 else _ROUNDED
    is_small = sum(parameter.numel() for parameter in engine.module.parameters()) < _SMALL
    count, within_s = (seen.num_updates, math.inf) if seen.num_updates else (_UPDATES, _UPDATES_S)
    seen.num_updates = player.repeat(step, count if is_small else min(count, _UPDATES_IF_LARGE), within_s=within_s)
    with untouched(engine.module):  # a model may not take what follows large updates
        for factor in _FACTORS:
            player.watch.factor *= factor
            player.repeat(step, 1, within_s=math.inf)
        seen.updated = weights_of(player)
    engine.sync_buffers()
    _note_buffers(engine.module, seen)
    _look_at_evaluation(player, seen)
    seen.rows = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in player.rows]
    seen.fault = player.diverged if build.world.world_size == 1 else ""
    can_save = player.parts.can_save(is_ending=False) and all(
        dtype_name(t.dtype) for t in state_tensors(player.trainer.held).values()
    )
    step, saved = next(following), None
    if build.world.world_size > 1 and can_save:  # float64 makes complex weights complex128, which no checkpoint holds
        _require_storable(player)
        saved = player.save()
    player.take(step)
    seen.gradients.append(gradients_of(player))
    if saved is not None:
        again = _player(build.altered(), source, folder=folder)  # the first is used no more
        again.engine.warm_up()
        again.restore(saved)
        again.take(step)
        seen.restored = gradients_of(again)


def _note_buffers(module: nn.Module, seen: Seen) -> None:
    names = {f"model/{name}": name for name, _ in module.named_buffers()}
    buffers = {names[key]: tensor for key, tensor in model_tensors(module).items() if key in names}
    seen.buffers = {name: sketch(tensor) for name, tensor in buffers.items()}
    alike = {name: (name.rpartition(".")[0], tensor.shape, tensor.is_floating_point()) for name, tensor in buffers.items()}
    for name, kind in alike.items():  # a mean near zero has the scale of the variance beside it, not that of its rounding
        beside = max(seen.buffers[other][0] for other in alike if alike[other] == kind)
        seen.scales[name] = max(_LEAST, beside) if kind[2] else 0.0


def _require_storable(player: Player) -> None:
    """Refuse what differs between processes, or is only a part of a sum, where a checkpoint has one value. Collective."""
    states = {name: sketch(tensor) for name, tensor in player.parts.tensors().items()}
    with blamed("part", "its state cannot be saved", "see docs/training.md"):
        require_same_parts(player.trainer.world.agreement.gather(states))
    changed = changed_values(player.update.optimizer, player.update.initial)
    numbers = [{key: value for key, value in group.items() if isinstance(value, float)} for group in changed]
    for other in player.trainer.world.agreement.gather(numbers):
        for mine, theirs in zip(numbers, other):
            if name := next((key for key in mine if differ(theirs.get(key), mine[key])), ""):
                what = f"its {name} is another number on each process, which has only some of the parameters"
                raise Refused("optimizer", what, "parallel=ddp")
    for name, tensor in state_tensors(player.trainer.held).items():
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            what = f"{name} is an unfinished sum over the processes, which no checkpoint holds (full_tensor() takes it)"
            raise Refused("optimizer", what, "parallel=ddp")


def _look_at_evaluation(player: Player, seen: Seen) -> None:
    """Evaluate a batch. Find a buffer that this changes on each process in another way. Collective."""
    before = {name: sketch(buffer) for name, buffer in player.module.named_buffers()}
    player.evaluate(shares=[1.0])
    changed = {name: sketch(buffer) for name, buffer in player.module.named_buffers()}
    ranks = player.trainer.world.agreement.gather({name: now for name, now in changed.items() if differ(now, before[name])})
    for name in (name for name, now in changed.items() if any(differ(rank.get(name, now), now) for rank in ranks)):
        what = f"an evaluation changes its buffer {name}, on each process with its own samples"
        seen.finding = "model", what, "change it in training only (self.training)"


def weights_of(player: Player) -> dict[str, Sketch]:
    """Return sketches of the parameters, and of the tensors in the states of the parts."""
    weights = {name: sketch(parameter) for name, parameter in player.module.named_parameters()}
    return weights | {f"the state of part.{name}": sketch(tensor) for name, tensor in player.parts.tensors().items()}


def gradients_of(player: Player) -> dict[str, Sketch]:
    """Return sketches of the gradients of a step, before parts and clipping change them."""
    found: dict[str, Sketch] = {}
    for turn, gradients in player.watch.gradients.items():
        for name, parameter in player.module.named_parameters():
            if parameter.requires_grad:
                gradient = gradients[name]
                found[f"{name} in turn {turn}" if turn else name] = sketch(torch.zeros(()) if gradient is None else gradient)
    return found


@contextmanager
def _outputs(module: nn.Module, outputs: dict[tuple[str, torch.Size], Sketch]) -> Iterator[None]:
    """Record in `outputs` the first tensor that each module returns at its first call."""
    handles, noted = [], set[str]()
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue

        def note(part: nn.Module, _: object, output: Any, name: str = name) -> None:
            tensor: Any = first_tensor(output)
            tensor = tensor.wait() if hasattr(tensor, "wait") else tensor  # the sum of a layer that is cut by rows
            is_one = type(tensor) is Tensor and not is_of_functorch(tensor)  # whose numbers cannot be read within a vmap
            if name not in noted and is_one and tensor.is_floating_point():
                found = sketch(tensor)
                if found[0] == found[0] or any(True for _ in nn.Module.parameters(part)):  # or a stage has skipped it
                    outputs[name, tensor.shape] = found
                    noted.add(name)

        handles.append(part.register_forward_hook(note))
    yield
    for handle in handles:
        handle.remove()


# --- the differences between one process and several in the same steps


def difference(expected: Seen, ranks: list[Seen], *, but_not: Seen | None = None) -> str:
    """Return the first difference, or an empty text. A column that differs also in `but_not` does not count."""
    worst = ""
    for step in range(2):
        worst = worst or _other_number(expected, ranks[0], step, where=f"step {step + 1}", but_not=but_not)
        gradients = _merged(rank.gradients[step] for rank in ranks)
        worst = worst or far(expected.gradients[step], gradients, what=f"step {step + 1}: the gradient of")
    updates = f"{expected.num_updates} more updates by the same gradients"
    worst = worst or far(expected.updated, _merged(rank.updated for rank in ranks), what=f"after {updates}:")
    worst = worst or _other_number(expected, ranks[0], 2, where="an evaluation", but_not=but_not)
    buffers = _merged(rank.buffers for rank in ranks)
    for name, buffer in expected.buffers.items():  # one by one: some are counts
        found = {name: buffers[name]} if name in buffers else {}
        worst = worst or far({name: buffer}, found, what="after two steps: the buffer", scale=expected.scales[name])
    late = _merged(rank.gradients[2] for rank in ranks)
    worst = worst or far(expected.gradients[2], late, what=f"a step after {updates}: the gradient of", tolerance=_LATE)
    if not worst:
        return ""
    for output, one in expected.outputs.items():
        for rank in ranks:
            if output in rank.outputs and not distance(one, rank.outputs[output]) <= TOLERANCE * max(one[0], 1e-12):
                return f"first in the output of {output[0] or 'the model'}; {worst}"
    return worst


def _merged(of_ranks: Iterable[dict[str, Sketch]]) -> dict[str, Sketch]:
    return {name: one for sketches in [*of_ranks][::-1] for name, one in sketches.items()}


def _other_number(expected: Seen, rank: Seen, number: int, *, where: str, but_not: Seen | None) -> str:
    row, found = expected.rows[number], rank.rows[number]
    name = other_column(found, row, but_not=but_not.rows[number] if but_not is not None else None)
    return name and f"{name} of {where} is {shown(found.get(name))} instead of {shown(row.get(name))}"
