"""Optimizers by name, and their parameter groups."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import nn

from framework.modules.shards import by_mesh
from framework.optim.muon import Muon


class Trainable(NamedTuple):
    """A parameter that wants a gradient: all of it, or this rank's shard."""

    name: str  # the model's own
    parameter: nn.Parameter
    is_hidden: bool  # a matrix between the first and the last layer of the whole model
    is_decayed: bool  # subject to weight decay: no bias, nor anything of a normalisation


_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # whose weights may have any shape

BuildOptimizer = Callable[[list[Trainable]], torch.optim.Optimizer]
MakeOptimizer = Callable[[BuildOptimizer, list[Trainable]], torch.optim.Optimizer]  # a strategy's way of building one


def trainable(module: nn.Module, *, hidden: Collection[str]) -> list[Trainable]:
    """Return the parameters that want a gradient, in the model's order. `hidden` names those that are hidden."""
    of_norms = {
        id(p) for layer in module.modules() if isinstance(layer, _NORMS) for p in layer.parameters(recurse=False)
    }
    trained = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_decayed = parameter.ndim >= 2 and id(parameter) not in of_norms and not name.endswith("bias")
            trained.append(Trainable(name, parameter, is_decayed and name in hidden, is_decayed))
    return trained


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of the matrices between the first and the last layer. `model` is the whole, before any cut."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim >= 2]
    return [name for name, parameter in matrices[1:-1] if parameter.ndim == 2]


def stand_in(device: torch.device) -> list[Trainable]:
    """Return something to build the optimizer of, for a rank that updates nothing: no optimizer takes no parameters."""
    return [Trainable("", nn.Parameter(torch.zeros(1, device=device)), False, False)]


def _by_decay(trained: list[Trainable], weight_decay: float) -> list[dict[str, object]]:
    """Group by decay: `weight_decay`, or none; no group mixes shards over different meshes."""
    if weight_decay == 0:
        return [{"params": alike, "weight_decay": 0.0} for alike in by_mesh(item.parameter for item in trained)]
    decayed = [item.parameter for item in trained if item.is_decayed]
    others = [item.parameter for item in trained if not item.is_decayed]
    return [{"params": alike, "weight_decay": decay}
            for several, decay in ((decayed, weight_decay), (others, 0.0)) for alike in by_mesh(several)]  # fmt: skip


def adamw(
    trained: list[Trainable], *, lr: float, betas: list[float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019)."""
    return torch.optim.AdamW(_by_decay(trained, weight_decay), lr=lr, betas=_pair(betas), eps=eps, fused=True)


def adam(trained: list[Trainable], *, lr: float, betas: list[float], eps: float) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015)."""
    return torch.optim.Adam(_by_decay(trained, 0.0), lr=lr, betas=_pair(betas), eps=eps, fused=True)


def sgd(
    trained: list[Trainable], *, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    if nesterov and momentum == 0:
        raise ValueError("nesterov=true: needs momentum above 0")
    # not fused: fused SGD fails on FSDP2's shards
    return torch.optim.SGD(_by_decay(trained, weight_decay), lr=lr, momentum=momentum, nesterov=nesterov)


def muon(
    trained: list[Trainable],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    adamw_lr: float,
    adamw_betas: list[float],
    adamw_eps: float,
) -> torch.optim.Optimizer:
    """Muon for the matrices between the first and the last layer, AdamW for everything else."""
    return Muon(
        [item.parameter for item in trained if item.is_hidden],
        others=[item.parameter for item in trained if not item.is_hidden],
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
