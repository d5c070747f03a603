"""Optimizers by name, and their parameter groups."""

import torch
from torch import nn

from framework.muon import Muon

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
