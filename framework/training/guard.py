"""The checks of a run before each checkpoint: replicas that differ, and ranks that have run different blocks."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from framework.checkpoint.canonical import model_tensors
from framework.distributed.world import World
from framework.modules.structure import names_of_trained
from framework.modules.tensors import WIDEST, local
from framework.runtime.exits import RunEnded, Unfit

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


def require_same_trained(module: nn.Module, trained: Collection[str]) -> None:
    """Raise Unfit if other parameters are trained than at the start, of which `trained` are the names."""
    if names_of_trained(module) != trained:
        what = "the trained parameters have changed since the start (requires_grad), and no checkpoint holds this change"
        raise Unfit(f"model: {what} (let a weight of 0 or detach() switch a part off)")


def require_equal_replicas(module: nn.Module, *, world: World) -> None:
    """Raise ReplicasDiffer, on every rank, if ranks that should have the same weights have different weights. Collective."""
    if world.world_size > 1:
        own = _of_one_rank(module, world_size=world.world_size)
        shared = {name: sketch for name, sketch in _sketches(module).items() if name not in own}
        world.agreement.judged(shared, _judge)


def _judge(of_ranks: Mapping[int, dict[str, list[float]]]) -> None:
    first: dict[str, tuple[int, list[float]]] = {}
    for rank, sketches in of_ranks.items():
        for name, sketch in sketches.items():
            other, theirs = first.setdefault(name, (rank, sketch))
            if _differ(sketch, theirs):
                norms = f"its norm is {theirs[0]:.6g} and {sketch[0]:.6g}"
                raise ReplicasDiffer(
                    f"{name} is not the same on ranks {other} and {rank} ({norms}): only some ranks have changed it (a part, a "
                    "hook), or memory is faulty; the last checkpoint is intact"
                )


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) > _TOLERANCE * max(one[0], other[0])


def _sketches(module: nn.Module) -> dict[str, list[float]]:
    """Return the norm and the sum of each tensor that this rank holds; of a shard, of this rank's part."""
    names: dict[torch.device, list[str]] = {}
    sketches: dict[torch.device, list[Tensor]] = {}  # one tensor for each device, so that it waits for each device once
    for name, tensor in model_tensors(module).items():
        mine = local(tensor)
        mine = torch.view_as_real(mine) if mine.is_complex() else mine
        if mine.is_floating_point() and mine.numel():
            names.setdefault(mine.device, []).append(_shard(name, tensor))
            dtype = WIDEST[mine.device.type]
            sketch = [torch.linalg.vector_norm(mine, dtype=dtype), mine.sum(dtype=dtype)]
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
