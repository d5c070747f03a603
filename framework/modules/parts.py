"""A model's parts (blocks, chain, experts, tensor plan), from the configuration, from the model, or from its module tree."""

import difflib
import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from framework.modules.trace import traced

_GIVEN: WeakKeyDictionary[nn.Module, Mapping[str, Any]] = WeakKeyDictionary()
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def give_parts(model: nn.Module, parts: Mapping[str, Any]) -> None:
    """Set the parts of a model: `blocks`, `chain` and `experts` name modules, `tensor_plan` says how to cut layers.

    A name is the name of a module, or of a list of modules (it then means the modules in the list), or of a class (all modules
    of the class); `*` matches any text. `blocks` may also be a number: then the blocks are the smallest modules with at least
    so many parameters. ValueError for a name that matches no module.
    """
    answers: dict[str, Any] = {}
    for name in (name for name in ("blocks", "chain", "experts") if parts.get(name) is not None):
        given, key = parts[name], f"model.parts.{name}"
        if isinstance(given, int):
            answers[name] = _of_size(model, given, key=key)
            continue
        paths = [given] if isinstance(given, str) else given
        answers[name] = [module for path in paths for module in named(model, path, key=key)]
    if (plan := parts.get("tensor_plan")) is not None:
        for pattern in plan:
            if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in model.named_modules()):
                raise ValueError(_no_module("model.parts.tensor_plan", pattern, model))
        answers["tensor_plan"] = dict(plan)
    _GIVEN[model] = answers


def named(model: nn.Module, path: str, *, key: str) -> list[nn.Module]:
    """Return the modules that a path in the configuration names. ValueError that names the key, if there are none."""
    found = [module for name, module in model.named_modules() if fnmatch.fnmatchcase(name, path)] or _of_classes(model, {path})
    if not found:
        raise ValueError(_no_module(key, path, model))
    return [part for module in found for part in (module.children() if isinstance(module, CONTAINERS) else [module])]


def _no_module(key: str, path: str, model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    classes = {type(module).__name__ for module in model.modules() if module is not model}
    return f"{key}: {path!r} names no module of {type(model).__name__} ({nearest_name(path, [*names, *sorted(classes)])})"


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """Return a hint: the name that was probably meant by a pattern that matches none of the names."""
    close = difflib.get_close_matches(pattern, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names[:5])}, ..."


def own_answer(model: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return the function that gives a part: the configuration's answer, or else the model's method without needed arguments.

    Other people's models use the same names differently: in most transformers, `self.blocks` is a module list.
    """
    given = _GIVEN.get(model, {})
    if name in given:
        return lambda: given[name]
    answer = getattr(model, name, None)
    if not inspect.ismethod(answer):
        return None
    parameters = inspect.signature(answer).parameters.values()
    needs = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return None if needs else answer


def _own_modules(model: nn.Module, name: str) -> list[nn.Module] | None:
    """Return the modules that an answer of this name lists; None if there is no answer, or the answer is something else."""
    answer = own_answer(model, name)
    found: Any = answer() if answer is not None else None
    is_listing = isinstance(found, Iterable) and not isinstance(found, (str, Mapping))
    modules = list(found) if is_listing else []
    return modules if is_listing and all(isinstance(module, nn.Module) for module in modules) else None


# --- blocks


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated units, for sharding, recomputation and compilation.

    They are the answer of the configuration or of the model's `blocks()`. Without an answer, they are the modules of
    `repeated` that a traced forward pass enters; so experts that it enters only for some samples are not blocks. For a model
    that repeats nothing, the list is empty, and the model is one unit.
    """
    if (answer := _own_modules(model, "blocks")) is not None:
        return answer
    units, trace = repeated(model), traced(model)
    is_open = trace is None or any(unit in trace.inside for unit in units)  # it failed in a unit: other units may follow
    return units if is_open or trace is None else [unit for unit in units if unit in trace.entered()]


def repeated(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that the module tree shows, anywhere in it; they depend only on the model.

    They are the modules of the classes that a library lists as not to be split (Hugging Face's `_no_split_modules`), if there
    is such a list. Otherwise they are modules of which a list or sequence holds several. If stages in a list hold lists of
    blocks, the blocks count; experts within a block do not. A model without such a list has the layers of its lists and
    sequences.
    """
    unsplit = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return _of_classes(model, unsplit) or _repeated(model) or _layers(model)


def _of_classes(model: nn.Module, names: set[str]) -> list[nn.Module]:
    """Return the outermost modules of classes with these names."""
    found: list[nn.Module] = []
    for child in model.children():
        found += [child] if type(child).__name__ in names and _size(child) else _of_classes(child, names)
    return found


def _of_size(model: nn.Module, least: int, *, key: str) -> list[nn.Module]:
    """Return the smallest modules with at least so many parameters. ValueError that names the key, if there are none."""

    def found(module: nn.Module) -> list[nn.Module]:
        inside = [unit for member in _members(module) if _size(member) >= least for unit in found(member)]
        return inside or [module]

    if least < 1:
        raise ValueError(f"{key}: {least} is not a number of parameters (1 or more; [] for no blocks)")
    if all(_size(member) < least for member in _members(model)):
        within = f"{type(model).__name__} (of {_size(model):,})"
        raise ValueError(f"{key}: {least}, but no module within {within} has that many parameters")
    return found(model)


def _repeated(module: nn.Module) -> list[nn.Module]:
    members = _members(module)
    inside = {member: _repeated(member) for member in members}

    def is_stage(member: nn.Module) -> bool:
        return sum(map(_size, inside[member])) >= _size(member) / 2

    blocks: list[nn.Module] = []
    for member in members:
        same = [other for other in members if _kind(other) == _kind(member)]
        # stages are sequences, or differ, and hold little but their blocks; of blocks that differ, only some may hold experts
        differ = len({_shapes(other) for other in same}) > 1
        are_stages = is_stage(member) if isinstance(member, CONTAINERS) else differ and all(map(is_stage, same))
        is_one_of_several = isinstance(module, CONTAINERS) and (len(same) > 1 or len(members) == 1)
        is_block = is_one_of_several and not are_stages and _num_matrices(member) > 1
        blocks += [member] if is_block else inside[member]
    return list(dict.fromkeys(blocks))


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters in a module; a list is not called itself, so its members replace it."""
    if is_parametrized(module):
        return []
    members: list[nn.Module] = []
    for child in module.children():
        is_called = getattr(type(child), "forward", None) is not nn.Module.forward  # a scripted module gets `forward` later
        if _size(child):
            members += [child] if is_called or not isinstance(module, CONTAINERS) else _members(child)
    return members


def _kind(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__  # not the class: a parametrization makes one for each module


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of the model's outermost sequences and lists."""
    members = _members(module)
    if isinstance(module, CONTAINERS):
        return members
    return list(dict.fromkeys(layer for member in members for layer in _layers(member)))


def _num_matrices(module: nn.Module) -> int:
    return sum(parameter.ndim > 1 for parameter in nn.Module.parameters(module))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in nn.Module.parameters(module))


def _shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def description(units: Sequence[nn.Module], model: nn.Module) -> str:
    """Return a description of the units, such as `12 units of GPT2Block, 93 % of the weights`."""
    if not units:
        return f"none in {type(model).__name__}, which is one unit (model.parts.blocks names its blocks)"
    counts = Counter(type(unit).__name__ for unit in units)
    kinds = " and ".join(f"{count} unit{'s' * (count != 1)} of {kind}" for kind, count in counts.most_common(3))
    inside = {id(parameter): parameter.numel() for unit in units for parameter in nn.Module.parameters(unit)}
    return f"{kinds}, {100 * sum(inside.values()) / max(1, _size(model)):.0f} % of the weights"


def separate(units: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the units that share no weight with each other or with the rest of the model."""
    inside = {module for unit in units for module in unit.modules()}
    rest = [module for module in model.modules() if module not in inside]
    uses = Counter(id(p) for module in rest for p in nn.Module.parameters(module, recurse=False))
    uses.update(id(p) for unit in units for p in nn.Module.parameters(unit))
    return [unit for unit in units if all(uses[id(p)] == 1 for p in nn.Module.parameters(unit))]


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that the forward calls; for a wrapper of one model, those that this model calls."""
    units = _called(model)
    while len(units) == 1 and not type(units[0]).__module__.startswith("torch.nn.") and (inner := _called(units[0])):
        units = inner
    return units


def _called(model: nn.Module) -> list[nn.Module]:
    units: list[nn.Module] = []
    for child in model.children():
        is_container = getattr(type(child), "forward", None) is nn.Module.forward or isinstance(child, nn.Sequential)
        found = _called(child) if is_container else [child]
        units += [unit for unit in found if any(True for _ in nn.Module.parameters(unit))]
    return units


# --- chain


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules that, called one after the other, are the model's forward; None if they are not known.

    They are the answer of the configuration or of the model's `chain()`, or the children of an nn.Sequential.
    """
    if (answer := _own_modules(model, "chain")) is not None:
        return answer
    return list(model.children()) if isinstance(model, nn.Sequential) else None


# --- experts


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the stacked experts of a layer: their parameters are (num_experts, ...).

    They are the answer of the configuration or of the model's `experts()`. Without an answer, they are all modules of the
    classes of which a traced forward pass calls a module with tokens (N, D), the indices of each token's experts (N, K) and
    their weights (N, K).
    """
    if (answer := _own_modules(model, "experts")) is not None:
        return answer
    trace = traced(model)
    calls = [event for event in trace.events if event.kind == "enter"] if trace is not None else []
    kinds = {type(event.what) for event in calls if _are_choices(*event.value)}
    return [module for module in model.modules() if type(module) in kinds and _is_stacked(module)]


def _are_choices(given: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a module's arguments are tokens, and the indices and weights of each token's experts."""
    arguments = [*given, *named.values()]
    if len(arguments) != 3 or not all(isinstance(item, Tensor) and item.ndim == 2 for item in arguments):
        return False
    tokens, index, weights = arguments
    floats = [tensor.is_floating_point() for tensor in arguments]
    return floats == [True, False, True] and len(tokens) == len(index) and index.shape == weights.shape


def _is_stacked(module: nn.Module) -> bool:
    own = [*nn.Module.parameters(module, recurse=False)]
    return any(parameter.ndim > 1 for parameter in own) and len({parameter.shape[:1] for parameter in own}) == 1
