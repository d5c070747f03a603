"""Copies of a state in the CPU's memory, from which it is written while training goes on."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


class HostCopies:
    """Copies that are kept from save to save: memory that was used before is several times faster.

    Of a CUDA device they are in pinned memory, and the device makes them in the order of its own work: the host waits for
    nothing, and what the device computes next changes no copy.
    """

    def __init__(self) -> None:
        self._copies: dict[Hashable, Tensor] = {}
        self._made: list[torch.cuda.Event] = []

    @torch.no_grad()
    def update(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Begin to copy the tensors, and return the copies: they are there after `wait`."""
        kept, self._copies = self._copies, {}
        for key, tensor in tensors.items():
            copy = kept.get(key)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy.copy_(tensor, non_blocking=True)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._made = [torch.cuda.current_stream(device).record_event() for device in devices]
        return {key: self._copies[key] for key in tensors}

    def wait(self) -> None:
        """Wait until the copies are made. In any thread."""
        for event in self._made:
            event.synchronize()
