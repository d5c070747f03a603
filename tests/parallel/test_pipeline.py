"""What the stages of a pipeline send to each other, and in which order they work."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from framework.engine.forward import Forward
from framework.modules.parts import chain_of
from framework.modules.trace import give_example
from framework.parallel.pipelining.own_forward import OwnForward, chain_for
from framework.parallel.pipelining.passes import Pipeline
from framework.parallel.pipelining.schedules import owners
from framework.parallel.pipelining.sent import Sent
from framework.runtime.exits import Unfit
from models.gpt import GPT
from tests.harness import around, assert_close, finished, once, refused
from tests.test_conformance import MODELS, RUN, TOKENS
from tests.test_resume import assert_survives_a_kill, preempted

TWO = ["launch.nproc_per_node=2"]
GPT_LINE = [*RUN, *MODELS["gpt, tied"]]
# links that end with a linear layer, which autocast computes in 16 bits; the activations between them are 24 numbers a sample
MLP_LINE = [*RUN, *MODELS["mlp"], "model.dropout=0"]


class OwnWay(nn.Module):
    """Blocks that a forward of its own calls: the hidden state is in bf16 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.stem(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    """A language model without chain(): residuals around its blocks, positions of its own, and a head that is its embedding."""

    def __init__(self, *, vocab_size: int, seq_len: int, dim: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Parameter(0.1 * torch.randn(seq_len, dim))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Tanh()) for _ in range(5))
        self.between = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for number, block in enumerate(self.blocks):
            x = self.between(x) if number == 2 else x
            x = x + block(x)
        return self.head(x)


class Carries(nn.Module):
    """Blocks that hand on what is not the hidden state: a residual, as in Mamba, and a bias of the first block, as in T5."""

    class Block(nn.Module):
        def __init__(self, dim: int, *, is_first: bool) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)
            self.bias = nn.Parameter(0.1 * torch.randn(dim)) if is_first else None

        def forward(self, x: torch.Tensor, bias: Any = None, *, residual: Any = None) -> tuple[torch.Tensor, ...]:
            bias = self.bias * 2 if self.bias is not None else bias
            residual = x if residual is None else residual + x
            return torch.tanh(self.linear(self.norm(residual)) + bias), residual, bias

    def __init__(self, *, vocab_size: int, seq_len: int, dim: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(self.Block(dim, is_first=number == 0) for number in range(5))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, residual, bias = self.tokens(tokens), None, None
        for block in self.blocks:
            x, residual, bias = block(x, bias, residual=residual)
        return self.head(x + residual)


class Recomputes(Carries):
    """Its own forward recomputes its blocks in the backward pass."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, residual, bias = self.tokens(tokens), None, None
        for block in self.blocks:
            x, residual, bias = checkpoint(block, x, bias, residual=residual, use_reentrant=False)
        return self.head(x + residual)


RESIDUAL = [*RUN, *TOKENS, "model._target_=tests.parallel.test_pipeline.Residual"]
CARRIES = [*RUN, *TOKENS, "model._target_=tests.parallel.test_pipeline.Carries", "trainer.max_steps=4", "micro_batch_size=2"]
FOUR = ["parallel=pp+fsdp+tp", "launch.nproc_per_node=4"]
SHARDED = [*FOUR, "parallel.shard=2", "parallel.tensor=1"]
MANY = ["micro_batch_size=2"]  # 7 micro-batches in a step, 5 in an epoch's last
SIX = [*GPT_LINE, *MANY, "model.num_layers=6"]


def scheduled(schedule: str, ranks: int = 2) -> list[str]:
    return ["parallel=pipeline", f"parallel.schedule={schedule}", f"launch.nproc_per_node={ranks}"]


CUTS = {
    "every argument is sent": ([*CARRIES, "global_batch_size=16"], scheduled("zero-bubble")),
    "every argument is sent, sharded": (CARRIES, SHARDED),
    "every argument is sent on four": (CARRIES, scheduled("gpipe", 4)),
    "every argument is sent in a V": (CARRIES, scheduled("dualpipev")),
    "an own forward, sharded": ([*RESIDUAL, "trainer.max_steps=3"], SHARDED),
    **{f"{name}, {kind}": ([*line, *MANY], scheduled(name)) for name in ("zbv", "dualpipev")
       for kind, line in (("gpt", GPT_LINE), ("mlp", MLP_LINE))},
    **{f"{name} on three": (SIX, scheduled(name, 3)) for name in ("zbv", "dualpipev")},
    "side by side": ([*GPT_LINE, *MANY], ["parallel=ddp+pp", "parallel.replicate=2", "parallel.pipeline=2", "parallel.schedule=zbv", "launch.nproc_per_node=4"]),
    "recomputed by its own code": ([*CARRIES, "model._target_=tests.parallel.test_pipeline.Recomputes"], scheduled("1f1b")),
    "too few micro-batches": (GPT_LINE, scheduled("dualpipev")),
}  # fmt: skip
OTHER_ORDER = "WARNING: parallel.schedule: dualpipev cannot run 3 micro-batches in a pass, so ZBVZeroBubble is used"


@pytest.mark.quick(1)
@pytest.mark.parametrize("cut", CUTS)
def test_stages_compute_what_one_process_does(cut: str, tmp_path: Path) -> None:
    line, words = CUTS[cut]
    ended = finished(*line, *words, root=tmp_path)
    assert_close(ended, once(*line))
    assert OTHER_ORDER in ended.output if cut == "too few micro-batches" else "cannot run" not in ended.output


@pytest.mark.slow
def test_pipedream_sends_every_argument_too(tmp_path: Path) -> None:
    line = [*CARRIES, "trainer.clip_grad_norm=null"]
    weights = finished(*line, *scheduled("pipedream"), "parallel.drain_every=1", "checkpoint.every=null", root=tmp_path).weights
    assert all(torch.allclose(weights[name], value, rtol=0, atol=1e-10) for name, value in once(*line).weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["shard=2", "tensor=1"], ["shard=1", "tensor=2"]])
def test_sharded_stages_are_rehearsed_and_stopped_and_go_on_under_another_strategy(mesh: list[str], tmp_path: Path) -> None:
    line, cut = [*RESIDUAL, "checkpoint.every=2"], [*FOUR, *(f"parallel.{degree}" for degree in mesh)]
    stopped = preempted(*line, *cut, "rehearse=true", at=5, root=tmp_path / "runs")
    other = finished(*line, "parallel=fsdp", *TWO, f"run.resume={stopped.directory}", root=tmp_path / "fsdp")
    assert_close(other, once(*line))
    assert_close(finished(*line, *cut, root=tmp_path / "runs"), once(*line))


def test_two_stages_of_an_own_forward_on_a_process_are_not_sharded() -> None:
    assert "parallel.schedule: interleaved, which puts two stages on a process" in refused(
        *RESIDUAL, *FOUR, "parallel.tensor=1", "parallel.schedule=interleaved"
    )


def sent_types(model: nn.Module, *, autocast: torch.dtype | None, dtype: Any = None) -> list[torch.dtype]:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    give_example(model, lambda: tokens)
    forward = Forward(object(), seed=0, devices=[torch.device("cpu")], autocast=autocast)
    chain = chain_for(model)
    count = chain.num_links if isinstance(chain, OwnForward) else len(chain_of(model) or [])
    spans = [range(i, i + 1) for i in range(count)]
    sent = Sent(chain, spans, forward=forward, plain=torch.float32, dtype=dtype)
    return [value.dtype for (value,) in sent.like(tokens)]


@pytest.mark.parametrize("left_out", [{0}, {1}, {2}, {1, 2}])
def test_a_step_may_leave_out_blocks_but_not_all_after_a_cut(left_out: set[int]) -> None:
    class LeavesOut(OwnWay):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.stem(tokens)
            for number, layer in enumerate(self.layers):
                x = layer(x) if not self.training or number not in left_out else x
            return self.head(x)

    model, tokens, spans = LeavesOut(), torch.ones(2, 6, dtype=torch.long), [range(1), range(1, 3)]
    expected, cpu = model(tokens), torch.device("cpu")
    give_example(model, lambda: tokens)
    chain = chain_for(model)
    stages = chain.keep_own(spans, own=[0, 1], device=cpu)
    chain.fill([*stages.values()], device=cpu)
    with pytest.raises(Unfit, match="no block after the place") if left_out == {1, 2} else nullcontext():
        sent = chain.run(stages[0], spans[0], (), tokens)
        assert torch.equal(chain.run(stages[1], spans[1], sent, tokens), expected)


BF16, FP32 = torch.bfloat16, torch.float32


def test_an_activation_travels_in_the_type_in_which_it_is_computed() -> None:
    gpt = nn.Sequential(*GPT(vocab_size=8, seq_len=6, dim=8, num_layers=2, num_heads=2).chain(), nn.Linear(8, 8))
    # the residual stream is a sum of an embedding, which autocast leaves alone, and of what layers add in 16 bits
    assert sent_types(gpt, autocast=BF16) == [FP32] * 5 + [BF16]
    assert sent_types(gpt, autocast=None) == [FP32] * 6
    assert sent_types(OwnWay(), autocast=BF16) == [BF16, BF16]
    assert sent_types(gpt, autocast=None, dtype="bf16") == [BF16] * 6


@pytest.mark.slow
def test_the_loss_has_the_type_of_the_weights(tmp_path: Path) -> None:
    """A stage's outputs must have the type that was announced."""

    def plant() -> None:
        def run(plain: Any, self: Any, *given: Any) -> Any:
            value = plain(self, *given)
            assert {tensor.dtype for tensor in tree_leaves(value)} == {self._dtype}
            return value

        around(Pipeline, "_run_stage", run)

    finished(
        *GPT_LINE, "precision=fp32", "parallel=pipeline", *TWO, "trainer.max_steps=1", root=tmp_path / "runs", before=plant
    )


# --- schedules whose stages lie in a V

V = ["zbv", "dualpipev"]


@pytest.mark.parametrize("name", V)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_first_process_has_the_last_stage_too(name: str, num_ranks: int) -> None:
    found = owners(name, num_ranks=num_ranks)
    assert found == [*range(num_ranks), *reversed(range(num_ranks))]
    assert owners("interleaved", num_ranks=num_ranks) == [*range(num_ranks), *range(num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("name", V)
def test_a_killed_run_goes_on_with_the_same_bits_and_under_another_strategy(name: str, tmp_path: Path) -> None:
    line = [*GPT_LINE, *MANY, "checkpoint.every=2"]
    cut = [*line, *scheduled(name)]
    assert_survives_a_kill(*cut, at=5, root=tmp_path)
    stopped = preempted(*cut, at=4, root=tmp_path / "stopped")
    for other in (["parallel=fsdp", *TWO], scheduled("interleaved")):
        run = finished(*line, *other, f"run.resume={stopped.directory}", root=tmp_path / other[1].partition("=")[2])
        assert_close(run, once(*GPT_LINE, *MANY))
