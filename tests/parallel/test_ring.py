"""Attention in a ring computes what attention to all tokens does, however they are cut, and refuses what it would compute wrongly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from framework.distributed.world import World
from framework.engine.seam import MicroBatch
from framework.modules.trace import give_example
from framework.parallel.attention import blocks
from framework.parallel.attention.cut import Cut
from framework.parallel.attention.fit import ring_fault
from framework.parallel.attention.ring import round_ring
from framework.runtime.exits import Unfit
from models.gpt import GPT, CausalMix
from tests.harness import Says, assert_close, assert_same_bits, command, finished, slow_but
from tests.ranks import on_ranks
from tests.test_conformance import MODELS, OPTIMIZERS, RUN
from tests.test_resume import after_step, crash


def micro_batch(num_tokens: int) -> MicroBatch:
    tokens = torch.arange(num_tokens).expand(2, -1)
    return MicroBatch(number=0, inputs=tokens, targets=tokens + 1, num_samples=2, start=0)


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 12, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", [Cut.contiguous, Cut.zigzag])
def test_each_token_is_of_one_rank(kind: Any, size: int, num_tokens: int) -> None:
    whole, cuts = micro_batch(num_tokens), [kind(rank=rank, size=size) for rank in range(size)]
    parts = [cut.of(whole) for cut in cuts]
    for cut, part in zip(cuts, parts):
        assert part.inputs[0].tolist() == cut.positions.tolist() == sorted(cut.positions.tolist())
        assert torch.equal(part.targets, part.inputs + 1)
        assert cut.counts == [other.inputs.shape[1] for other in parts]
    assert sorted(torch.cat([part.inputs[0] for part in parts]).tolist()) == list(range(num_tokens))
    assert sum(cut.share for cut in cuts) == pytest.approx(1.0)


def test_causal_attention_is_as_much_work_for_each_rank() -> None:
    cuts = [Cut.zigzag(rank=rank, size=4) for rank in range(4)]
    parts = [cut.of(micro_batch(80)) for cut in cuts]
    assert {int((part.inputs[0] + 1).sum()) for part in parts} == {80 * 81 // 8}  # keys that a rank's queries read


def tensors(shape: tuple[int, ...], *, shared: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys and values, the last with a dim of their own, and a gradient of what is read."""
    generator = torch.Generator().manual_seed(1)
    b, n, t, e = shape
    shapes = [(b, n, t, e), (b, shared, t, e), (b, shared, t, 5), (b, n, t, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def in_a_ring(given: list[Tensor], how: dict[str, Any], *, size: int, scratch: Path) -> list[Tensor]:
    """Return what is read, and the gradients of queries, keys and values, of all tokens, from `size` processes."""
    num_tokens = given[0].shape[2]

    def act(world: World) -> tuple[list[int], list[Any]]:
        group = world.mesh(context=None).get_group("context")
        cut = Cut.zigzag(rank=world.rank, size=world.world_size)
        cut.of(micro_batch(num_tokens))
        *own, gradient = (tensor[:, :, cut.positions] for tensor in given)
        own = [tensor.clone().requires_grad_() for tensor in own]
        mix = round_ring(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how), cut=cut, group=group)
        read = mix(*own)
        read.backward(gradient)
        parts = [read.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]
        assert {part.dtype for part in parts} == {given[0].dtype}
        return cut.positions.tolist(), [part.double().numpy() for part in parts]  # a tensor would die with its process

    ranks = on_ranks(size, act, scratch=scratch)
    order = torch.tensor([position for positions, _ in ranks for position in positions]).argsort()
    return [torch.cat([*map(torch.from_numpy, parts)], dim=2)[:, :, order] for parts in zip(*(parts for _, parts in ranks))]


def at_once(given: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    *own, gradient = (tensor.clone() for tensor in given)
    for tensor in own:
        tensor.requires_grad_()
    read = F.scaled_dot_product_attention(*own, **how)
    read.backward(gradient)
    return [read.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]


CAUSAL = {"is_causal": True}


@pytest.mark.parametrize(
    ("size", "num_tokens", "shared", "how"),
    [
        (1, 6, 3, CAUSAL),
        (2, 12, 3, CAUSAL),
        (2, 13, 3, {}),
        (3, 13, 3, CAUSAL | {"scale": 0.3}),
        (3, 2, 3, CAUSAL),  # fewer tokens than ranks
        (3, 2, 3, {}),
        (4, 21, 1, CAUSAL | {"enable_gqa": True}),
        (4, 21, 3, {}),
    ],
)
def test_it_is_attention_to_all_tokens(
    size: int, num_tokens: int, shared: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(blocks, "_NUM_SCORES", 2 * 3 * 12)  # several pieces in each block
    given = tensors((2, 3, num_tokens, 4), shared=shared, dtype=torch.float64)
    for found, expected in zip(in_a_ring(given, how, size=size, scratch=tmp_path), at_once(given, how), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_sixteen_bits_are_summed_in_thirty_two(tmp_path: Path) -> None:
    """What is read is as near to exact attention as one rounding of the result."""
    given = tensors((1, 2, 257, 8), shared=2, dtype=torch.bfloat16)
    exact = at_once([tensor.double() for tensor in given], CAUSAL)
    for found, expected in zip(in_a_ring(given, CAUSAL, size=3, scratch=tmp_path), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)


# --- which mixers it takes


class Alibi(nn.Module):
    """Attention whose weights fall with the distance, by a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], dtype=q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=-(places[:, None] - places).abs())


class ByHand(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(dim=-1) @ v


class Unplaced(nn.Module):
    """Positions that are counted where the tokens are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
        return F.scaled_dot_product_attention(q * places.cos(), k * places.cos(), v, is_causal=True)


class Smoothed(nn.Module):
    """A running mean over tokens, after the attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).cumsum(dim=2)


class Scaled(nn.Module):
    """A mixer with tensors of its own, and no causality."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * self.norm, k + self.bias, v, scale=0.2)


def with_mixer(mixer: nn.Module) -> GPT:
    with torch.device("meta"):
        model = GPT(vocab_size=8, seq_len=16, dim=8, num_layers=2, num_heads=2)
        for layer in model.layers:
            layer.attention.mix = copy.deepcopy(mixer)
    model.mixers = lambda: [layer.attention.mix for layer in model.layers]  # type: ignore[method-assign]
    give_example(model, torch.empty(2, 16, dtype=torch.int64, device="meta"))
    return model


@pytest.mark.parametrize("mixer", [CausalMix(dropout=0.0), Scaled().to("meta")], ids=lambda mixer: type(mixer).__name__)
def test_it_takes_plain_attention(mixer: nn.Module) -> None:
    assert ring_fault(with_mixer(mixer)) is None


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (Alibi(), "Alibi: ... a mask; ..."),
        (ByHand(), "ByHand: ... 0 times; ..."),
        (Unplaced(), "Unplaced gives other results ... `positions` ..."),
        (Smoothed(), "Smoothed gives other results ..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_says_why_it_takes_no_other(mixer: nn.Module, words: str) -> None:
    assert ring_fault(with_mixer(mixer)) == Says(words)


def test_what_draws_in_training_is_refused_there_and_not_in_evaluation() -> None:
    cut, tokens = Cut.zigzag(rank=0, size=1), torch.randn(2, 3, 6, 4)
    cut.of(micro_batch(6))
    mixer = CausalMix(dropout=0.5)
    run = round_ring(mixer.forward, cut=cut, group=None)  # type: ignore[arg-type]  # alone, it sends nothing
    with pytest.raises(Unfit, match="has dropout"):
        run(tokens, tokens, tokens)
    mixer.eval()
    torch.testing.assert_close(run(tokens, tokens, tokens), mixer(tokens, tokens, tokens))
    assert ring_fault(with_mixer(mixer)) is None


class Placed(nn.Module):
    """A mixer with a table of positions, which has no more than the samples have tokens."""

    def __init__(self, *, num_tokens: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(num_tokens, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
        places = torch.arange(q.shape[2]) if positions is None else positions
        return F.scaled_dot_product_attention(q + self.table[places], k, v)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_a_table_of_positions_may_be_as_short_as_the_samples(num_tokens: int) -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=8, seq_len=num_tokens, dim=8, num_layers=2, num_heads=2)
        for layer in model.layers:
            layer.attention.mix = Placed(num_tokens=num_tokens)
    model.mixers = lambda: [layer.attention.mix for layer in model.layers]  # type: ignore[method-assign]
    give_example(model, torch.empty(2, num_tokens, dtype=torch.int64, device="meta"))
    assert ring_fault(model) is None


class OneMix(GPT):
    """All layers share one mixer, and the model lists it once for each layer."""

    def __init__(self, *, vocab_size: int, seq_len: int, **options: Any) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, **options)
        for layer in self.layers:
            layer.attention.mix = self.layers[0].attention.mix

    def mixers(self) -> list[nn.Module]:
        return [layer.attention.mix for layer in self.layers]


# --- whole runs


@pytest.mark.parametrize("attention", slow_but(["ring"], ["ring", "ulysses"]))
def test_layers_may_share_a_mixer(attention: str, tmp_path: Path) -> None:
    line = [*RUN, *MODELS["gpt, tied"], "model._target_=tests.parallel.test_ring.OneMix"]
    two = ["parallel=context", "parallel.context=2", f"parallel.attention={attention}", "launch.nproc_per_node=2"]
    assert_close(finished(*line, *two, root=tmp_path / "two"), finished(*line, root=tmp_path / "one"))


SIX_HEADS = [*MODELS["gpt, tied"], "model.dim=24", "model.num_heads=6", *OPTIMIZERS["adamw"]]
EIGHT = ["parallel=context", "parallel.context=8", "launch.nproc_per_node=8"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_processes_than_heads_compute_what_one_does(tmp_path: Path) -> None:
    """13 tokens over 8 processes: runs of one token, and none."""
    one, eight = (finished(*RUN, *SIX_HEADS, *more, root=tmp_path / f"{len(more)}") for more in ([], EIGHT))
    assert_close(eight, one)


RING = [*RUN, *MODELS["gpt, tied"], *OPTIMIZERS["adamw"], "parallel=context", "parallel.attention=ring"]


SHORT = ["model.num_layers=1", "dataset.num_val=4", "dataset.num_test=4", "trainer.max_steps=3"]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("more", [["trainer.activation_checkpointing=true"], ["trainer.compile=true"], ["precision=bf16"]])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_it_goes_with_what_else_a_run_asks_for(attention: str, more: list[str], tmp_path: Path) -> None:
    two = [*RING, f"parallel.attention={attention}", *more, "parallel.context=2", "launch.nproc_per_node=2"]
    one = [*RING[:-2], *(more if "precision=bf16" in more else [])]  # what else changes no number
    ring, alone = (finished(*line, *SHORT, root=tmp_path / str(len(line)), timeout_s=400) for line in (two, one))
    assert_close(ring, alone, tolerance=2e-2 if "precision=bf16" in more else 1e-10)


@pytest.mark.slow
def test_killed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    line = [*RING, "parallel.context=3", "launch.nproc_per_node=3", "checkpoint.every=4"]
    whole = finished(*line, root=tmp_path / "whole")
    assert command(*line, root=tmp_path / "runs", before=after_step(6, crash)).code != 0
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


def test_what_a_user_asks_for_and_cannot_have_is_refused(tmp_path: Path) -> None:
    line = [*RUN, *SIX_HEADS, *EIGHT, "parallel.attention=ulysses"]
    refused = command(*line, root=tmp_path / "runs")
    assert refused.code == 78 and refused.output == Says("parallel.context: 8 ... 6 heads ... attention=ring ...")
