"""One micro-batch through the model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from framework.engine.seam import MicroBatch, Task
from framework.modules.nested import Tree, call, map_tensors
from framework.randomness import key


class Forward:
    """One micro-batch through the model: random draws keyed, autocast on, sums over samples out."""

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        devices: Sequence[torch.device],
        autocast: torch.dtype | None,
        example: Tensor | None = None,
    ) -> None:
        self.task = task
        self.example = example  # a batch of two samples' inputs, without storage; None if their kind is not known
        self.seed = seed
        self.device = devices[0]
        self.devices = devices  # that the model is on
        self.autocast = autocast
        self.is_padding = False  # is the micro-batch at hand? For layers that look at other ranks' samples
        self._at = (0, 0)

    def seed_draws(self, *, step: int, micro_batch: int) -> None:
        """Key what the model draws (dropout) by step and micro-batch: whichever rank runs it, it draws the same."""
        self._at = (step, micro_batch)
        self._seed(key(self.seed, "forward", step, micro_batch))

    def _seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(value)

    def key_draws(self, units: Sequence[nn.Module]) -> None:
        """Key each unit's draws by its number too: then they are the same wherever the units lie (in a pipeline)."""

        def seed_unit(unit: nn.Module, _: object, *, number: int) -> None:
            if unit.training:
                self._seed(key(self.seed, "forward", *self._at, number))

        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(seed_unit, number=number))

    def __call__(self, model: Callable[..., Any], micro_batch: MicroBatch) -> tuple[Tree, Tensor]:
        """Return (outputs, sum of the losses)."""
        self.is_padding = micro_batch.is_padding
        if self.autocast is None:
            outputs = call(model, micro_batch.inputs)
        else:
            with torch.autocast(self.device.type, dtype=self.autocast):
                outputs = call(model, micro_batch.inputs)
            outputs = map_tensors(Tensor.float, outputs)
        return outputs, self.task.loss(outputs, micro_batch.targets)
