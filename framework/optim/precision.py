"""Precisions by name: what the parameters are, what the forward pass computes in, and what keeps fp16 from underflow."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from framework.modules.shards import by_mesh
from framework.runtime.exits import Diverged
from framework.runtime.torch_internals import multiply_all


class LossScale:
    """The scale that keeps fp16 gradients from underflow: halved after an overflow, doubled after a quiet spell.

    torch.amp.GradScaler decides by each rank's own gradients, which on shards differ; this one decides by the global
    gradient norm, which every rank has. For other precisions it is the constant 1.
    Source: Micikevicius et al. 2018, "Mixed precision training".
    """

    def __init__(self, *, initial: float, growth_interval: int) -> None:
        self.value = initial
        self.growth_interval = growth_interval  # steps without overflow before a doubling; 0 = constant
        self.num_quiet_steps = 0
        self.num_skipped = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.value != 1.0:
            for gradients in by_mesh(p.grad for p in parameters if p.grad is not None):
                multiply_all(gradients, 1.0 / self.value)

    @property
    def is_dynamic(self) -> bool:
        return self.growth_interval > 0

    def accepts(self, grad_norm: Tensor | None) -> bool:
        """Return whether to take the step, and adapt. `grad_norm` is the global one, so that all ranks agree.

        Diverged if a gradient overflows that is not scaled any more.
        """
        if not self.is_dynamic:
            return True
        assert grad_norm is not None
        if not torch.isfinite(grad_norm):
            if self.value <= 1.0:
                raise Diverged("the gradient is not finite, and no loss scale is left to be lowered")
            self.value = max(self.value / 2, 1.0)
            self.num_quiet_steps = 0
            self.num_skipped += 1
            return False
        self.num_quiet_steps += 1
        if self.num_quiet_steps == self.growth_interval:
            self.value *= 2
            self.num_quiet_steps = 0
        return True

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "num_quiet_steps": self.num_quiet_steps, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
        self.num_quiet_steps, self.num_skipped = int(state["num_quiet_steps"]), int(state["num_skipped"])


@dataclass(frozen=True)
class Precision:
    parameters: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    matmul: str = "highest"
    initial_loss_scale: float = 1.0
    growth_interval: int = 0

    def loss_scale(self) -> LossScale:
        return LossScale(initial=self.initial_loss_scale, growth_interval=self.growth_interval)


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(matmul="high"),
    "bf16": Precision(autocast=torch.bfloat16),
    "fp16": Precision(autocast=torch.float16, initial_loss_scale=2.0**16, growth_interval=2000),
    "fp64": Precision(parameters=torch.float64),
}
