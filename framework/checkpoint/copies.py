"""Copies of a state in the CPU's memory. The copies are written to disk while training continues."""

from collections.abc import Mapping

import torch
from torch import Tensor

from framework.modules.tensors import local, with_part


class HostCopies:
    """Copies that are reused for the next save, because memory that was used before is several times faster.

    For a CUDA device the copies are in pinned memory. The device makes them in the order of its own work: the host does not
    wait, and later computations of the device do not change a copy.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._made: list[torch.cuda.Event] = []

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy this rank's parts of tensors. Return the copies, cut like the tensors: complete only after `wait`."""
        kept, self._copies = self._copies, {}
        for name, tensor in tensors.items():
            copy, part = kept.get(name), local(tensor)
            if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
                copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._copies[name] = copy.copy_(part, non_blocking=True)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._made = [torch.cuda.current_stream(device).record_event() for device in devices]
        return {name: with_part(tensor, self._copies[name]) for name, tensor in tensors.items()}

    def wait(self) -> None:
        """Wait until the copies are complete. Any thread may call this."""
        for event in self._made:
            event.synchronize()
