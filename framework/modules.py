"""Questions about a model that its module tree can answer."""

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated units, for sharding, recomputation and compilation.

    The model's own answer (`blocks()`) if it has one; otherwise the children of its module lists and sequences, those
    that hold parameters. A model with neither is one unit: the list is empty.
    """
    if hasattr(model, "blocks") and callable(model.blocks):
        return list(model.blocks())
    blocks: list[nn.Module] = []
    for child in model.children():
        inner = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        blocks += [unit for unit in inner if any(True for _ in unit.parameters())]
    return blocks
