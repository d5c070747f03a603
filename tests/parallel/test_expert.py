"""Expert parallelism: which modules hold experts, what the exchange computes, and the strategy against one process."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.distributed.world import World
from framework.modules.parts import experts_of, give_parts
from framework.modules.tensors import local, whole
from framework.modules.trace import give_example
from framework.parallel.expert import cut_experts, problems
from models.moe import Experts, MoEGPT
from tests.harness import assert_close, command, finished, once, together
from tests.ranks import on_ranks
from tests.test_any_to_any import note_state
from tests.test_conformance import MODELS, RUN
from tests.test_resume import after_step, preempt
from tests.zoo import EXPERTS, hf, make

# --- which modules hold experts


def followed(model: nn.Module) -> nn.Module:
    give_example(model, lambda: torch.empty(2, 12, dtype=torch.long, device="meta"))
    return model


SMALL = {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4}
FAMILIES: dict[str, dict[str, Any]] = {"Mixtral": {}, "Qwen3Moe": SMALL, "Olmoe": SMALL, "GptOss": {"head_dim": 4}}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_of_transformers_are_found(kind: str, implementation: str) -> None:
    make("hf mixtral")  # makes torchvision importable
    model = followed(hf(kind, "ForCausalLM", **EXPERTS | FAMILIES[kind] | {"experts_implementation": implementation})())
    found = experts_of(model)
    assert [type(module).__name__ for module in found] == [f"{kind}Experts"] * 3
    assert problems(model) == []


def moe(**options: Any) -> MoEGPT:
    return MoEGPT(vocab_size=16, seq_len=12, **{"dim": 8, "num_layers": 2, "num_heads": 2, "num_experts": 4, **options})


def test_experts_of_ours_are_found_with_and_without_its_answer() -> None:
    model = followed(moe())
    answered = experts_of(model)
    assert [type(module) for module in answered] == [Experts, Experts] and problems(model) == []
    model.__class__ = type("Silent", (MoEGPT,), {"experts": None})
    assert experts_of(model) == answered


def test_the_configuration_may_name_experts() -> None:
    model = followed(moe())
    give_parts(model, {"experts": ["layers.1.experts"]})
    assert experts_of(model) == [model.layers[1].experts]


def test_experts_with_tensors_that_are_not_stacked_are_refused() -> None:
    model = moe()
    experts_of(followed(model))[0].norm = nn.LayerNorm(8)
    (problem,) = problems(model)
    assert "not stacked by its experts" in problem


def test_a_list_of_experts_is_refused_with_the_cure() -> None:
    (problem,) = problems(followed(make("nanogpt")))
    assert "module of stacked experts" in problem and "model.parts.experts" in problem and "ddp, zero, fsdp" in problem


# --- the exchange


class Layer(nn.Module):
    """A layer of experts with a number of its own, so that the input wants a gradient."""

    def __init__(self, num_experts: int, *, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64), requires_grad=not is_frozen)
        self.inner = Experts(dim=8, num_experts=num_experts).double()
        for parameter in self.inner.parameters():
            nn.init.normal_(parameter)

    def experts(self) -> list[nn.Module]:
        return [self.inner]

    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        return self.inner(x_ND * self.scale, index_NK, weights_NK)


def tokens_of(rank: int, *, num_experts: int, few: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens; `few`: all of them have chosen the first two experts, which are on rank 0."""
    generator = torch.Generator().manual_seed(rank)
    count = (7, 1, 4)[rank]
    x_ND, weights_NK = (torch.randn(count, size, generator=generator, dtype=torch.float64) for size in (8, 2))
    scores = torch.rand(count, num_experts, generator=generator)
    scores[:, 2:] -= 2 * few
    return x_ND, scores.topk(2).indices, weights_NK


@pytest.mark.quick(4)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("num_experts", "few"), [(5, False), (5, True), (2, True), (6, False)])
def test_outputs_and_gradients_are_those_of_all_experts(num_experts: int, few: bool, is_frozen: bool, tmp_path: Path) -> None:
    """Ranks have different numbers of tokens and of experts, or none, or experts that no token has chosen."""
    layer = Layer(num_experts, is_frozen=is_frozen)
    given = [tokens_of(rank, num_experts=num_experts, few=few) for rank in range(3)]

    def one(world: World) -> Any:
        own = copy.deepcopy(layer)
        cut_experts(own, mesh=world.mesh(expert=None))
        held = {name: len(local(p)) for name, p in own.inner.named_parameters()}
        output = own(*given[world.rank])
        output.square().sum().backward()
        gradients = [whole(p.grad).detach() for p in own.inner.parameters()]
        scale = own.scale.grad
        return held, output.detach().tolist(), [g.tolist() for g in gradients], None if scale is None else scale.tolist()

    results = on_ranks(3, one, scratch=tmp_path)
    expected = [layer(*tokens) for tokens in given]
    sum(output.square().sum() for output in expected).backward()
    share = -(-num_experts // 3)
    counts = [max(0, min(share, num_experts - share * rank)) for rank in range(3)]
    for (held, output, gradients, _), theirs, count in zip(results, expected, counts):
        assert set(held.values()) == {count}
        torch.testing.assert_close(torch.tensor(output, dtype=torch.float64), theirs.detach())
        for gradient, parameter in zip(gradients, layer.inner.parameters()):
            torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), parameter.grad)
    if not is_frozen:
        total = torch.tensor([scale for *_, scale in results], dtype=torch.float64).sum(dim=0)
        torch.testing.assert_close(total, layer.scale.grad)


def test_results_have_the_type_that_they_have_on_one_process(tmp_path: Path) -> None:
    """Tokens in 16 bits with weights in 32: on a rank without experts too, and without tokens."""
    torch.manual_seed(0)
    experts = Experts(dim=8, num_experts=2)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    weights_NK, index_NK = torch.randn(5, 2).softmax(dim=-1).topk(2, dim=-1)
    given = torch.randn(5, 8).bfloat16(), index_NK, weights_NK

    def one(world: World) -> Any:
        model = torch.nn.Sequential(copy.deepcopy(experts))
        give_parts(model, {"experts": "0"})
        cut_experts(model, mesh=world.mesh(expert=None))
        count = 0 if world.rank == 1 else 5
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model[0](*(tensor[:count] for tensor in given))
        return str(output.dtype), output.tolist()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = experts(*given)
    assert expected.dtype == torch.float32
    for rank, (kind, output) in enumerate(on_ranks(3, one, scratch=tmp_path)):
        assert kind == "torch.float32"
        torch.testing.assert_close(torch.tensor(output).view(-1, 8), expected[: 0 if rank == 1 else 5], rtol=1e-6, atol=1e-6)


# --- the strategy

MOE = [*RUN, *MODELS["experts"], "model.num_layers=2", "model.dropout=0.1", "optimizer.lr=0.01", "trainer.ema_decay=0.8"]
GROUPS = {"2": (2, []), "3": (3, ["parallel.expert=3"]), "2x2": (4, []), "replicas": (2, ["parallel.expert=1"])}


def on(group: str) -> list[str]:
    ranks, mesh = GROUPS[group]
    return ["parallel=expert", *mesh, f"launch.nproc_per_node={ranks}"]


VARIANTS: dict[str, tuple[str, list[str]]] = {
    **{group: (group, []) for group in GROUPS},  # with dropout and an average
    "a rank without samples": ("3", ["global_batch_size=2", "micro_batch_size=null", "model.dropout=0"]),
    "more processes than experts": ("3", ["model.num_experts=2"]),
    "activations recomputed": ("2", ["trainer.activation_checkpointing=true"]),
    "cheap operations recomputed": ("2", ["trainer.activation_checkpointing=operations"]),
    "experts frozen": ("2x2", ["trainer.freeze=[layers.*.experts.*]"]),
    "all but experts frozen": ("3", ["trainer.freeze=[embedding.*,norm.*,layers.*.attention*,layers.*.router.*,layers.*_norm.*]"]),
    "one expert a token": ("2", ["model.top_k=1"]),
    "values clipped": ("2x2", ["trainer.clip_grad_value=0.01"]),
    "Muon": ("3", ["optimizer=muon"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_computes_what_one_process_does(variant: str, tmp_path: Path) -> None:
    group, changes = VARIANTS[variant]
    assert_close(finished(*MOE, *changes, *on(group), root=tmp_path / "runs"), once(*MOE, *changes))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiled_blocks_stop_before_the_exchange(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = moe(num_layers=1, num_experts=3, balance=0.0).double()
    tokens = torch.randint(0, 16, (2, 4, 12))

    def one(world: World) -> list[float]:
        cut_experts(model, mesh=world.mesh(expert=None))
        for block in model.blocks():
            block.forward = torch.compile(block.forward, dynamic=False)
        loss = model(tokens[world.rank]).square().sum()
        loss.backward()
        return [loss.item(), model.layers[0].router.weight.grad.square().sum().item()]

    results = on_ranks(2, one, scratch=tmp_path, timeout_s=400.0)
    for sample, result in zip(tokens, results):
        model.zero_grad()
        loss = model(sample).square().sum()
        loss.backward()
        expected = [loss.item(), model.layers[0].router.weight.grad.square().sum().item()]
        assert result == pytest.approx(expected, rel=1e-9)


HOW = {"single": [], "fsdp": ["parallel=fsdp", "launch.nproc_per_node=2"], "3": on("3"), "2x2": on("2x2")}
PAIRS = [("3", "fsdp"), ("fsdp", "2x2"), ("2x2", "single"), ("single", "3")]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_from_and_to_other_strategies_with_every_bit_of_its_state(
    first: str, second: str, tmp_path: Path
) -> None:
    saved, restored = tmp_path / "saved", tmp_path / "restored"
    stopped = command(*MOE, *HOW[first], root=tmp_path / "1", before=together(note_state(saved), after_step(4, preempt)))
    assert stopped.code == 75, stopped.output
    again = [*MOE, *HOW[second], f"run.resume={stopped.directory}"]
    ended = finished(*again, root=tmp_path / "2", before=note_state(restored))
    assert json.loads(saved.read_text()) == json.loads(restored.read_text())
    assert_close(ended, once(*MOE))
