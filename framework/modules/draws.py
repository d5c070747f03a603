"""A model's first weights, each drawn with its own name as key when it is needed: a rank holds only its own weights.

A constructor runs unchanged. When it would write random numbers into a new tensor in place, the operation is recorded instead.
The memory of such a tensor is not touched until the tensor is drawn, so the machine does not use it. A tensor that the
constructor reads is drawn immediately. Draws in any order give the same numbers; of a large tensor, a part can be drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from framework.randomness import key
from framework.runtime.torch_internals import TorchDispatchMode, without_modes
from framework.runtime.torch_memory import HeldMemory, as_one_operation, memory_of

aten = torch.ops.aten

# operations that make a tensor without numbers
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
          aten.new_empty_strided.default}  # fmt: skip
# operations that make a tensor of random numbers, and the in-place operation that draws these numbers later
_DRAWN = {aten.randn.default: aten.normal_.default, aten.rand.default: aten.uniform_.default}
# operations that read only the shape and dtype of a tensor
_UNREAD = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
           aten.new_ones.default, aten.new_full.default}  # fmt: skip
# operations that overwrite all earlier numbers
_OVERWRITES = {aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default, aten.exponential_.default}
_NEVER_FAIL = {aten.fill_.Scalar, aten.zero_.default}
# operations that treat each number separately, so that a tensor can be drawn one block at a time
_ALONE = {"normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_", "random_", "fill_",
          "zero_", "mul_", "div_", "add_", "sub_", "pow_", "neg_", "abs_", "exp_", "log_", "sqrt_", "erfinv_", "tanh_",
          "sigmoid_", "clamp_", "clamp_min_", "clamp_max_", "_no_grad_trunc_normal_"}  # fmt: skip
_BLOCK = 1 << 20  # numbers; larger tensors are drawn in blocks of whole rows


@dataclass
class _Later:
    """The operations that still have to write into a piece of memory, in order; each writes into all of it or into a view."""

    held: HeldMemory
    operations: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def whole(self) -> Tensor:
        """The tensor that the first operation writes into."""
        return self.operations[0][1][0]  # type: ignore[no-any-return]

    def blocks(self) -> list[range]:
        """Return the rows of the blocks with own keys: one block for a small tensor, or if an operation needs all rows."""
        count = self.whole.shape[0] if self.whole.ndim else 1
        size = max(1, _BLOCK * count // max(self.whole.numel(), 1))
        is_made_so = all(
            function.__name__.partition(".")[0] in _ALONE and args[0].shape == self.whole.shape and fills_its_memory(args[0])
            for function, args, _ in self.operations
        )
        return [range(start, min(start + size, count)) for start in range(0, count, size if is_made_so else max(count, 1))]

    @torch.no_grad()
    def write(self, *block: Tensor) -> None:
        """Run the operations on their own tensors, or on a block instead."""
        for function, args, kwargs in self.operations:
            function(*(block or args[:1]), *args[1:], **kwargs)


class LaterDraws(TorchDispatchMode):
    """A mode that records the operations that write into new CPU tensors, and later draws each tensor by a key of the seed.

    A tensor that the constructor reads has its turn among such tensors as key; other tensors have the name given to `draw`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._num_early = seed, 0
        self._first_seed = torch.default_generator.initial_seed()
        self._new: dict[int, HeldMemory] = {}
        self._later: dict[int, _Later] = {}
        self._reads = _Reads(self)

    def __enter__(self) -> "LaterDraws":
        self._modes = ExitStack()
        self._modes.enter_context(as_one_operation(self._put_off_whole))
        self._modes.enter_context(self._reads)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modes.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._reads.off():
            if function in _EMPTY:
                return self._noted(function(*args, **kwargs))
            if function in _DRAWN and self._draws_itself(kwargs):
                empty = torch.empty(args[0], **{name: kwargs[name] for name in ("dtype", "device") if name in kwargs})
                if empty.device.type == "cpu" and empty.is_floating_point():
                    self._put_off(self._noted(empty), _DRAWN[function], (empty,), {})
                    return empty
            if function.is_view or function in _UNREAD:
                return function(*args, **kwargs)
            if self._may_wait(function, args, kwargs):
                self._put_off(args[0], function, args, kwargs)
                return args[0]
            self.read(*args, *kwargs.values())
            return function(*args, **kwargs)

    def read(self, *values: Any) -> None:
        """Draw these tensors, because they will be read next."""
        for value in values:
            if isinstance(value, (tuple, list)):
                self.read(*value)
            elif isinstance(value, Tensor) and (place := memory_of(value)) in self._later:
                self._num_early += 1
                self._carry_out(self._later.pop(place), "read", self._num_early)

    def forget(self, tensor: Tensor) -> None:
        """Write into a tensor immediately from now on, because other code, such as numpy, may see its memory."""
        self._new.pop(memory_of(tensor), None)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor still has to be drawn."""
        return memory_of(tensor) in self._later

    def draw(self, tensor: Tensor, name: str) -> None:
        """Draw a tensor by this name, if it still has to be drawn."""
        if (later := self._later.pop(memory_of(tensor), None)) is not None:
            self._carry_out(later, name)

    def part(self, tensor: Tensor, name: str, place: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor as `draw` would draw it; an empty place means the whole tensor.

        If the tensor can be drawn in blocks, only the blocks that overlap the part are drawn, one at a time.
        """
        later = self._later.get(memory_of(tensor))
        blocks = later.blocks() if later is not None else []
        if later is None or not place or len(blocks) == 1 or later.whole.shape != tensor.shape:
            self.draw(tensor, name)
            return tensor[place]
        del self._later[memory_of(tensor)]
        part = torch.empty(torch.empty_like(tensor, device="meta")[place].shape, dtype=tensor.dtype)
        start, stop, _ = place[0].indices(len(tensor))
        for number, rows in enumerate(blocks):
            first, last = max(rows.start, start), min(rows.stop, stop)
            if first < last:
                drawn = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype)
                with self._seeded(name, number):
                    later.write(drawn)
                inside = slice(first - rows.start, last - rows.start), *place[1:]
                part[first - start : last - start] = drawn[inside]
        return part

    def draw_rest(self, *, but: Sequence[Tensor] = ()) -> None:
        """Draw the tensors without a name, in the order in which they were made."""
        named = set(map(memory_of, but))
        for place in [place for place in self._later if place not in named]:
            self._num_early += 1
            self._carry_out(self._later.pop(place), "read", self._num_early)

    def _noted(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            self._new[memory_of(tensor)] = HeldMemory(tensor.untyped_storage())
        return tensor

    def _draws_itself(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether numbers come from the generator that the run has seeded, and the author has not seeded it again."""
        return kwargs.get("generator") is None and torch.default_generator.initial_seed() == self._first_seed

    def _may_wait(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operation writes into a new tensor, in place, and reads no other tensor."""
        if not args or not isinstance(args[0], Tensor) or not function._schema.is_mutable:
            return False
        if torch.Tag.inplace_view in function.tags:  # t_(), for example, changes a shape
            return False
        is_in_place = function._schema.name.endswith("_")
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, (Tensor, tuple, list))]
        return is_in_place and not others and memory_of(args[0]) in self._new and self._draws_itself(kwargs)

    def _put_off_whole(self, function: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Postpone a function of several operations, some of which read the tensor; return whether the function can wait."""
        with self._reads.off():
            has_own = any(isinstance(value, torch.Generator) for value in args)
            may_wait = memory_of(tensor) in self._new and self._draws_itself(kwargs) and not has_own
            if may_wait:
                with without_modes():
                    self._put_off(tensor, function, (tensor, *args), kwargs)
            return may_wait

    def _put_off(self, tensor: Tensor, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if function not in _NEVER_FAIL:  # an error is raised now, where the constructor may expect it
            function(torch.empty_like(tensor, device="meta"), *args[1:], **kwargs)
        place = memory_of(tensor)
        later = self._later.setdefault(place, _Later(self._new[place]))
        if function in _OVERWRITES and fills_its_memory(tensor):
            later.operations.clear()
        later.operations.append((function, (tensor.detach(), *args[1:]), kwargs))

    def _carry_out(self, later: _Later, *parts: int | str) -> None:
        blocks = later.blocks()
        if len(blocks) == 1:
            with self._seeded(*parts):
                later.write()
        for number, rows in enumerate(blocks if len(blocks) > 1 else ()):
            with self._seeded(*parts, number):
                later.write(later.whole[rows.start : rows.stop])

    @contextmanager
    def _seeded(self, *parts: int | str) -> Iterator[None]:
        """Let torch draw by a key of the run's seed within the context, and restore its state afterwards."""
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(key(self._seed, "weights", *parts))
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def fills_its_memory(tensor: Tensor) -> bool:
    """Return whether a tensor covers all of its memory."""
    if tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class _Reads(TorchFunctionMode):
    """A mode that draws a tensor before it is read in a way that a dispatch mode does not see."""

    _FUNCTIONS = {getattr(Tensor, name) for name in (
        "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_", "__array__",
        "__deepcopy__", "__reduce_ex__", "__dlpack__", "__cuda_array_interface__") if hasattr(Tensor, name)}  # fmt: skip

    def __init__(self, draws: LaterDraws) -> None:
        super().__init__()
        self._draws, self._is_off = draws, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._FUNCTIONS and not self._is_off:
            with self.off():
                self._draws.read(*args[:1])
                self._draws.forget(args[0])
        return function(*args, **(kwargs or {}))

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before
