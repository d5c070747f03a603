"""The mesh: the layout of the processes along the axes of a strategy."""

import math

MESH_AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")  # outermost first


def resolve_axes(axes: dict[str, int | None], *, world_size: int) -> dict[str, int]:
    """Replace the one size that is None by the rest of `world_size`. Raise ValueError if the product is not `world_size`."""
    left = world_size // math.prod(size or 1 for size in axes.values())
    sizes = {name: size or left for name, size in axes.items()}
    if math.prod(sizes.values()) != world_size or list(axes.values()).count(None) > 1:
        arithmetic = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"mesh {arithmetic} does not make {world_size} processes")
    return sizes
