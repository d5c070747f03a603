"""The buffers of a model in a step: how a forward pass changes them does not depend on the rank or the time."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import UNREAD_STATISTICS, copy_all, version_of

_SMALL = 1 << 20  # bytes: a GPU's buffer up to this size is sent in each step, because the host would wait to compare it


class Buffers:
    """The buffers in the state dicts of some modules; with `among`, only the buffers with these ids.

    Every micro-batch of a step reads the buffers' values at the start of the step. At the end of the step, the buffers have
    the values that micro-batch 0 has given them. A forward pass may change a buffer in place, also through `.data`, or replace
    the buffer by another tensor. `broadcast` sends rank 0's tensors to the other ranks in each step. On a GPU, a change through
    `.data` of a buffer of more than a mebibyte is noticed in the first step only.
    """

    def __init__(
        self,
        *modules: nn.Module,
        among: Collection[int] | None = None,
        broadcast: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        for module in modules:
            state = module.state_dict(keep_vars=True)
            for prefix, owner in module.named_modules():
                own = owner.named_buffers(recurse=False)
                names = [name for name, buffer in own if among is None or id(buffer) in among]
                self._places += [(owner, name) for name in names if (f"{prefix}.{name}" if prefix else name) in state]
        forwards = [getattr(type(owner), "forward", None) for owner, _ in self._places]
        self._read = [i for i, forward in enumerate(forwards) if forward not in UNREAD_STATISTICS]
        unread = (owner for (owner, _), forward in zip(self._places, forwards) if forward in UNREAD_STATISTICS)
        self._unread = list(dict.fromkeys(unread)) if broadcast is not None else []
        self._behind: set[nn.Module] = set()  # modules with statistics that only rank 0 has
        self._broadcast = broadcast if self._read else None
        self._moving = set[int]()  # the buffers that a step has changed
        self._resting: dict[int, Tensor] | None = None  # the values of the others on a CPU; None before the first step
        self._is_alone = False
        self._start: list[Tensor] = []
        self._versions: list[int] = []
        self._values: list[Tensor] | None = None  # at the start of the step
        self._left: list[Tensor] | None = None  # the values that micro-batch 0 has given

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name in self._places]

    def values(self) -> list[Tensor]:
        """Return copies of the buffers."""
        copies = [torch.empty_like(tensor) for tensor in self.tensors]
        copy_all(copies, self.tensors)
        return copies

    def set(self, values: Sequence[Tensor], *, onto: Sequence[Tensor] | None = None) -> None:
        """Give the buffers these values, in their current tensors or in the earlier tensors `onto`."""
        targets, sources = [], []
        for place, tensor, value in zip(self._places, onto or self.tensors, values):
            fits = tensor.shape == value.shape and tensor.dtype == value.dtype
            if not fits or getattr(*place) is not tensor:
                setattr(*place, tensor if fits else value.clone())
            if fits:
                targets.append(tensor.data)  # through .data, a backward pass that needs the buffer does not notice the change
                sources.append(value)
        copy_all(targets, sources)

    def begin_step(self, *, is_alone: bool) -> None:
        """Store the values that every micro-batch reads. `is_alone`: this rank runs only micro-batch 0."""
        if not self._places:
            return
        self._is_alone, self._start, self._left = is_alone, self.tensors, None
        self._versions = [version_of(tensor) for tensor in self._start]
        needs_values = not is_alone or (self._resting is None and self._broadcast is not None)
        self._values = self.values() if needs_values else None

    def end_forward(self, micro_batch: int | None) -> None:
        """Store the values after micro-batch 0, and restore the values for the next micro-batch. None is padding."""
        if self._values is None or self._is_alone:
            return
        if micro_batch == 0:
            self._left = self.values()
        self.set(self._values, onto=self._start)

    def synchronised(self) -> None:
        """Record that every rank has rank 0's buffers."""
        self._behind.clear()

    def end_step(self) -> None:
        """Set the buffers to their values after micro-batch 0, on every rank that may read them in the next step. Collective.

        Unfit if a layer with running statistics changes to evaluation mode and so reads them: other ranks have old statistics.
        """
        for layer in self._unread:
            if not layer.training and layer in self._behind:
                what = f"a {type(layer).__name__} goes into evaluation mode during a run, and only rank 0 has its statistics"
                raise Unfit(f"model: {what} (keep it in one mode, or use one process)")
        self._behind.update(layer for layer in self._unread if layer.training)
        if self._left is not None:
            self.set(self._left, onto=self._start)
        if self._broadcast is not None:
            now = self.tensors
            if self._resting is None:
                self._resting = dict(enumerate(self._values or []))
            # on the CPU: to read them on a GPU, the host would wait for the GPU
            flags = torch.tensor([self._is_sent(i, now[i], self._resting.get(i)) for i in self._read], dtype=torch.uint8)
            self._broadcast([flags])
            self._broadcast([now[i] for i, flag in zip(self._read, flags.tolist()) if flag])
            resting = ((i, self._resting[i]) for i in self._read if i in self._resting and i not in self._moving)
            self._resting = {i: value for i, value in resting if value.device.type == "cpu"}
        self._values = self._left = None

    def _is_sent(self, i: int, now: Tensor, resting: Tensor | None) -> bool:
        has_moved = now is not self._start[i] or version_of(now) != self._versions[i]
        if has_moved or (resting is not None and not torch.equal(now, resting)):
            self._moving.add(i)
        return i in self._moving or (now.device.type != "cpu" and now.numel() * now.element_size() <= _SMALL)
