"""A module with only some of its experts, and the check that such parts together compute the same as the whole module."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from framework.modules.parts import Choices

_NUM_TOKENS, _MOST = 3, 3  # of the comparison: tokens, and at most so many experts, in two parts of different sizes


def run_part(module: nn.Module, stacked: Mapping[str, Tensor], *given: Tensor) -> Tensor:
    """Call a module of experts with the parameters of only some of its experts; their indices count from 0.

    A module must read the number of experts from its parameters, or from `num_experts`.
    """
    part = copy.copy(module)
    state = vars(part)
    state.pop("forward", None)  # remove a wrapper around the whole module
    state["_parameters"] = {}
    state.update(stacked)  # tensors that autograd follows, not parameters
    if "num_experts" in state:
        state["num_experts"] = next(iter(stacked.values())).shape[0]
    return part.forward(*given)  # type: ignore[no-any-return]


def fault_of(module: nn.Module, choices: Choices | None) -> str | None:
    """Return why a module's experts cannot be on different processes, or None. `choices` are the sizes of its calls, if known.

    The module runs on a few random tokens, with some experts at once and in two parts, in one process, in training mode:
    experts with random draws, such as dropout, do not give the same result twice.
    """
    kind = type(module).__name__
    stacked = dict(module.named_parameters(recurse=False))
    if (
        len(stacked) < len([*nn.Module.parameters(module), *module.buffers()])
        or len({p.shape[:1] for p in stacked.values()}) != 1
    ):
        return f"{kind} has tensors that are not stacked by its experts, (num_experts, ...), in the module itself"
    if choices is None:
        return f"{kind} was never called with tokens (N, D), indices (N, K) and weights (N, K)"
    if "forward" in vars(module):
        return f"{kind} has another forward than its class"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            whole, apart = _whole_and_apart(module, stacked, choices)
    except Exception as error:  # a user's module may raise anything
        return f"{kind} does not run with some of its experts: {error}"
    closeness = 1e-9 if whole.dtype == torch.float64 else 1e-4
    if whole.shape != apart.shape or not torch.allclose(whole, apart, rtol=closeness, atol=closeness):
        return f"{kind} gives other results with some of its experts, or uses random numbers, as dropout does"
    return None


def _whole_and_apart(module: nn.Module, stacked: Mapping[str, Tensor], choices: Choices) -> tuple[Tensor, Tensor]:
    num_experts = min(_MOST, next(iter(stacked.values())).shape[0])
    generator = torch.Generator().manual_seed(0)

    # not always float64: some kernels, such as grouped products, do not support it
    dtype = torch.promote_types(next(iter(stacked.values())).dtype, torch.float32)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    # numbers are repeated along most dims, because drawing all numbers of large experts takes long
    tensors = {
        name: random(num_experts, *[1] * (p.ndim - 2), *p.shape[1:][-1:]).expand(num_experts, *p.shape[1:]).contiguous()
        for name, p in stacked.items()
    }
    index_NK = random(_NUM_TOKENS, num_experts).topk(min(choices.num_choices, num_experts)).indices
    x_ND, weights_NK = random(_NUM_TOKENS, choices.dim), random(*index_NK.shape)
    trained = copy.copy(module)
    vars(trained)["training"] = True
    whole = run_part(trained, tensors, x_ND, index_NK, weights_NK)
    apart = torch.zeros_like(x_ND)
    for places in torch.arange(num_experts).chunk(2):
        own = {name: tensor[places[0] : places[-1] + 1] for name, tensor in tensors.items()}
        tokens, choice = ((index_NK >= places[0]) & (index_NK <= places[-1])).nonzero(as_tuple=True)
        if len(tokens):
            rows = x_ND[tokens], (index_NK[tokens, choice] - places[0]).unsqueeze(1), weights_NK[tokens, choice].unsqueeze(1)
            apart.index_add_(0, tokens, run_part(trained, own, *rows))
    return whole, apart
