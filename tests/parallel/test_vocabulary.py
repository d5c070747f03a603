"""Embeddings, heads and losses cut by the vocabulary: exact, whatever its size, and no process has all logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.torch_version import TorchVersion

from framework.distributed.world import World
from framework.modules.tensors import local
from framework.optim.update import gradient_or_zeros
from framework.parallel.tensor import cut_by, stays_cut, styles_of
from framework.tasks.cross_entropy import cross_entropy_sum, highest_class
from framework.tasks.language_modeling import LanguageModeling
from models.gpt import GPT
from tests.harness import assert_close, before_each, finished, once
from tests.ranks import on_ranks
from tests.test_conformance import MODELS, RUN
from tests.test_resume import preempted

TOKENS = torch.tensor([[3, 0, 16, 7], [9, 5, 5, 12]])
TARGETS = torch.tensor([[0, 16, -100, 12], [5, -100, 9, 4]])


class Tiny(nn.Module):
    """An embedding and a head, of one weight or two, and what a plan says of them."""

    def __init__(self, vocabulary: int, *, is_tied: bool, has_bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 6, padding_idx=5, dtype=torch.float64)
        self.head = nn.Linear(6, vocabulary, bias=has_bias, dtype=torch.float64)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())

    def tensor_plan(self) -> dict[str, str]:
        return {"embedding": "vocabulary", "head": "vocabulary"}


def cut(model: nn.Module, world: World, *, keeps_cut: bool) -> nn.Module:
    cut_by(styles_of(model, num_parts=world.world_size, keeps_cut=keeps_cut), model, mesh=world.mesh(tensor=world.world_size))
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(logits: Tensor) -> Tensor:
    return cross_entropy_sum(logits.flatten(0, 1), TARGETS.flatten(), ignore_index=-100)


@pytest.mark.quick(2)
@pytest.mark.parametrize("keeps_cut", [True, False])
@pytest.mark.parametrize(("vocabulary", "num_ranks", "is_tied", "has_bias"), [
    (17, 2, True, False), (18, 3, False, True), (17, 4, True, True), (18, 4, False, False)])  # fmt: skip
def test_losses_and_gradients_are_those_of_whole_layers(
    vocabulary: int, num_ranks: int, is_tied: bool, has_bias: bool, keeps_cut: bool, tmp_path: Path
) -> None:
    def act(world: World) -> Any:
        model = cut(Tiny(vocabulary, is_tied=is_tied, has_bias=has_bias), world, keeps_cut=keeps_cut)
        assert (model.head.weight is model.embedding.weight) == is_tied
        logits = model(TOKENS)
        assert isinstance(logits, DTensor) == keeps_cut
        assert not keeps_cut or logits.to_local().shape[-1] < vocabulary
        loss = loss_of(logits) if keeps_cut else F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
        (loss * 3).backward()
        assert all(local(gradient_or_zeros(p)).shape == local(p).shape for p in model.parameters())  # not of all rows
        best = highest_class(logits.detach())
        with torch.no_grad():
            evaluated = model(TOKENS)
        assert type(evaluated) is Tensor
        gradients = {name: whole(p.grad).tolist() for name, p in model.named_parameters() if p.grad is not None}
        return loss.item(), best.tolist(), evaluated.tolist(), gradients

    model = Tiny(vocabulary, is_tied=is_tied, has_bias=has_bias)
    logits = model(TOKENS)
    loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    (loss * 3).backward()
    for found, best, evaluated, gradients in on_ranks(num_ranks, act, scratch=tmp_path):
        assert found == pytest.approx(loss.item(), rel=1e-14)
        assert best == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(evaluated, dtype=torch.float64), logits.detach(), rtol=1e-13, atol=1e-13)
        assert gradients.keys() == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                torch.tensor(gradients[name], dtype=torch.float64), parameter.grad, rtol=1e-12, atol=1e-13
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_cut_logits_is_taken_in_32_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    logits = (torch.randn(8, 31, generator=torch.Generator().manual_seed(1)) * 4 + 1e3).to(dtype)

    def act(world: World) -> Any:
        part = DTensor.from_local(logits.tensor_split([16], dim=1)[world.rank], world.mesh(tensor=2), [Shard(1)], run_check=False,
                                  shape=logits.shape, stride=logits.stride()).requires_grad_()  # fmt: skip
        with loss_parallel():
            loss = cross_entropy_sum(part, TARGETS.flatten(), ignore_index=-100)
            loss.backward()
        assert part.grad is not None and part.grad.dtype == dtype and loss.dtype == torch.float32
        return loss.item(), whole(part.grad).tolist()

    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, TARGETS.flatten(), reduction="sum")
    loss.backward()
    for found, gradient in on_ranks(2, act, scratch=tmp_path):
        assert found == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(torch.tensor(gradient), exact.grad.float(), rtol=1e-2, atol=1e-4)


def test_a_token_or_target_that_is_none_is_an_error_on_every_process(tmp_path: Path) -> None:
    def act(world: World) -> None:
        model = cut(Tiny(17, is_tied=True), world, keeps_cut=True)
        with pytest.raises(RuntimeError, match="token is out of range of a vocabulary of 17"):
            model(torch.tensor([[17]]))
        with pytest.raises(IndexError, match="Target 17 is out of bounds"):
            cross_entropy_sum(model(torch.tensor([[1]])).flatten(0, 1), torch.tensor([17]), ignore_index=-100)

    on_ranks(2, act, scratch=tmp_path)


class Ours(LanguageModeling):
    """A user's task."""


def test_only_a_task_that_says_so_itself_gets_cut_logits() -> None:
    assert stays_cut(LanguageModeling(bytes_per_token=None))
    assert not stays_cut(Ours(bytes_per_token=None))


def gpt(**options: Any) -> GPT:
    return GPT(**{"vocab_size": 17, "seq_len": 4, "dim": 8, "num_layers": 1, "num_heads": 2, **options})


def test_what_cannot_be_cut_by_rows_is_refused() -> None:
    model = gpt(vocab_size=5, num_heads=4)
    with pytest.raises(ValueError, match="embedding has 5 rows, too few for 4 processes"):
        styles_of(model, num_parts=4)
    model = gpt()
    model.embedding = nn.Embedding(17, 8, max_norm=1.0)
    with pytest.raises(ValueError, match="embedding has max_norm"):
        styles_of(model, num_parts=2)
    model = gpt(tie_embeddings=True)
    plan = model.tensor_plan()
    model.__class__ = type("Half", (GPT,), {"tensor_plan": lambda self: {k: v for k, v in plan.items() if k != "head"}})
    with pytest.raises(ValueError, match="and head, which has the same weight, is not"):
        styles_of(model, num_parts=2)


def test_uneven_vocabularies_stay_whole_before_torch_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    assert not {"embedding", "head"} & styles_of(gpt(vocab_size=17), num_parts=2).keys()
    assert {"embedding", "head"} <= styles_of(gpt(vocab_size=18), num_parts=2).keys()


# --- whole runs

LINE = [*RUN, *MODELS["gpt, tied"], "dataset.vocab_size=19"]  # of 2 processes one has 10 tokens, the other 9


def note_logits(path: Path) -> Any:
    """Return what makes a rank that has the first tokens write down how many logits of a token its loss takes."""

    def note(task: LanguageModeling, outputs: Tensor, targets: Tensor) -> None:
        is_cut = isinstance(outputs, DTensor)
        is_first = not is_cut or outputs.device_mesh.get_local_rank() == 0
        if is_first and outputs.device.type != "meta" and torch.is_grad_enabled():
            own = outputs.to_local() if is_cut else outputs
            with path.open("a") as file:
                file.write(f"{own.shape[-1]}\n")

    return lambda: before_each(LanguageModeling, "loss", note)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options", "width"), [
    (["parallel=tensor", "launch.nproc_per_node=2"], ["trainer.max_steps=3", "trainer.eval_every=null"], 10),
    pytest.param(["parallel=tensor", "launch.nproc_per_node=4"], ["model.tie_embeddings=false"], 5, marks=pytest.mark.slow),
    # FSDP does not shard uneven parts: such a vocabulary stays whole there
    pytest.param(["parallel=fsdp+tp", "launch.nproc_per_node=4"], [], 19, marks=pytest.mark.slow),
    pytest.param(["parallel=fsdp+tp", "launch.nproc_per_node=4"], ["dataset.vocab_size=20"], 10, marks=pytest.mark.slow),
    pytest.param(["parallel=pp+fsdp+tp", "launch.nproc_per_node=8"], ["dataset.vocab_size=20"], 10, marks=pytest.mark.slow),
    pytest.param(["parallel=tensor", "launch.nproc_per_node=2"],
                 ["task._target_=tests.parallel.test_vocabulary.Ours", "task.bytes_per_token=4"], 19, marks=pytest.mark.slow),
])  # fmt: skip
def test_runs_compute_what_one_process_does(mesh: list[str], options: list[str], width: int, tmp_path: Path) -> None:
    run = finished(*LINE, *options, *mesh, root=tmp_path / "runs", before=note_logits(tmp_path / "shapes"))
    assert set((tmp_path / "shapes").read_text().split()) == {str(width)}
    assert_close(run, once(*LINE, *options))


@pytest.mark.slow
def test_a_run_with_uneven_parts_goes_on_with_others_and_without(tmp_path: Path) -> None:
    line = [*LINE, "parallel=tensor"]
    stopped = preempted(*line, "launch.nproc_per_node=2", at=4, root=tmp_path / "cut")
    resume = f"run.resume={stopped.directory}"
    assert_close(finished(*line, "launch.nproc_per_node=4", resume, root=tmp_path / "four"), once(*LINE))
    assert_close(finished(*LINE, resume, root=tmp_path / "single"), once(*LINE))
