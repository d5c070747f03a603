"""What a model's module tree shows (its blocks, its chain, its random layers), and how it is changed before it is trained."""

import difflib
import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.runtime.torch_internals import BATCH_NORMS, DROPOUTS, compile_without_caches


def own_answer(model: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return a model's method of this name if it needs no argument, else None.

    Other people's models use the same names for other things: `self.blocks` is a module list in most transformers.
    """
    answer = getattr(model, name, None)
    if not inspect.ismethod(answer):
        return None
    parameters = inspect.signature(answer).parameters.values()
    needs = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return None if needs else answer


def _own_modules(model: nn.Module, name: str) -> list[nn.Module] | None:
    """Return the modules that a method of this name lists; None if there is no such method, or it returns something else."""
    answer = own_answer(model, name)
    found: Any = answer() if answer is not None else None
    is_listing = isinstance(found, Iterable) and not isinstance(found, (str, Mapping))
    modules = list(found) if is_listing else []
    return modules if is_listing and all(isinstance(module, nn.Module) for module in modules) else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated units, for sharding, recomputation and compilation.

    They are the answer of the model's `blocks()` if it has this method, otherwise the children, with parameters, of its
    module lists and sequences. A model with neither is one unit: the list is empty.
    """
    if (answer := _own_modules(model, "blocks")) is not None:
        return answer
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
    """Return the modules with parameters that the model's forward calls; if the model only wraps another, the other's."""
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

    They are the answer of the model's `chain()`, or the children of an nn.Sequential.
    """
    if (answer := _own_modules(model, "chain")) is not None:
        return answer
    return list(model.children()) if isinstance(model, nn.Sequential) else None


def batch_dependent_layers(model: nn.Module) -> list[str]:
    """Return the kinds of layers, sorted, that couple the samples of a micro-batch or draw randomness for it."""
    return sorted({type(layer).__name__ for layer in model.modules() if isinstance(layer, BATCH_NORMS) or _draws(layer)})


def has_dropout(model: nn.Module) -> bool:
    return any(map(_draws, model.modules()))


def _draws(layer: nn.Module) -> bool:
    return isinstance(layer, DROPOUTS) and layer.p > 0


# --- changes


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Do not train the parameters that match one of the patterns (`*` and `?`, over the whole name).

    Any name of a tied weight counts. ValueError for a pattern that matches no name, and if nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ValueError(f"{pattern!r} matches no parameter of the model ({_expected(pattern, model)})")
        for name in matching:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"{', '.join(patterns)}: every parameter is frozen, and nothing is left to train")


def _expected(pattern: str, model: nn.Module) -> str:
    of_modules = [f"{name}.*" for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if f"{pattern}.*" in of_modules:
        return f"did you mean {pattern}.*?"
    return nearest_name(pattern, [*of_modules, *names])


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """Return which name was probably meant by a pattern that matches none of them."""
    close = difflib.get_close_matches(pattern, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names[:5])}, ..."


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's blocks and run their forward again in the backward pass: memory for time.

    Wraps the blocks' `forward`, not the blocks: parameter names stay the model's own.
    """
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def compile_blocks(model: nn.Module) -> None:
    """Compile the model's blocks (the whole model if it has none) in place: names stay, and equal blocks compile once."""
    compile_without_caches()
    for block in blocks_of(model) or [model]:
        # not block.compile(): for torch's own modules, such as nn.Sequential, it silently does nothing
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def switch_off_dropout(model: nn.Module) -> None:
    """Remove dropout from a model that will not be trained: then no strategy refuses it for its random draws."""
    for layer in model.modules():
        if isinstance(layer, DROPOUTS):
            layer.p = 0.0
