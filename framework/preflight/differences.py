"""The differences that a forward makes: to a model, and to the generators."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from framework.engine.engine import Engine
from framework.engine.own_step import Context
from framework.randomness import has_drawn
from framework.runs.metrics_file import Row
from framework.runtime.exits import is_own_code
from framework.runtime.torch_internals import TorchDispatchMode
from framework.training.parts import LoopParts


@contextmanager
def untouched(*modules: nn.Module | None) -> Iterator[None]:
    """Restore, after the context, the parameters and buffers that a forward has changed or replaced."""
    whole = nn.ModuleList(module for module in modules if module is not None)
    before = [(tensor, tensor.detach().clone()) for tensor in (*whole.parameters(), *whole.buffers())]
    places = [(part, dict(part.named_buffers(recurse=False))) for part in whole.modules()]
    yield
    for part, buffers in places:
        for name, buffer in buffers.items():
            setattr(part, name, buffer)
    for tensor, value in before:
        if tensor.shape == value.shape:
            tensor.data.copy_(value)
        else:  # a statistic that gets its shape from the first samples
            tensor.data = value
    for parameter in whole.parameters():
        parameter.grad = None


def real(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; of complex numbers, the real and imaginary parts."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of their dtype."""
    if one.shape != other.shape or one.is_complex() != other.is_complex():
        return False
    tolerance = 1e-9 if one.dtype == torch.float64 else 1e-5
    one, other = (real(tensor).double().nan_to_num() for tensor in (one, other))
    return not one.numel() or bool((one - other).abs().max() <= tolerance * other.abs().max())


def differ(one: Any, other: Any, *, tolerance: float = 1e-6) -> bool:
    """Return whether two plain values differ by more than rounding."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(differ(*pair, tolerance=tolerance) for pair in zip(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differ(one[key], other[key], tolerance=tolerance) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        is_same = one == other or (one != one and other != other)  # of two infinite numbers, the difference is no number
        return not is_same and not abs(one - other) <= tolerance * max(1e-9, abs(other))
    return bool(one != other)


def other_column(ours: Row, theirs: Row, *, but_not: Row | None = None, tolerance: float = 1e-6) -> str:
    """Return the first column that differs, but not one that differs also between `theirs` and `but_not`; or an empty text.

    `but_not` comes from the same computation as `theirs`: a clock, for example, differs little between them, and later more.
    """
    for name in {**theirs, **ours}:
        varies = but_not is not None and differ(but_not.get(name), theirs.get(name), tolerance=1e-12)
        if not varies and differ(ours.get(name), theirs.get(name), tolerance=tolerance):
            return name
    return ""


class Place(NamedTuple):
    """Where a number is: in the run's object with this key, at a path of attributes."""

    key: str
    path: str
    is_deep: bool = False  # in a list, a dictionary or an object that an attribute holds


def plain_numbers(holders: Mapping[str, Any]) -> dict[Place, str]:
    """Return the numbers, tensors and arrays in plain attributes of objects, and of a module's modules, by their places.

    Those in a list or a dictionary have a path such as `history[3]`, those in an object of the user such as `sampler.seen`.
    """
    found: dict[Place, str] = {}
    for key, holder in holders.items():
        modules = dict(holder.named_modules()) if isinstance(holder, nn.Module) else {"": holder}
        for prefix, module in modules.items():
            for name, value in list(getattr(module, "__dict__", {}).items()):
                path = f"{prefix}.{name}" if prefix else name
                numbers = _numbers_in(value, path, depth=0 if name.startswith("_") or name in _HELD else 2)
                found |= {Place(key, place, is_deep=place != path): repr(number) for place, number in numbers}
    return found


_HELD = ("state", "param_groups", "defaults")  # of an optimizer: in checkpoints
_MOST = 1000  # items of a list


def _numbers_in(value: Any, path: str, *, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors that a value is or has, each with its path: of containers and objects, down to a depth."""
    if isinstance(value, (int, float, Tensor, np.ndarray, np.number)):
        yield path, value
    elif depth and isinstance(value, (list, tuple, deque, dict)) and len(value) <= _MOST:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers_in(item, f"{path}[{name!r}]", depth=depth - 1)
    elif depth and not isinstance(value, (nn.Module, type, FunctionType)) and is_own_code(_file_of(type(value))):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield from _numbers_in(item, f"{path}.{name}", depth=depth - 1)


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


class Writes(TorchDispatchMode):
    """A mode that records into which of a module's parameters operations write, also through `.data` and views.

    A parameter whose `.data` is another tensor at the end has been written into, too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self.names = module, dict[str, None]()

    def __enter__(self) -> "Writes":
        held = ((name, parameter.untyped_storage()) for name, parameter in self._module.named_parameters() if parameter.numel())
        self._held = {storage.data_ptr(): (name, storage) for name, storage in held}  # so that no other storage gets its place
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        now = {name: p.untyped_storage().data_ptr() for name, p in self._module.named_parameters() if p.numel()}
        self.names |= {name: None for name, storage in now.items() if storage not in self._held}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in function._schema.arguments), args)) | (kwargs or {})
        written = [given.get(a.name) for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in (item for value in written for item in (value if isinstance(value, (list, tuple)) else [value])):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:  # another has no storage
                name, _ = self._held.get(tensor.untyped_storage().data_ptr(), (None, None))
                self.names |= {name: None} if name is not None else {}
        return function(*args, **(kwargs or {}))


class Draws:
    """A context around forwards that notes whether any of them draws from a generator of torch, numpy or random.

    From its construction on, it also notes draws of the parts' batch(), and of a task's own step from its context.
    """

    def __init__(self, engine: Engine, parts: LoopParts) -> None:
        self._module, self._forward = engine.module, engine.forward
        self._reseed, self._is_seeded = engine.forward.reseed, False
        self.in_training = self.in_evaluation = False
        parts.watch_batches(lambda change: partial(self._noted, change))
        for name in ("step", "loss_of_rows"):
            if callable(work := getattr(engine.forward.task, name, None)):
                with suppress(AttributeError):  # an object that takes no attributes
                    setattr(engine.forward.task, name, partial(self._noted, work))

    def __enter__(self) -> None:
        self._forward.reseed = self._after_a_look  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._look()
        self._forward.reseed = self._reseed  # type: ignore[method-assign]

    def _after_a_look(self, *unit: int) -> None:
        self._look()
        self._reseed(*unit)
        self._is_seeded = True

    def _look(self) -> None:
        if self._is_seeded:
            self._note()
        self._is_seeded = False

    def _noted(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do the work of a part or a task, for which the generators have been seeded."""
        returned, context = work(*arguments), arguments[-1]
        self._note(*([context.generator, context.generator_of_step] if isinstance(context, Context) else []))
        return returned

    def _note(self, *own: torch.Generator) -> None:
        if has_drawn(*own):
            self.in_training |= self._module.training
            self.in_evaluation |= not self._module.training
