"""The optimizers of conf/optimizer: torch's, and Muon, with the usual parameter groups."""

from collections.abc import Collection
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import nn

from framework.optim.groups import Rule, Trainable, param_groups, rules_of
from framework.optim.muon import Muon
from framework.runtime.torch_internals import NORMS


def trainable(module: nn.Module, *, hidden: Collection[str]) -> list[Trainable]:
    """Return the parameters that want a gradient, in the model's order. `hidden` has the names of the hidden matrices."""
    of_norms = {id(p) for layer in module.modules() if isinstance(layer, NORMS) for p in layer.parameters(recurse=False)}
    trained = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_decayed = parameter.ndim >= 2 and id(parameter) not in of_norms and not name.endswith("bias")
            trained.append(Trainable(name, parameter, is_decayed and name in hidden, is_decayed))
    return trained


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of the matrices between the first and the last layer. `model` is whole: no strategy has cut it."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim >= 2]
    return [name for name, parameter in matrices[1:-1] if parameter.ndim == 2]


def stand_in(device: torch.device) -> list[Trainable]:
    """Return a parameter for the optimizer of a rank that updates nothing: an optimizer needs at least one."""
    return [Trainable("", nn.Parameter(torch.zeros(1, device=device)), False, False)]


# Options of a parameter group, by patterns of the names of its parameters: docs/training.md.
Groups = list[dict[str, Any]]
Rate = Annotated[float, Gt(0)]
Decay = Annotated[float, Ge(0)]
Momentum = Annotated[float, Ge(0), Lt(1)]
Betas = list[Annotated[float, Ge(0), Lt(1)]]


def _by_decay(trained: list[Trainable], groups: Groups | None, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of the rules in `groups`, and without weight decay for vectors."""
    not_decayed: list[Rule] = [(lambda item: not item.is_decayed, {"weight_decay": 0.0})] if weight_decay else []
    return param_groups(trained, [*rules_of(groups or []), *not_decayed])


def adamw(
    trained: list[Trainable], *, lr: Rate, betas: Betas, eps: Rate, weight_decay: Decay, groups: Groups | None = None
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019)."""
    by_decay = _by_decay(trained, groups, weight_decay)
    return torch.optim.AdamW(by_decay, lr=lr, betas=_pair(betas), eps=eps, weight_decay=weight_decay, fused=True)


def adam(trained: list[Trainable], *, lr: Rate, betas: Betas, eps: Rate, groups: Groups | None = None) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba 2015)."""
    return torch.optim.Adam(_by_decay(trained, groups, 0.0), lr=lr, betas=_pair(betas), eps=eps, fused=True)


def sgd(
    trained: list[Trainable], *, lr: Rate, momentum: Momentum, nesterov: bool, weight_decay: Decay, groups: Groups | None = None
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    if nesterov and momentum == 0:
        raise ValueError("nesterov=true: needs momentum above 0")
    # not fused: fused SGD fails on FSDP2's shards
    by_decay = _by_decay(trained, groups, weight_decay)
    return torch.optim.SGD(by_decay, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def muon(
    trained: list[Trainable],
    *,
    lr: Rate,
    momentum: Momentum,
    weight_decay: Decay,
    adamw_lr: Rate,
    adamw_betas: Betas,
    adamw_eps: Rate,
    groups: Groups | None = None,
) -> torch.optim.Optimizer:
    """Muon for the matrices between the first and the last layer, AdamW for everything else."""
    rules = rules_of(groups or [])
    of_muon = {"kind": "muon", "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    of_adamw = {"kind": "adamw", "lr": adamw_lr, "betas": _pair(adamw_betas), "eps": adamw_eps, "weight_decay": 0.0}
    hidden = param_groups([item for item in trained if item.is_hidden], rules)
    others = param_groups([item for item in trained if not item.is_hidden], rules)
    return Muon([*(of_muon | group for group in hidden), *(of_adamw | group for group in others)])


def _pair(betas: list[float]) -> tuple[float, float]:
    if len(betas) != 2:
        raise ValueError(f"betas={betas} must be two numbers, as in [0.9, 0.999]")
    return betas[0], betas[1]
