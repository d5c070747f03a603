"""Questions about a model that its module tree can answer."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from framework.runtime.torch_internals import BATCH_NORMS, DROPOUTS


def own_answer(model: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return a model's method of this name that needs no argument; None if it has none.

    Models of other people use the same names for other things: `self.blocks` is a module list in most transformers.
    """
    answer = getattr(model, name, None)
    if not inspect.ismethod(answer):
        return None
    parameters = inspect.signature(answer).parameters.values()
    needs = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return None if needs else answer


def _own_modules(model: nn.Module, name: str) -> list[nn.Module] | None:
    """Return the modules that a method of this name lists; None if there is none, or it answers something else."""
    answer = own_answer(model, name)
    found: Any = answer() if answer is not None else None
    is_listing = isinstance(found, Iterable) and not isinstance(found, (str, Mapping))
    modules = list(found) if is_listing else []
    return modules if is_listing and all(isinstance(module, nn.Module) for module in modules) else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated units, for sharding, recomputation and compilation.

    The model's own answer (`blocks()`) if it has one; otherwise the children of its module lists and sequences, those
    that hold parameters. A model with neither is one unit: the list is empty.
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


def switch_off_dropout(model: nn.Module) -> None:
    """Make a model that will not be trained one that draws nothing: a strategy has then no reason to refuse it."""
    for layer in model.modules():
        if isinstance(layer, DROPOUTS):
            layer.p = 0.0
