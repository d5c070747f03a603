"""The optimizers of conf/optimizer, torch's own and Muon, with the usual parameter groups."""

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from torch.optim.adamw import adamw as move_by_adamw
from torch.optim.sgd import sgd as move_by_sgd

from framework.modules.parts import nearest_name
from framework.modules.tensors import by_mesh, gradient_of, local, part_of, whole
from framework.runtime.torch_internals import NORMS


class Trainable(NamedTuple):
    """A parameter that requires a gradient: a whole parameter, or this rank's shard."""

    name: str  # in the model
    parameter: nn.Parameter
    is_hidden: bool  # a matrix between the first and the last layer of the whole model
    is_decayed: bool  # with weight decay: not a bias, not of a normalisation layer


BuildOptimizer = Callable[[list[Trainable]], torch.optim.Optimizer]
MakeOptimizer = Callable[[BuildOptimizer, list[Trainable]], torch.optim.Optimizer]  # builds an optimizer as a strategy needs it
Rule = tuple[Callable[[Trainable], bool], Mapping[str, Any]]


def trainable(module: nn.Module, *, hidden: Collection[str]) -> list[Trainable]:
    """Return the parameters that require a gradient, in the model's order. `hidden` has the names of the hidden matrices."""
    of_norms = {
        id(p) for layer in module.modules() if isinstance(layer, NORMS) for p in nn.Module.parameters(layer, recurse=False)
    }
    trained = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_decayed = parameter.ndim >= 2 and id(parameter) not in of_norms and not name.endswith("bias")
            trained.append(Trainable(name, parameter, is_decayed and name in hidden, is_decayed))
    return trained


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of the matrices between the first and the last layer. No strategy may have cut `model` before."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim >= 2]
    return [name for name, parameter in matrices[1:-1] if parameter.ndim == 2]


def stand_in(device: torch.device) -> list[Trainable]:
    """Return a parameter for the optimizer of a rank that updates nothing, because an optimizer needs at least one."""
    return [Trainable("", nn.Parameter(torch.zeros(1, device=device)), False, False)]


# --- parameter groups: options by patterns of parameter names (docs/training.md)


def rules_of(groups: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Return the rules of `optimizer.groups`: each `{match: PATTERN or PATTERNS, OPTION: VALUE, ...}`.

    ValueError for an entry of another form.
    """
    rules: list[Rule] = []
    for entry in groups if isinstance(groups, list) else [str(groups)]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("match"), (str, list)) or len(entry) < 2:
            raise ValueError(f"groups={entry}: is not valid (a list of entries with names and options, as in "
                             '[{match: "*.bias", weight_decay: 0}])')  # fmt: skip
        options = {name: value for name, value in entry.items() if name != "match"}
        rules.append((partial(_is_matched, _patterns(entry)), options))
    return rules


def _patterns(entry: Mapping[str, Any]) -> list[str]:
    return [entry["match"]] if isinstance(entry["match"], str) else list(entry["match"])


def _is_matched(patterns: list[str], item: Trainable) -> bool:
    return any(fnmatch.fnmatchcase(item.name, pattern) for pattern in patterns)


def check_groups(groups: Sequence[Mapping[str, Any]], *, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ValueError if `optimizer.groups` does not fit the parameters' names or the optimizer's options and their values."""
    rules_of(groups)
    for entry in groups:
        for option in entry.keys() - {"match"}:
            if option not in options:
                raise ValueError(f"groups={option}: unknown option ({nearest_name(option, list(options))})")
            if isinstance(options[option], (int, float)) and not isinstance(entry[option], (int, float)):
                raise ValueError(f"groups={option}: {entry[option]!r} is not valid (a number, as in {options[option]})")
        for pattern in _patterns(entry):
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"groups={pattern}: matches no parameter that is trained ({nearest_name(pattern, names)})")


def param_groups(trained: Sequence[Trainable], rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Return torch's parameter groups: each parameter with the options of the rules that match it.

    If several rules set the same option, the first rule wins. No group mixes shards of different meshes.
    """
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for item in trained:
        holding = tuple(number for number, (holds, _) in enumerate(rules) if holds(item))
        groups.setdefault(holding, []).append(item.parameter)
    found = []
    for holding, parameters in groups.items():
        options = {name: value for number in reversed(holding) for name, value in rules[number][1].items()}
        found += [{"params": members, **options} for members in by_mesh(parameters)]
    return found


# --- the optimizers

_Groups = list[dict[str, Any]]
Rate = Annotated[float, Gt(0)]
Decay = Annotated[float, Ge(0)]
Momentum = Annotated[float, Ge(0), Lt(1)]
Betas = list[Annotated[float, Ge(0), Lt(1)]]


def _by_decay(trained: list[Trainable], groups: _Groups | None, weight_decay: float) -> list[dict[str, Any]]:
    not_decayed: list[Rule] = [(lambda item: not item.is_decayed, {"weight_decay": 0.0})] if weight_decay else []
    return param_groups(trained, [*rules_of(groups or []), *not_decayed])


def adamw(
    trained: list[Trainable], *, lr: Rate, betas: Betas, eps: Rate, weight_decay: Decay, groups: _Groups | None = None
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019)."""
    by_decay = _by_decay(trained, groups, weight_decay)
    return torch.optim.AdamW(by_decay, lr=lr, betas=_pair(betas), eps=eps, weight_decay=weight_decay, fused=_can_fuse(trained))


def adam(
    trained: list[Trainable], *, lr: Rate, betas: Betas, eps: Rate, groups: _Groups | None = None
) -> torch.optim.Optimizer:
    """Return Adam (Kingma & Ba 2015)."""
    return torch.optim.Adam(_by_decay(trained, groups, 0.0), lr=lr, betas=_pair(betas), eps=eps, fused=_can_fuse(trained))


def sgd(
    trained: list[Trainable],
    *,
    lr: Rate,
    momentum: Momentum,
    nesterov: bool,
    weight_decay: Decay,
    groups: _Groups | None = None,
) -> torch.optim.Optimizer:
    """Return stochastic gradient descent with momentum."""
    if nesterov and momentum == 0:
        raise ValueError("nesterov=true: needs momentum above 0")
    by_decay = _by_decay(trained, groups, weight_decay)
    kind = FusedSGD if _can_fuse(trained) else torch.optim.SGD
    return kind(by_decay, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def muon(
    trained: list[Trainable],
    *,
    lr: Rate,
    momentum: Momentum,
    weight_decay: Decay,
    adamw_lr: Rate,
    adamw_betas: Betas,
    adamw_eps: Rate,
    iteration: Literal["bf16"] | None = None,
    groups: _Groups | None = None,
) -> torch.optim.Optimizer:
    """Return Muon for the matrices between the first and the last layer, and AdamW for all other parameters."""
    rules = rules_of(groups or [])
    of_muon = {"kind": "muon", "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    of_adamw = {"kind": "adamw", "lr": adamw_lr, "betas": _pair(adamw_betas), "eps": adamw_eps, "weight_decay": 0.0}
    of_adamw["fused"] = True  # with this, torch's load_state_dict puts the step counts on the device
    hidden = param_groups([item for item in trained if item.is_hidden], rules)
    others = param_groups([item for item in trained if not item.is_hidden], rules)
    dtype = torch.bfloat16 if iteration == "bf16" else None
    return Muon([*(of_muon | group for group in hidden), *(of_adamw | group for group in others)], dtype=dtype)


def _can_fuse(trained: list[Trainable]) -> bool:
    return all(item.parameter.is_floating_point() for item in trained)  # torch's fused steps accept no complex numbers


def _pair(betas: list[float]) -> tuple[float, float]:
    if len(betas) != 2:
        raise ValueError(f"betas={betas} must be two numbers, as in [0.9, 0.999]")
    return betas[0], betas[1]


class FusedSGD(torch.optim.SGD):
    """torch's SGD in one pass over the memory. torch's own fused step accepts no shards; this one uses this rank's parts."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the Engine has run backward
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moved if group["momentum"] else ():
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            move_by_sgd(
                [local(parameter) for parameter in moved],
                [local(cast(Tensor, gradient_of(parameter))) for parameter in moved],
                [local(self.state[p]["momentum_buffer"]) if group["momentum"] else None for p in moved],
                fused=True,
                **{name: group[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")},
            )


def orthogonalised(matrix: Tensor, *, num_iterations: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Return roughly the nearest (semi-)orthogonal matrix: after five iterations, its singular values are from 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (matrix / (matrix.norm() + 1e-7)).to(dtype or matrix.dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype).contiguous()


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton-Schulz iteration; AdamW for parameters that are not hidden matrices.

    torch.optim.Muon accepts only matrices, and no shards. This class gathers the WHOLE matrix and iterates on it, so every
    strategy takes the same step. It computes in the parameter's own precision, or in `dtype`.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers". The scale 0.2 sqrt(max(rows, columns)), with which
    Muon can use AdamW's learning rates and decay, is from Liu et al. 2025, "Muon is scalable for LLM training".
    """

    def __init__(self, groups: list[dict[str, Any]], *, dtype: torch.dtype | None = None) -> None:
        """Make the optimizer of `groups`: torch's groups, each with its `kind` (muon or adamw) and all options of that kind."""
        super().__init__(groups, defaults={})
        self._dtype = dtype
        self._rank, self._num_ranks = 0, 1
        self._exchange: Callable[[list[Tensor]], None] = lambda matrices: None

    def deal(self, exchange: Callable[[list[Tensor]], None], *, rank: int, num_ranks: int) -> None:
        """Let each of several ranks iterate on one of `num_ranks` matrices; all ranks must hold or gather every matrix.

        `exchange` overwrites, on all ranks, the n-th matrix of a list with rank n's matrix.
        """
        self._exchange, self._rank, self._num_ranks = exchange, rank, num_ranks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the Engine has run backward
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["kind"] == "adamw":
                self._adamw(moved, group)
                continue
            for start in range(0, len(moved), self._num_ranks):
                self._muon(moved[start : start + self._num_ranks], group)

    def _muon(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Move some matrices, at most one for each rank: so many whole matrices are in memory."""
        lr, weight_decay = group["lr"], group["weight_decay"]
        updates = [whole(self._momentum(parameter, group["momentum"])) for parameter in parameters]
        updates = [
            orthogonalised(update, dtype=self._dtype)
            if index == self._rank or self._num_ranks == 1
            else torch.empty_like(update)
            for index, update in enumerate(updates)
        ]
        self._exchange(updates)
        for parameter, update in zip(parameters, updates):
            mine = part_of(update, like=parameter)
            parameter.mul_(1 - lr * weight_decay).add_(mine, alpha=-lr * 0.2 * max(parameter.shape) ** 0.5)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)  # Nesterov

    def _adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] |= {"step": torch.zeros((), device=parameter.device), **zeros}
        states = [self.state[parameter] for parameter in parameters]
        move_by_adamw(
            [local(parameter) for parameter in parameters],
            [local(cast(Tensor, gradient_of(parameter))) for parameter in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=all(parameter.is_floating_point() for parameter in parameters),
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "eps", "weight_decay")},
        )
