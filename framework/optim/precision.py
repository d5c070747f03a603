"""Precisions by name: what the parameters are, what the forward pass computes in, and what keeps fp16 from underflow."""

from dataclasses import dataclass

import torch

from framework.optim.loss_scale import LossScale


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
