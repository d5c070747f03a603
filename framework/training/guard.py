"""The checks of a run before each checkpoint: a model that could not be restored, and replicas that differ."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from framework.checkpoint.canonical import model_tensors
from framework.distributed.world import World
from framework.modules.tensors import local
from framework.runtime.exits import RunEnded, Unfit

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
    """The checks before each checkpoint: the run ends if its model could not be restored, or if its replicas differ."""

    def __init__(self, module: nn.Module, *, world: World, watches_frozen: bool) -> None:
        """Take the trained part of the model on this rank, as it is at the start.

        `watches_frozen`: only the model itself could change a frozen tensor, so several processes must not see a change.
        """
        self._module, self._world = module, world
        self._watches_frozen = watches_frozen and world.world_size > 1
        self._kinds = _kinds(module)
        self._frozen: dict[str, list[float]] = {}  # sketches after the first step

    def step_taken(self) -> None:
        if self._watches_frozen and not self._frozen:
            frozen = {name for name, parameter in self._module.named_parameters() if not parameter.requires_grad}
            self._watches_frozen = bool(frozen)
            sketches = _sketches(self._module).items() if frozen else ()
            self._frozen = {name: sketch for name, sketch in sketches if name.split(" ")[0] in frozen}

    def saving(self) -> None:
        """Raise Unfit or ReplicasDiffer on every rank if no checkpoint should be written. Collective."""
        world_size = self._world.world_size
        sketches = _sketches(self._module) if world_size > 1 else {}
        own = _of_one_rank(self._module, world_size=world_size)
        shared = {name: sketch for name, sketch in sketches.items() if name not in own}
        self._world.agreement.judged((self._fault(sketches), shared), _judge)

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
