"""The mesh: how the processes are laid out along the axes of a strategy."""

import math

MESH_AXES = ("replicate", "shard", "tensor", "pipeline", "context", "expert")


def resolve_axes(axes: dict[str, int | None], *, world_size: int) -> dict[str, int]:
    """Fill the one axis that is None with what is left of `world_size`. ValueError if the sizes do not multiply to it."""
    left = world_size // math.prod(size or 1 for size in axes.values())
    sizes = {name: size or left for name, size in axes.items()}
    if math.prod(sizes.values()) != world_size or list(axes.values()).count(None) > 1:
        arithmetic = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"mesh {arithmetic} does not make {world_size} processes")
    return sizes
