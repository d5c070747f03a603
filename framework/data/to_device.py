"""The copy from this process's memory to a CUDA device, on its own stream, while the device computes the step before."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from framework.engine.seam import MicroBatch, Step
from framework.modules.tensors import moved


class ToDevice:
    """A copy of steps to a device, where `finish` makes the model's inputs of each micro-batch. The host does not wait."""

    def __init__(self, device: torch.device, *, finish: Callable[[MicroBatch], MicroBatch]) -> None:
        self._device, self._finish = device, finish
        self._stream = _copy_stream(device)

    def __call__(self, step: Step) -> Step:
        with torch.cuda.stream(self._stream):
            by_number = {m.number: self._finish(m.mapped(self._moved)) for m in step.micro_batches}  # padding repeats one
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for micro_batch in by_number.values():
            micro_batch.mapped(functools.partial(_used_on, current))
        there = [by_number[m.number]._replace(is_padding=m.is_padding) for m in step.micro_batches]
        return step._replace(micro_batches=there)

    def _moved(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self._device)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _used_on(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    tensor.record_stream(stream)  # the copy stream gets the memory back, but only after this stream has used it
    return tensor
