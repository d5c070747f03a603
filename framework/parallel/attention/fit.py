"""The kinds of attention that a model's mixers can use when their tokens are cut."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from framework.modules.trace import traced
from framework.parallel.attention.cut import Cut
from framework.parallel.attention.ring import ONE_CALL, require_plain, with_attention
from framework.runtime.exits import Unfit

Attention = Literal["ulysses", "ring"]
_NUM_TOKENS, _SIZE = 7, 2  # of the comparison: 7 tokens, 2 ranks, runs of 2, 2, 2 and 1


def attention_of(model: nn.Module, *, asked: Attention | None, context: int) -> Attention:
    """Return the attention that was asked for; else by heads if the processes divide the heads, or else in a ring."""
    return asked or ("ring" if any(heads % context for heads in num_heads(model)) else "ulysses")


def num_heads(model: nn.Module) -> set[int]:
    """Return the numbers of heads of the mixers' arguments: as a forward pass shows them, or else as the model gives them."""
    shown = {shape[1] for shapes in shapes_of_mixers(model).values() for shape in shapes}
    return shown or ({model.num_heads} if isinstance(getattr(model, "num_heads", None), int) else set())  # type: ignore[arg-type]


def shapes_of_mixers(model: nn.Module) -> dict[nn.Module, list[torch.Size]]:
    """Return the shapes of the tensors (B, N, T, E) that a trace shows each mixer to get."""
    trace, mixers = traced(model), set(model.mixers())  # type: ignore[operator]  # the caller has checked that it exists
    entered = [(event.what, event.value[0]) for event in (trace.events if trace else ()) if event.kind == "enter"]
    return {what: [tensor.shape for tensor in given if isinstance(tensor, Tensor) and tensor.ndim == 4]
            for what, given in entered if what in mixers}  # fmt: skip


def ring_fault(model: nn.Module) -> str | None:
    """Return why the mixers do not compute the same in a ring as with all tokens; None if they do, or if no trace shows them.

    One mixer of each class and shape runs on a few random tokens, whole and cut, in one process.
    """
    kinds = {(type(mixer), *shapes): (mixer, shapes) for mixer, shapes in shapes_of_mixers(model).items()}
    for mixer, shapes in kinds.values():
        kind = type(mixer).__name__
        try:
            num_tokens = min(_NUM_TOKENS, *(shape[2] for shape in shapes))  # a table of positions may have no more
            whole, cut = _whole_and_cut(_with_numbers(mixer), [(1, shape[1], num_tokens, shape[3]) for shape in shapes])
        except Unfit as error:
            return f"{kind}: {str(error).partition(', but ')[2]}"
        except Exception as error:  # a user's mixer may raise anything
            return f"{kind} does not run on {num_tokens} tokens: {error}"
        if whole.shape != cut.shape or not torch.allclose(whole, cut, rtol=0, atol=1e-9):
            return (f"{kind} gives other results for a part of the tokens; {ONE_CALL}, and code that needs positions must take "
                    "an argument `positions`, (T,)")  # fmt: skip
    return None


def _with_numbers(mixer: nn.Module) -> nn.Module:
    """Return a copy for evaluation, in float64, with random numbers in its tensors (the originals have no storage)."""
    generator, memo = torch.Generator().manual_seed(0), dict[int, Any]()
    for tensor in (*nn.Module.parameters(mixer), *mixer.buffers()):
        is_float = tensor.is_floating_point()
        numbers = torch.randn(tensor.shape, generator=generator) if is_float else torch.zeros(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(numbers, requires_grad=False) if isinstance(tensor, nn.Parameter) else numbers
    return copy.deepcopy(mixer, memo).double().eval()


@torch.no_grad()
def _whole_and_cut(mixer: nn.Module, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return a mixer's output for all tokens, and its outputs for the tokens of two ranks with attention to all tokens."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    runs = torch.arange(shapes[0][2]).tensor_split(2 * _SIZE)
    places = [torch.cat([runs[run] for run in own]) for own in Cut.zigzag(rank=0, size=_SIZE).runs]
    order = torch.cat(places).argsort()
    given: list[tuple[Sequence[Tensor], dict[str, Any]]] = []

    def note(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **how: Any,
    ) -> Tensor:  # fmt: skip
        require_plain(attn_mask=attn_mask, dropout_p=dropout_p)
        given.append(((query, key, value), {"is_causal": is_causal, **how}))
        return torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)

    def run(attends: Sequence[Any]) -> list[Tensor]:
        return [with_attention(mixer.forward, attend, [tensor[:, :, own] for tensor in tensors], positions=own)
                for own, attend in zip(places, attends)]  # fmt: skip

    run([note] * _SIZE)
    q, k, v = (torch.cat(parts, dim=2)[:, :, order] for parts in zip(*(arguments for arguments, _ in given)))
    attended = F.scaled_dot_product_attention(q, k, v, **given[0][1])
    mixed = run([lambda *_, own=own, **__: attended[:, :, own] for own in places])
    return mixer(*tensors), torch.cat(mixed, dim=2)[:, :, order]
