"""The copy from this process's memory to a CUDA device, on its own stream, while the device computes the step before."""

import functools
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from framework.engine.seam import MicroBatch, Step
from framework.modules.tensors import Tree, map_tensors, moved


def to_device(
    step: Step, *, device: torch.device, finish: Callable[[MicroBatch], MicroBatch], kept: Collection[str] = ()
) -> Step:
    """Copy a step to a device, where `finish` makes the model's inputs of each micro-batch. The host does not wait."""
    stream, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        there = (finish(mapped_except(kept, m, lambda tensor: moved(tensor, device))) for m in step.micro_batches)
        by_number = {micro_batch.number: micro_batch for micro_batch in there}  # padding repeats one
    current.wait_stream(stream)
    for micro_batch in by_number.values():
        mapped_except(kept, micro_batch, functools.partial(_used_on, current))
    return step._replace(micro_batches=[by_number[m.number]._replace(is_padding=m.is_padding) for m in step.micro_batches])


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
