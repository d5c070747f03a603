"""The checks of a run before each checkpoint: state that no checkpoint holds, and replicas that differ."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from framework.checkpoint.canonical import model_tensors
from framework.distributed.world import World
from framework.modules.aside import Memory, digests, kept_aside, kept_by_modules
from framework.modules.tensors import local
from framework.runtime.exits import RunEnded, Unfit
from framework.runtime.log import LOGGER

_REHEARSED = 3  # steps and evaluations: a rehearsal has restored their changes, and compared the following steps
_ROUNDING = 1e-7  # of a tensor's norm, for two sums of the same numbers
_TOLERANCE = 1e-3  # of a tensor's norm, because different kinds of processors round differently


class ReplicasDiffer(RunEnded):
    """The error if ranks that should have the same weights have different weights; the last checkpoint is intact."""


def require_equal_trails(trails: Sequence[float], *, step: int) -> None:
    """Raise Unfit if the ranks' trails (Engine.trail) differ: what they have gathered or summed is then wrong."""
    if other := [rank for rank, trail in enumerate(trails) if trail != trails[0]]:
        what = f"rank {other[0]} has called other blocks than rank 0, or has gradients of other weights"
        raise Unfit(
            f"model: by step {step}, {what}, but this strategy exchanges them in one order (parallel=ddp "
            "parallel.find_unused_parameters=true, or choose by the step alone); the last checkpoint is intact"
        )


class Guard:
    """A guard that warns of new state that no checkpoint holds, and ends a run that could not be restored.

    It warns if objects start to keep such state after the rehearsed steps. It ends a run if its model could not be restored, or
    if its replicas differ. `saving` is collective.
    """

    def __init__(
        self, holders: Mapping[str, object], *, module: nn.Module, world: World, own: Iterable[str], without: Iterable[object]
    ) -> None:
        """Take the objects to guard. `holders` are the model, the task, the optimizer and the parts, by their keys.

        `module` is the trained part of the model on this rank. `own` are the names of the user's Python modules. Objects in
        `without` are not looked into.
        """
        self._holders, self._module, self._world = holders, module, world
        self._own, self._without = set(own), list(without)
        self._has_parts = any(key.startswith("part.") for key in holders)  # a part may change any tensor
        self._steps = 0
        self._evaluated: set[str] = set()  # the names of the splits
        self._known: set[str] = set()  # paths that change from step to step or in an evaluation, or that have caused a warning
        self._late: set[str] = set()  # paths that have changed at another time
        self._seen: Memory = {}
        self._kinds = _kinds(module)
        self._frozen: dict[str, list[float]] = {}  # tensors that only the model itself could change

    def step_taken(self) -> None:
        if self._steps < _REHEARSED:
            if self._steps == 0 and self._world.world_size > 1 and self._holders and not self._has_parts:
                frozen = {name for name, parameter in self._module.named_parameters() if not parameter.requires_grad}
                sketches = _sketches(self._module).items()
                self._frozen = {name: sketch for name, sketch in sketches if name.split(" ")[0] in frozen}
            self._steps += 1
            self._learn()

    def evaluating(self) -> None:
        self._notice()

    def _notice(self) -> None:
        """Record the changes since the last look that happened neither in the first steps nor in an evaluation."""
        if self._steps == _REHEARSED:
            now = self._look(at_a_glance=True)
            self._late |= self._changed(now)
            self._seen = now

    def evaluated(self, split: str) -> None:
        """Accept the changes of a split's first evaluation, which was rehearsed; later evaluations may change only these."""
        if split not in self._evaluated:
            self._evaluated.add(split)
            self._learn()

    def _learn(self) -> None:
        now = self._look(at_a_glance=True)
        self._known |= {_place(path) for path in self._changed(now)} if self._seen else set()
        self._seen = now

    def saving(self, declared: Callable[[], Mapping[str, Iterable[object]]]) -> None:
        """Warn of each path once. Raise Unfit or ReplicasDiffer on every rank if no checkpoint should be written. Collective.

        `declared()` returns what a checkpoint will hold of each holder besides parameters, buffers and the optimizer's state.
        """
        self._notice()
        sketches = _sketches(self._module) if self._world.world_size > 1 else {}
        mine = {path for path in self._late if _place(path) not in self._known}
        agreement = self._world.agreement
        late = set[str]().union(*agreement.distinct(sorted(mine)).values())
        self._late.clear()
        self._warn(late, declared)
        own = _of_one_rank(self._module, world_size=self._world.world_size)
        shared = {name: sketch for name, sketch in sketches.items() if name not in own}
        agreement.judged((self._fault(sketches), shared), _judge)

    def _warn(self, late: set[str], declared: Callable[[], Mapping[str, Iterable[object]]]) -> None:
        if not late:
            return
        held, now = {key: digests(values) for key, values in declared().items()}, self._look(at_a_glance=False)
        places = {_place(path) for path in late if path in now and now[path] not in held.get(self._key(path), ())}
        self._known |= {_place(path) for path in late}
        of_all = set().union(*self._world.agreement.distinct(sorted(places)).values())
        for place in sorted(of_all) if self._world.rank == 0 else ():
            LOGGER.warning("%s has changed for the first time since the start, and no checkpoint holds it: if anything "
                           "depends on it, a continued run computes different results (docs/extend.md)",
                           place)  # fmt: skip

    def _fault(self, sketches: dict[str, list[float]]) -> str:
        """Return why this rank's part of the model should not be in a checkpoint; an empty text if it can be."""
        for name, kind in _kinds(self._module).items():
            if self._kinds.get(name) != kind:
                now = f"{name} is {kind} now, and was {self._kinds.get(name, 'missing')} at the start"
                return f"{now}: no run could continue from such a checkpoint (make it in the constructor, in its full size)"
        for name, (norm, total) in self._frozen.items():
            if _differ(sketches[name], [norm, total], tolerance=_ROUNDING):
                what = f"{name}, which is frozen, has changed since the start: a forward changes it on each process separately"
                return f"{what} (register_buffer() it: a step's micro-batch 0 then changes it on all processes)"
        return ""

    def _changed(self, now: Memory) -> set[str]:
        return {path for path in now.keys() | self._seen.keys() if now.get(path) != self._seen.get(path)}

    def _key(self, path: str) -> str:
        return next((key for key in self._holders if path.startswith(f"{key}.")), "")

    def _look(self, *, at_a_glance: bool) -> Memory:
        """Return the digests of the state outside of checkpoints, by KEY.PATH."""
        own = {name: sys.modules[name] for name in self._own if name in sys.modules}
        found = kept_by_modules(own, at_a_glance=at_a_glance)
        for key, holder in self._holders.items():
            kept = kept_aside(holder, own=own, at_a_glance=at_a_glance, without=self._without)
            found |= {f"{key}.{path}": value for path, value in kept.items()}
        return found


def _judge(of_ranks: Mapping[int, tuple[str, dict[str, list[float]]]]) -> None:
    """Raise Unfit for a rank's fault, or ReplicasDiffer."""
    for fault in filter(None, (fault for fault, _ in of_ranks.values())):
        raise Unfit(f"model: {fault}")
    first: dict[str, tuple[int, list[float]]] = {}
    for rank, (_, sketches) in of_ranks.items():
        for name, sketch in sketches.items():
            other, theirs = first.setdefault(name, (rank, sketch))
            if _differ(sketch, theirs, tolerance=_TOLERANCE):
                norms = f"its norm is {theirs[0]:.6g} and {sketch[0]:.6g}"
                raise ReplicasDiffer(
                    f"{name} is not the same on ranks {other} and {rank} ({norms}): only some ranks have changed it (a part, a "
                    "hook), or memory is faulty; the last checkpoint is intact"
                )


def _differ(one: Sequence[float], other: Sequence[float], *, tolerance: float) -> bool:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) > tolerance * max(one[0], other[0])


def _place(path: str) -> str:
    """Return a path up to its first number: for a growing list, the list; for a dictionary, an entry by its text."""
    return re.split(r"\[\d", path, maxsplit=1)[0]


def _kinds(module: nn.Module) -> dict[str, str]:
    """Return the dtype and the shape of each tensor of the model that a checkpoint holds."""
    return {
        name.removeprefix("model/"): f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in model_tensors(module).items()
    }


def _sketches(module: nn.Module) -> dict[str, list[float]]:
    """Return the norm and the sum of each tensor that this rank holds; of a shard, of this rank's part."""
    names: dict[torch.device, list[str]] = {}
    sketches: dict[torch.device, list[Tensor]] = {}  # one tensor for each device, so that it waits for each device once
    for name, tensor in model_tensors(module).items():
        mine = local(tensor)
        mine = torch.view_as_real(mine) if mine.is_complex() else mine
        if mine.is_floating_point() and mine.numel():
            names.setdefault(mine.device, []).append(_shard(name, tensor))
            sketch = [torch.linalg.vector_norm(mine, dtype=torch.float64), mine.sum(dtype=torch.float64)]
            sketches.setdefault(mine.device, []).append(torch.stack(sketch))
    return {
        name: numbers for device in names for name, numbers in zip(names[device], torch.stack(sketches[device]).cpu().tolist())
    }


def _of_one_rank(module: nn.Module, *, world_size: int) -> set[str]:
    """Return the names in `_sketches` that no other rank has: those of tensors that are cut over all ranks."""
    return {
        _shard(name, tensor)
        for name, tensor in model_tensors(module).items()
        if hasattr(tensor, "device_mesh")
        and tensor.device_mesh.size() == world_size
        and not any(placement.is_replicate() for placement in tensor.placements)  # type: ignore[attr-defined]
    }


def _shard(name: str, tensor: Tensor) -> str:
    """Return a name that ranks share if they hold the same values; for a shard, it includes the place in the mesh."""
    if not hasattr(tensor, "device_mesh"):
        return name.removeprefix("model/")
    places = zip(tensor.placements, tensor.device_mesh.get_coordinate() or ())  # type: ignore[attr-defined]
    return f"{name.removeprefix('model/')} {[place for placement, place in places if not placement.is_replicate()]}"
