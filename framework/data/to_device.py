"""The copy from this process's memory to a CUDA device, on its own stream, while the device computes the step before."""

import functools
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from framework.engine.seam import MicroBatch, Step
from framework.modules.tensors import Tree, map_tensors, moved


class ToDevice:
    """A copy of steps to a device, where `finish` makes the model's inputs of each micro-batch. The host does not wait."""

    def __init__(self, device: torch.device, *, finish: Callable[[MicroBatch], MicroBatch], kept: Collection[str] = ()) -> None:
        self._device, self._finish, self._kept = device, finish, kept
        self._stream = _copy_stream(device)

    def __call__(self, step: Step) -> Step:
        with torch.cuda.stream(self._stream):
            moved_ones = (self._finish(mapped_except(self._kept, m, self._moved)) for m in step.micro_batches)
            by_number = {micro_batch.number: micro_batch for micro_batch in moved_ones}  # padding repeats one
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for micro_batch in by_number.values():
            mapped_except(self._kept, micro_batch, functools.partial(_used_on, current))
        there = [by_number[m.number]._replace(is_padding=m.is_padding) for m in step.micro_batches]
        return step._replace(micro_batches=there)

    def _moved(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self._device)


def mapped_except(kept: Collection[str], micro_batch: MicroBatch, function: Callable[[Tensor], Tensor]) -> MicroBatch:
    """Return a micro-batch with `function` applied to its tensors, but not to the inputs and targets with these names."""

    def mapped(tree: Tree) -> Tree:
        if not kept or not isinstance(tree, Mapping):
            return map_tensors(function, tree)
        return {name: value if name in kept else map_tensors(function, value) for name, value in tree.items()}

    return micro_batch._replace(inputs=mapped(micro_batch.inputs), targets=mapped(micro_batch.targets))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _used_on(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    tensor.record_stream(stream)  # the copy stream gets the memory back, but only after this stream has used it
    return tensor
