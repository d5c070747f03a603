"""Questions about a model that its module tree can answer."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


def separate(units: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the units that share no weight with each other or with the rest of the model."""
    inside = {module for unit in units for module in unit.modules()}
    rest = [module for module in model.modules() if module not in inside]
    uses = Counter(id(p) for module in rest for p in module.parameters(recurse=False))
    uses.update(id(p) for unit in units for p in unit.parameters())
    return [unit for unit in units if all(uses[id(p)] == 1 for p in unit.parameters())]


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that the model's forward calls, those with parameters; of a mere wrapper, those of what it wraps."""
    units = _called(model)
    while len(units) == 1 and not type(units[0]).__module__.startswith("torch.nn.") and (inner := _called(units[0])):
        units = inner
    return units


def _called(model: nn.Module) -> list[nn.Module]:
    units: list[nn.Module] = []
    for child in model.children():
        is_container = type(child).forward is nn.Module.forward or isinstance(child, nn.Sequential)
        found = _called(child) if is_container else [child]
        units += [unit for unit in found if any(True for _ in unit.parameters())]
    return units


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """Return modules that, called one after the other, are the model's forward; None if they are not known.

    The model's own answer (`chain()`), or the children of an nn.Sequential.
    """
    answer = getattr(model, "chain", None)
    if callable(answer):
        return list(answer())
    return list(model.children()) if isinstance(model, nn.Sequential) else None


def batch_dependent_layers(model: nn.Module) -> list[str]:
    """Return the kinds of layers, sorted, that couple the samples of a micro-batch or draw randomness for it."""
    kinds = set()
    for layer in model.modules():
        is_dropout = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        if is_dropout or isinstance(layer, nn.modules.batchnorm._BatchNorm):
            kinds.add(type(layer).__name__)
    return sorted(kinds)


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in model.modules())


def switch_off_dropout(model: nn.Module) -> None:
    """Make a model that will not be trained one that draws nothing: a strategy has then no reason to refuse it."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's blocks and run their forward again in the backward pass: memory for time.

    Wraps the blocks' `forward`, not the blocks: parameter names stay the model's own.
    """
    for block in blocks_of(model):
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]  # that is the purpose


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def has_compiler() -> bool:
    """Return whether torch.compile finds the C++ compiler (`CXX`, else g++) without which it fails at the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_blocks(model: nn.Module) -> None:
    """Compile the model's blocks (or the whole, if it has none) in place: names stay, and equal blocks compile once."""
    _without_caches()
    for block in blocks_of(model) or [model]:
        # not block.compile(): it does nothing, without a word, for torch's own modules, such as nn.Sequential
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def _without_caches() -> None:
    """Have torch.compile read nothing that an earlier process left: pickles, in a folder of a guessable name in /tmp."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # not torch.compiler.config.force_disable_caches, which warns in every process
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.automatic_dynamic_local_pgo = False
