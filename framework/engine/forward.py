"""One micro-batch through the model."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from framework.engine.seam import MicroBatch, Task
from framework.modules.tensors import Tree, call, map_tensors
from framework.randomness import key


@dataclass(eq=False)
class Forward:
    """One micro-batch through the model: random draws keyed, autocast on, sums over samples out."""

    task: Task
    _: KW_ONLY
    seed: int
    devices: Sequence[torch.device]  # of the model
    autocast: torch.dtype | None
    example: Tensor | None = None  # the inputs of two samples, without storage; None if their kind is not known
    is_padding: bool = field(default=False, init=False)  # the current micro-batch; for layers that use other ranks' samples
    _at: tuple[int, int] = field(default=(0, 0), init=False)

    def __post_init__(self) -> None:
        self.device = self.devices[0]

    def seed_draws(self, *, step: int, micro_batch: int) -> None:
        """Seed what the model draws (dropout) by step and micro-batch: the draws do not depend on the rank."""
        self._at = (step, micro_batch)
        self._seed_generators(key(self.seed, "forward", step, micro_batch))

    def _seed_generators(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(value)

    def key_draws(self, units: Sequence[nn.Module]) -> None:
        """Seed each unit's draws by its number too: in a pipeline, the draws do not depend on the unit's rank."""

        def seed_unit(unit: nn.Module, _: object, *, number: int) -> None:
            if unit.training:
                self._seed_generators(key(self.seed, "forward", *self._at, number))

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
