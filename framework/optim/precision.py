"""Precisions by name: the dtypes of parameters, forward pass and optimizer state, and the loss scale of fp16."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from framework.modules.tensors import by_mesh, local
from framework.optim.optimizers import BuildOptimizer, Trainable
from framework.runtime.exits import Diverged
from framework.runtime.torch_internals import copy_all, multiply_all


@dataclass(eq=False)
class LossScale:
    """The scale that keeps fp16 gradients from underflow: halved after an overflow, doubled after steps without overflow.

    torch.amp.GradScaler decides by each rank's own gradients, which differ between shards. This class decides by the global
    gradient norm, which every rank has. For other precisions the scale is the constant 1.
    Source: Micikevicius et al. 2018, "Mixed precision training".
    """

    value: float = 1.0
    growth_interval: int = 0  # steps without overflow before the scale is doubled; 0 = constant
    num_quiet_steps: int = 0  # since the last overflow or doubling
    num_skipped: int = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.value != 1.0:
            for gradients in by_mesh(p.grad for p in parameters if p.grad is not None):
                multiply_all(gradients, 1.0 / self.value)

    @property
    def is_dynamic(self) -> bool:
        return self.growth_interval > 0

    def require_finite(self, grad_norm: float, *, step: int) -> None:
        """Raise Diverged if the global norm of a step is not finite. A dynamic scale skips such a step instead."""
        if not self.is_dynamic and not math.isfinite(grad_norm):
            raise Diverged(f"the gradient of step {step} is not finite (norm {grad_norm})")

    def accepts(self, grad_norm: Tensor | None) -> bool:
        """Return whether to take the step, and adapt the scale. `grad_norm` is global, so that all ranks agree.

        Diverged if a gradient overflows although the scale is 1.
        """
        if not self.is_dynamic:
            return True
        assert grad_norm is not None
        if not torch.isfinite(grad_norm):
            if self.value <= 1.0:
                raise Diverged("the gradient is not finite, and the loss scale is already at its minimum")
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
    loss_scale: Callable[[], LossScale] = LossScale
    linear: Literal["float8"] | None = None  # how the linear layers of blocks multiply; None: like all other layers


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(matmul="high"),
    "bf16": Precision(autocast=torch.bfloat16),
    "float8": Precision(autocast=torch.bfloat16, linear="float8"),
    "fp16": Precision(autocast=torch.float16, loss_scale=partial(LossScale, 2.0**16, growth_interval=2000)),
    "fp64": Precision(parameters=torch.float64),
}


def with_bf16_states(build: BuildOptimizer) -> BuildOptimizer:
    """Return a builder of optimizers that hold what they keep for each element of a parameter in bfloat16 between steps.

    A step computes with these states in the type of the parameter. Then they are rounded to the nearest number, so that an
    average with a factor near 1 (0.999) may stop changing. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 3.3.
    """

    def make(trained: list[Trainable]) -> torch.optim.Optimizer:
        optimizer = build(trained)
        optimizer.register_step_pre_hook(lambda optimizer, *_: _convert_states(optimizer, to=None))
        optimizer.register_step_post_hook(lambda optimizer, *_: _convert_states(optimizer, to=torch.bfloat16))
        return optimizer

    return make


def _convert_states(optimizer: Any, *, to: torch.dtype | None) -> None:
    """Convert the states with the shape of a parameter: from its type to the type `to`, or back (None)."""
    old, new = list[Tensor](), list[Tensor]()
    for parameter, state in optimizer.state.items():
        source, target = (parameter.dtype, to) if to is not None else (torch.bfloat16, parameter.dtype)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape and value.dtype == source:
                state[name] = torch.empty_like(value, dtype=target)
                old.append(local(value))
                new.append(local(state[name]))
    copy_all(new, old)
