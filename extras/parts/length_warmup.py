"""Sequence-length warm-up: a language model starts with the first tokens of its samples."""

from typing import Any

from torch import Tensor

from framework.modules.tensors import first_tensor, map_tensors
from framework.training.loop_view import Loop


class LengthWarmup:
    """A part that increases the samples' length from `start` tokens, evenly over `steps` steps, by multiples of `multiple_of`.

    All inputs and targets that are as long as the first input are cut along their second dimension. Evaluations use whole
    samples.
    Source: Li et al. 2022, "The stability-efficiency dilemma: sequence length warmup for training GPT models".
    """

    def __init__(self, *, start: int, steps: int, multiple_of: int = 8) -> None:
        for name, value in (("start", start), ("steps", steps), ("multiple_of", multiple_of)):
            if value < 1:
                raise ValueError(f"{name}={value} is out of range (at least 1)")
        self.start, self.steps, self.multiple_of = start, steps, multiple_of

    def batch(self, loop: Loop, inputs: Any, targets: Any) -> tuple[Any, Any]:
        first = first_tensor(inputs)
        if first is None or first.ndim < 2:
            raise ValueError(f"start={self.start}: the inputs have no second dimension, along which they could be cut")
        if loop.step >= self.steps:
            return inputs, targets
        whole = first.shape[1]
        length = self.start + (whole - self.start) * loop.step // self.steps
        length = min(whole, max(self.multiple_of, length // self.multiple_of * self.multiple_of))

        def cut(tensor: Tensor) -> Tensor:
            return tensor[:, :length] if tensor.ndim > 1 and tensor.shape[1] == whole else tensor

        return map_tensors(cut, inputs), map_tensors(cut, targets)
