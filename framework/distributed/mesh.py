"""The mesh: how the processes are laid out along the axes of a strategy."""

MESH_AXES = ("replicate", "shard", "tensor", "pipeline", "context")


def resolve_axes(axes: dict[str, int | None], *, world_size: int) -> dict[str, int]:
    """Fill the one axis that is None with what is left of `world_size`. ValueError if the sizes do not multiply to it."""
    known = 1
    for size in axes.values():
        known *= size or 1
    open_axes = [name for name, size in axes.items() if size is None]
    sizes = {name: size or world_size // known for name, size in axes.items()}
    product = known if not open_axes else known * (world_size // known)
    if product != world_size or len(open_axes) > 1:
        arithmetic = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"mesh {arithmetic} does not make {world_size} processes")
    return sizes
