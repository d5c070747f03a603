"""Optimizers by name, their parameter groups, the loss scale of fp16, and the moving average of the weights."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from framework.outcome import Diverged

Named = list[tuple[str, nn.Parameter]]


def trainable(module: nn.Module) -> Named:
    """Return the named parameters that want a gradient, in the model's order."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _by_decay(named: Named, weight_decay: float) -> list[dict[str, object]]:
    """Decay matrices and kernels, not vectors (biases, norms): the usual two groups, or one where there is no decay."""
    if weight_decay == 0:
        return [{"params": [parameter for _, parameter in named], "weight_decay": 0.0}]
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(
    named: Named, *, lr: float, betas: list[float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019)."""
    return torch.optim.AdamW(_by_decay(named, weight_decay), lr=lr, betas=_pair(betas), eps=eps, fused=True)


def adam(named: Named, *, lr: float, betas: list[float], eps: float) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015)."""
    return torch.optim.Adam([p for _, p in named], lr=lr, betas=_pair(betas), eps=eps, fused=True)


def sgd(
    named: Named, *, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    # not fused: fused SGD fails on FSDP2's shards
    return torch.optim.SGD(_by_decay(named, weight_decay), lr=lr, momentum=momentum, nesterov=nesterov)


def muon(
    named: Named,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    adamw_lr: float,
    adamw_betas: list[float],
    adamw_eps: float,
) -> torch.optim.Optimizer:
    """Muon for the matrices between the first and the last layer, AdamW for everything else."""
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    hidden = {id(parameter) for parameter in matrices[1:-1] if parameter.ndim == 2}
    return Muon(
        [parameter for _, parameter in named if id(parameter) in hidden],
        others=[parameter for _, parameter in named if id(parameter) not in hidden],
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        adamw_lr=adamw_lr,
        adamw_betas=_pair(adamw_betas),
        adamw_eps=adamw_eps,
    )


def _pair(betas: list[float]) -> tuple[float, float]:
    if len(betas) != 2:
        raise ValueError(f"betas={betas} must be two numbers, as in [0.9, 0.999]")
    return betas[0], betas[1]


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton-Schulz iteration, and AdamW for what is not a hidden matrix.

    torch.optim.Muon takes matrices only, and iterates in bfloat16, where rounding depends on how a matrix is sharded.
    This one iterates in the parameter's own precision (fp32 or fp64) and on the WHOLE matrix: a shard is gathered
    first, so that every strategy takes the same step.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; the scale 0.2 sqrt(max(rows, columns)), which
    lets it share AdamW's learning rates and decay, is Liu et al. 2025, "Muon is scalable for LLM training".
    """

    _COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    _NUM_ITERATIONS = 5

    def __init__(
        self,
        matrices: list[nn.Parameter],
        *,
        others: list[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        adamw_lr: float,
        adamw_betas: tuple[float, float],
        adamw_eps: float,
    ) -> None:
        groups = [
            {"params": matrices, "kind": "muon", "lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            {"params": others, "kind": "adamw", "lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps,
             "weight_decay": 0.0},
        ]  # fmt: skip
        super().__init__([group for group in groups if group["params"]], defaults={})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the Engine has run backward
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._muon if group["kind"] == "muon" else self._adamw)(parameter, group)

    def _muon(self, parameter: nn.Parameter, group: dict[str, object]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, lr, weight_decay = group["momentum"], group["lr"], group["weight_decay"]
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        update = parameter.grad.lerp(buffer, momentum)  # Nesterov
        update = _like(parameter, self._orthogonalise(_whole(update)))
        parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * 0.2 * max(parameter.shape) ** 0.5)

    def _orthogonalise(self, matrix: Tensor) -> Tensor:
        """Return the nearest (semi-)orthogonal matrix, roughly: singular values end between 0.7 and 1.2."""
        a, b, c = self._COEFFICIENTS
        x = matrix / (matrix.norm() + 1e-7)
        x = x.T if matrix.shape[0] > matrix.shape[1] else x
        for _ in range(self._NUM_ITERATIONS):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    def _adamw(self, parameter: nn.Parameter, group: dict[str, object]) -> None:
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


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor

    replicated = DTensor.from_local(whole, parameter.device_mesh, run_check=False)
    return replicated.redistribute(parameter.device_mesh, parameter.placements)


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
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1.0 / self.value)

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


class AveragedWeights:
    """An exponential moving average of the trainable parameters, on this rank's shards: no gather, no copy of the model."""

    def __init__(self, named: Named, *, decay: float) -> None:
        self.decay = decay
        self._parameters = [parameter for _, parameter in named]
        self.tensors = {name: parameter.detach().clone() for name, parameter in named}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after an optimizer step."""
        torch._foreach_lerp_(list(self.tensors.values()), self._parameters, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the average: once before an evaluation, once after."""
        for parameter, average in zip(self._parameters, self.tensors.values()):
            current = parameter.clone()
            parameter.copy_(average)
            average.copy_(current)
