"""Muon with AdamW for the rest, on whole matrices or on shards of them."""

from typing import Any

import torch
from torch import Tensor, nn

from framework.modules.tensors import part_of, whole


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton-Schulz iteration, and AdamW for what is not a hidden matrix.

    torch.optim.Muon takes matrices only, and iterates in bfloat16, where rounding depends on how a matrix is sharded.
    This one iterates in the parameter's own precision (fp32 or fp64) and on the WHOLE matrix: a shard is gathered
    first, so every strategy takes the same step.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; the scale 0.2 sqrt(max(rows, columns)), which
    lets it share AdamW's learning rates and decay, is Liu et al. 2025, "Muon is scalable for LLM training".
    """

    _COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    _NUM_ITERATIONS = 5

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """`groups` are torch's, each with its `kind` (muon or adamw) and all options of that kind."""
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the Engine has run backward
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._muon if group["kind"] == "muon" else self._adamw)(parameter, group)

    def _muon(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, lr, weight_decay = group["momentum"], group["lr"], group["weight_decay"]
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum)  # Nesterov
        update = part_of(self._orthogonalise(whole(update)), like=parameter)
        parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * 0.2 * max(parameter.shape) ** 0.5)

    def _orthogonalise(self, matrix: Tensor) -> Tensor:
        """Return roughly the nearest (semi-)orthogonal matrix: its singular values are between 0.7 and 1.2."""
        a, b, c = self._COEFFICIENTS
        x = matrix / (matrix.norm() + 1e-7)
        x = x.T if matrix.shape[0] > matrix.shape[1] else x
        for _ in range(self._NUM_ITERATIONS):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    def _adamw(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        state["step"] += 1
        step = state["step"].item()
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(eps)
        parameter.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**step))
