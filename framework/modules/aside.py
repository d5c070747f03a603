"""Digests, by path, of the values that objects keep outside of a checkpoint: in attributes, closures and globals."""

import array
import functools
import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from framework.modules.tensors import local

_MOST = 20_000  # the largest number of objects to look at
_LONG = 1000  # the items of a longer list or dictionary are not looked at one by one
_LARGEST = 1 << 26  # bytes; a larger tensor or array is sampled
_OF_MODULES = set(vars(nn.Module()))

GENERATOR = "generator"  # a generator's digest begins with this word
Memory = dict[str, str]  # digests by paths such as `layers.0.count`


def kept_aside(root: object, *, own: Iterable[str] = ()) -> Memory:
    """Return digests of what an object keeps in plain attributes and what these refer to; of a model, for each of its modules.

    The digests cover numbers, texts, arrays, generators, and models that are not part of the model. They may be in lists,
    dictionaries, other objects, functions, and the classes of the Python modules `own`. Parameters, buffers and an optimizer's
    state, which torch keeps, are left out.
    """
    walk = _Walk(set(own))
    if isinstance(root, nn.Module):
        walk.seen |= {id(part) for part in root.modules()}
        walk.saved = {_place_of(tensor) for tensor in (*nn.Module.parameters(root), *root.buffers())} - {0}
        for prefix, part in root.named_modules():
            walk.attributes(part, prefix, left_out=_OF_MODULES)
            walk.hooks(part, prefix)
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            walk.attributes(tensor, name, left_out=set())
            walk.hooks(tensor, name)
    elif isinstance(root, torch.optim.Optimizer):
        of_every_one = set(vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))])))
        walk.attributes(root, "", left_out=of_every_one)
    else:
        walk.attributes(root, "", left_out=set())
    return walk.found


def kept_by_modules(modules: Mapping[str, ModuleType]) -> Memory:
    """Return digests of the values in the globals of Python modules, and in the attributes of their classes and functions."""
    walk = _Walk(set(modules))
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            if not key.startswith("__"):
                walk.value(value, f"{name}.{key}")
    return walk.found


class _Walk:
    def __init__(self, own: set[str]) -> None:
        self.found: Memory = {}
        self.seen: set[int] = set()
        self.saved: set[int] = set()  # the memory addresses of parameters and buffers
        self._own = own  # names of Python modules
        self._alive: list[Any] = []  # keeps objects alive, so that no id is used twice

    def value(self, value: Any, path: str) -> None:
        if isinstance(value, Tensor) and _place_of(value) in self.saved:
            return
        if (plain := _plain(value)) is not None:
            self.found[path] = plain
            return
        if id(value) in self.seen or len(self.seen) > _MOST or isinstance(value, (ModuleType, torch.dtype, torch.device)):
            return
        if type(value).__module__.startswith("torch.distributed."):  # an object of a strategy, which the strategy makes again
            return
        self.seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, (list, tuple, dict)) and len(value) > _LONG and (text := _as_json(value)) is not None:
            self.found[path] = f"{type(value).__name__} {_digest(text.encode)}"
            return
        for name, item in self._within(value):
            self.value(item, f"{path}{name}")

    def hooks(self, value: object, path: str) -> None:
        """Look at the values that the user's own hooks keep."""
        dictionaries = [item for name, item in vars(value).items() if name.endswith("_hooks") and isinstance(item, dict)]
        dictionaries += [value._backward_hooks] if isinstance(value, Tensor) and value._backward_hooks else []
        for hook in (hook for hooks in dictionaries for hook in hooks.values()):
            if self._is_own(hook):
                self.value(hook, f"{path}.hook" if path else "hook")

    def _is_own(self, hook: Any) -> bool:
        if isinstance(hook, functools.partial):
            return self._is_own(hook.func)
        return getattr(hook, "__module__", None) in self._own or type(hook).__module__ in self._own

    def attributes(self, value: object, path: str, *, left_out: set[str]) -> None:
        self.seen.add(id(value))
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if name not in left_out:
                self.value(item, f"{path}.{name}" if path else name)
        self.value(type(value), f"{path}.{type(value).__name__}" if path else type(value).__name__)

    def _within(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the objects that an object refers to, with the last part of their paths."""
        if isinstance(value, Mapping):
            yield from (
                (f"[{key!r}]" if isinstance(key, (str, int)) else f"[{n}]", item)
                for n, (key, item) in enumerate(list(value.items()))
            )
        elif isinstance(value, (list, tuple, deque)):
            yield from ((f"[{number}]", item) for number, item in enumerate(list(value)))
        elif isinstance(value, (set, frozenset)):
            yield "", str(sorted(map(repr, value)))
        elif isinstance(value, nn.Module):  # a module that is not part of the model
            yield from ((f".{name}", tensor) for name, tensor in value.state_dict(keep_vars=True).items())
            for prefix, part in value.named_modules():
                own = ((name, item) for name, item in vars(part).items() if name not in _OF_MODULES)
                yield from ((f".{prefix}.{name}" if prefix else f".{name}", item) for name, item in own)
        elif isinstance(value, type):
            if value.__module__ in self._own:
                yield from ((f".{name}", item) for name, item in list(vars(value).items()) if not name.startswith("__"))
        elif isinstance(value, functools.partial):
            yield from ((f"({part})", getattr(value, part)) for part in ("func", "args", "keywords"))
        elif isinstance(value, (staticmethod, classmethod)):
            yield "()", value.__func__
        elif isinstance(value, (property, functools.cached_property)):
            yield "()", value.fget if isinstance(value, property) else value.func
        elif isinstance(value, MethodType):
            yield from ((part, item) for part, item in ((".self", value.__self__), ("()", value.__func__)))
        elif isinstance(value, FunctionType):
            if value.__module__ in self._own:
                cells = zip(value.__code__.co_freevars, value.__closure__ or ())
                yield from ((f"({name})", content) for name, content in ((name, _content(cell)) for name, cell in cells))
                yield from ((f".{name}", item) for name, item in vars(value).items())
                yield from (("(defaults)", item) for item in (value.__defaults__, value.__kwdefaults__))
        elif isinstance(value, GeneratorType):
            yield "(at)", value.gi_frame.f_lasti if value.gi_frame is not None else None
            yield "(locals)", dict(value.gi_frame.f_locals) if value.gi_frame is not None else None
        else:
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
            attributes = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
            yield from ((f".{name}", item) for name, item in attributes.items())
            if not attributes:
                yield from ((f"({number})", part) for number, part in enumerate(_parts_of_closed(value)))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _as_json(value: Any) -> str | None:
    """Return a list or dictionary as text; None if it holds anything but numbers, text, lists and dictionaries."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _parts_of_closed(value: Any) -> tuple[Any, ...]:
    """Return the parts of an object without visible attributes, such as an object of C: the parts that a copy is made from."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # an object may raise anything
        return ()
    return reduced[1:] if isinstance(reduced, tuple) else ()


def _plain(value: Any) -> str | None:
    """Return a digest of a value that holds no other values, else None. Large arrays are sampled."""
    if isinstance(value, (str, bytes)) and len(value) > _LONG:
        return f"text {_digest(lambda: value.encode(errors='replace') if isinstance(value, str) else value)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return repr(value)  # the text of nan equals the text of nan
    if isinstance(value, array.array):
        return f"array {value.typecode} {_digest(lambda: value.tobytes())}"
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        step = max(1, -(-flat.nbytes // _LARGEST))
        return f"array {value.dtype} {list(value.shape)} {_digest(lambda: flat[::step].tobytes())}"
    if isinstance(value, torch.Generator):
        return f"{GENERATOR} {_digest(lambda: _bytes_of(value.get_state()))}"
    if isinstance(value, np.random.Generator):
        return f"{GENERATOR} {value.bit_generator.state}"
    if isinstance(value, (random.Random, np.random.RandomState)):
        state = value.getstate() if isinstance(value, random.Random) else value.get_state()
        return f"{GENERATOR} {_digest(lambda: str(state).encode())}"
    return None


def _of_tensor(tensor: Tensor) -> str:
    kind = f"array {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{kind} {tensor.layout} {_digest(lambda: _bytes_of(tensor.to_dense()))}"
    return f"{kind} {list(tensor.shape)} {_digest(lambda: _bytes_of(tensor))}"


def _place_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _bytes_of(tensor: Tensor) -> bytes:
    mine = local(tensor.detach())  # of a shard, only this rank's part: nothing is sent
    if mine.untyped_storage().nbytes() < mine.nbytes:  # fsdp has freed the memory
        return b""
    flat = mine.reshape(-1)
    size = flat.numel() * flat.element_size()
    sample = flat[:: -(-size // _LARGEST)] if size > _LARGEST else flat
    copy = sample.to("cpu", copy=True)  # a copy, because torch cannot resize memory that numpy has seen
    return bytes(copy.contiguous().view(torch.uint8).numpy())


def _digest(content: Callable[[], bytes]) -> str:
    try:
        return hashlib.blake2b(content(), digest_size=8).hexdigest()
    except Exception:  # a tensor without storage, or of a kind that has no bytes
        return ""
