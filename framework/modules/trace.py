"""A trace of a model's forward without numbers: the modules that it enters, and the places where it uses tensors."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from framework.modules.tensors import Tree, call, map_tensors, tensors_in
from framework.runtime.exits import error_text, place_of

Computed = TypeVar("Computed")


@dataclass(frozen=True)
class Event:
    """An event: a module is entered (with its arguments) or left (with its outputs), or an operation uses a tensor."""

    kind: str  # enter, leave or use
    what: Any  # the model's own module or tensor
    value: Any = None


@dataclass
class Trace:
    """The events of one forward. If it failed, `inside` has the modules that were running, and `why` the error."""

    events: list[Event] = field(default_factory=list)
    inside: list[nn.Module] = field(default_factory=list)
    is_whole: bool = False
    why: str = ""

    def entered(self) -> set[nn.Module]:
        return {event.what for event in self.events if event.kind == "enter"}

    def read_elsewhere(self) -> set[int]:
        """Return the ids of the parameters and buffers that are used outside of the calls of the module that has them."""
        stack: list[nn.Module] = []
        found: set[int] = set()
        for event in self.events:
            if event.kind == "enter":
                stack.append(event.what)
            elif event.kind == "leave":
                stack.pop()
            elif event.kind == "use" and (not stack or not any(event.what is own for own in _own_tensors(stack[-1]))):
                found.add(id(event.what))
        return found


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*nn.Module.parameters(module, recurse=False), *module.buffers(recurse=False)]


_EXAMPLES: WeakKeyDictionary[nn.Module, Callable[[], Tree | None]] = WeakKeyDictionary()
_TRACES: WeakKeyDictionary[nn.Module, Trace] = WeakKeyDictionary()


def give_example(model: nn.Module, inputs: Callable[[], Tree | None]) -> None:
    """Let `traced` run the model's forward with these inputs; None: their kind is not known.

    They need no storage, but a forward may read the numbers of integers that have it (a mask of padding).
    """
    _EXAMPLES[model] = cache(inputs)


def example_of(model: nn.Module) -> Tree | None:
    """Return the inputs that `give_example` has given, without storage, or None."""
    inputs = _EXAMPLES[model]() if model in _EXAMPLES else None
    return map_tensors(_without_storage, inputs) if inputs is not None else None


def _without_storage(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def traced(model: nn.Module) -> Trace | None:
    """Return the trace of the model's forward in evaluation; None if its inputs are not known (a task's step may give others).

    Call this before a strategy changes the model; later calls return the same trace.
    """
    if model not in _TRACES and model in _EXAMPLES and (inputs := _EXAMPLES[model]()) is not None:
        _TRACES[model] = follow(model, inputs)
    trace = _TRACES.get(model)
    return trace if trace is not None and (trace.is_whole or len(trace.events) > 1) else None


def on_meta(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy for evaluation, without storage, and its modules, with the ids of the model's modules as keys."""
    return copied_with(model, lambda tensor: tensor.detach().to("meta"))


def copied_with(model: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy for evaluation with stand-ins as tensors, and its modules, with the ids of the model's modules as keys."""
    copies: dict[int, Any] = {id(tensor): stand_in(tensor) for tensor in (*nn.Module.parameters(model), *model.buffers())}
    copied = copy.deepcopy(model, copies)
    for module in copied.modules():
        module.__dict__.pop("forward", None)  # remove a wrapper (recomputation, compilation) around the original's forward
    return copied.eval(), copies


def with_own_on_meta(compute: Callable[[], Computed]) -> Computed:
    """Return what code gives for meta tensors. If it fails beside tensors that it makes itself, make those on meta too."""
    try:
        return compute()
    except Exception:
        with torch.device("meta"):
            return compute()


def follow(model: nn.Module, inputs: Tree) -> Trace:
    """Run a copy of the model without storage, in evaluation without gradients; return the trace."""
    trace = _followed(model, inputs)
    if not trace.is_whole:
        with torch.device("meta"):  # where the model makes its own tensors, too
            again = _followed(model, inputs)
        trace = again if again.is_whole else trace
    return trace


def _followed(model: nn.Module, inputs: Tree) -> Trace:
    trace, stack = Trace(), list[nn.Module]()
    try:
        copied, copies = on_meta(model)
    except Exception as error:  # a model that cannot be copied
        trace.why = error_text(error)
        return trace
    own: list[Any] = [*model.modules(), *nn.Module.parameters(model), *model.buffers()]
    originals = {id(copies[id(item)]): item for item in own if id(item) in copies}

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        stack.append(originals[id(module)])
        trace.events.append(Event("enter", stack[-1], (given, named)))

    def leave(module: nn.Module, _: Any, outputs: Any) -> None:
        trace.events.append(Event("leave", stack.pop(), outputs))

    for module in copied.modules():
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def use(tensor: Tensor) -> None:
        if id(tensor) in originals:
            trace.events.append(Event("use", originals[id(tensor)]))

    uses = _Uses(use)
    try:
        with torch.no_grad(), uses:
            call(copied, map_tensors(uses.without_storage, inputs))
        trace.is_whole = True
    except Exception as error:  # the model reads numbers, not only shapes, or does not accept this batch
        trace.inside, trace.why = list(stack), f"{error_text(error)}, at {place_of(error)}"
    return trace


class _Uses(TorchFunctionMode):
    """A mode that reports each tensor that an operation turns into another tensor.

    Positions (torch.arange), and tensors computed from positions alone, have numbers beside the model's tensors, which have
    none: the masks of many models read them.
    """

    def __init__(self, report: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._report = report
        # by id: a tensor without numbers, the same with numbers, and its version: an operation may write into it
        self._numbers: dict[int, tuple[Tensor, Tensor, int]] = {}

    def without_storage(self, tensor: Tensor) -> Tensor:
        """Return an input without storage. Integers have their numbers beside it, if they are known."""
        nothing = _without_storage(tensor)
        if tensor.device.type != "meta" and not tensor.is_floating_point():
            self._note(nothing, tensor.to("cpu", copy=True))
        return nothing

    def _note(self, tensor: Tensor, numbers: Tensor) -> None:
        self._numbers[id(tensor)] = tensor, numbers, tensor._version

    def _has_numbers(self, tensor: Tensor) -> bool:
        return id(tensor) in self._numbers and self._numbers[id(tensor)][2] == tensor._version

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read, result = self._read(function, args, kwargs)
        if not read:
            result = function(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)):
            for given in (*args, *kwargs.values()):
                for item in given if isinstance(given, (tuple, list)) else (given,):
                    if isinstance(item, Tensor):
                        self._report(item)
        return result

    def _read(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Return whether the arguments of an operation all have numbers, and then its result, with its numbers noted."""
        tensors = tensors_in([list(args), kwargs])
        if getattr(function, "__name__", "") == "__get__":  # an attribute, such as the device
            return False, None
        if not (all(map(self._has_numbers, tensors)) if tensors else function is torch.arange):
            return False, None

        def there(value: Any) -> Any:
            is_meta = isinstance(value, (str, torch.device)) and str(value) == "meta"
            return torch.device("cpu") if is_meta else value

        arguments, named = map_tensors(lambda tensor: self._numbers[id(tensor)][1], [list(args), kwargs])
        named = named if tensors else {"device": "cpu", **named}
        numbers = function(*map(there, arguments), **{name: there(value) for name, value in named.items()})
        if not isinstance(numbers, Tensor):
            return not tensors_in(numbers), numbers
        result = function(*args, **kwargs)
        if result.device.type == "meta":
            self._note(result, numbers)
        return True, result
