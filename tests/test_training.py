"""Freezing and clipping by value: the right numbers, under every strategy, after a kill, bit by bit where promised."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from framework.modules.structure import freeze_parameters
from framework.optim.optimizers import adamw, hidden_matrices, muon, trainable
from framework.optim.update import ClipValues
from framework.training.loop import Trainer
from tests.harness import Ended, after_each, assert_close, exact_rows, finished, model_of, once
from tests.test_bitwise import digest
from tests.test_conformance import CASES, FOR_EXPERTS, MODELS, RUN, SMALL, name
from tests.test_resume import assert_survives_a_kill

# a pipeline's whole first half is frozen
FROZEN = ["embedding.*", "layers.0.*", "layers.1.*", "layers.3.*norm*"]
TIED = [*MODELS["gpt, tied"], "dataset.seq_len=12"]
GPT = [*TIED, "model.tie_embeddings=false"]
CLIP = "trainer.clip_grad_value=0.01"
LINES = {
    "half frozen": [*RUN, *GPT, f"trainer.freeze=[{','.join(FROZEN)}]"],
    "clipped": [*RUN, *TIED, CLIP],
    "all": [*RUN, *GPT, f"trainer.freeze=[{','.join(FROZEN)}]", CLIP, "trainer.ema_decay=0.8"],
}
ALL = "all"
STRATEGIES = [
    case for case in CASES if case[0] not in FOR_EXPERTS and (case[1] <= 2 or (case[0] == "pp+fsdp+tp" and case[1] == 4))
]
STRATEGIES += [("tensor", 2, ["parallel.sequence=true"]), ("fsdp+tp", 4, ["parallel.shard=2", "parallel.tensor=2", "parallel.sequence=true"]),
               ("pipeline", 2, ["parallel.schedule=zero-bubble"]), ("fsdp", 3, []), ("zero", 3, []), ("hsdp", 4, ["parallel.replicate=2", "parallel.shard=2"])]  # fmt: skip


def without_gradients() -> None:
    """Fail where a frozen parameter has a gradient after a step."""

    def look(trainer: Trainer, *_: Any, **__: Any) -> None:
        assert all(p.grad is None for p in trainer.engine.module.parameters() if not p.requires_grad)

    after_each(Trainer, "train_step", look)


def crossed() -> Iterator[Any]:
    """Yield every strategy with all changes together, and one strategy of each way to hold gradients with each alone."""
    for case in STRATEGIES:
        is_plain = case in CASES and case[1] <= 2
        lines = LINES if is_plain and case[0] in ("ddp", "zero", "fsdp", "pipeline", "fsdp+tp") else [ALL]
        for line in lines:
            is_quick = line == ALL and is_plain and case[0] in ("ddp", "zero", "fsdp", "pipeline")
            yield pytest.param(*case, line, id=f"{name(*case)}-{line}", marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "ranks", "mesh", "line"), [*crossed()])
def test_ranks_compute_what_one_process_does(strategy: str, ranks: int, mesh: list[str], line: str, tmp_path: Path) -> None:
    parallel = [f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}"]
    run = finished(*LINES[line], *parallel, root=tmp_path / "runs", before=without_gradients)
    assert_close(run, once(*LINES[line], before=without_gradients))
    if "frozen" in line:
        assert_frozen(run)


def assert_frozen(ended: Ended) -> None:
    """The frozen parameters are in checkpoint and weights as they began, and have no optimizer state; the others do."""
    model = model_of(ended)
    begun = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    freeze_parameters(model, FROZEN)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    (last,) = (ended.directory / "checkpoints").iterdir()
    stored = {key for file in last.glob("*.safetensors") for key in safe_open(file, framework="pt").keys()}
    assert {key.removeprefix("model/") for key in stored if key.startswith("model/")} >= begun.keys()
    assert {key.split("/")[1] for key in stored if key.startswith("optimizer/")} == begun.keys() - frozen
    for parameter, tensor in ended.weights.items():
        if parameter in begun:
            assert torch.equal(tensor, begun[parameter]) == (parameter in frozen), parameter


# --- after a kill, and to the last bit


@pytest.mark.slow
def test_killed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    line = [*LINES["all"], "parallel=fsdp", "launch.nproc_per_node=2", "checkpoint.every=3"]
    assert_survives_a_kill(*line, at=8, root=tmp_path)


BITWISE = ["invariance=bitwise", *RUN, *SMALL, "precision=fp32", "model=cnn", "model.channels=[4,8,8]", "model.norm=batch",
           "trainer.freeze=[layers.0.*]", CLIP]  # fmt: skip


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    alone = finished(*BITWISE, root=tmp_path / "alone")
    for strategy, ranks in (("ddp", 3), ("zero", 2)):
        run = finished(*BITWISE, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", root=tmp_path / strategy)
        assert digest(run) == digest(alone)
        assert exact_rows(run) == exact_rows(alone)


# --- the numbers


def a_parameter(values: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_values_are_clipped_and_an_infinite_one_is_not_hidden() -> None:
    module = nn.Module()
    module.weight = a_parameter([0.5, -3.0, 2.0, math.inf, -math.inf])
    module.unused = nn.Parameter(torch.zeros(2))
    ClipValues(trainable(module, hidden=[]), max_value=2.0)(0)
    assert module.weight.grad.tolist()[:3] == [0.5, -2.0, 2.0]
    assert module.weight.grad[3:].isnan().all() and module.unused.grad is None


ASYNC = ["parallel=parameter-server", "parallel.mode=async", "launch.nproc_per_node=2"]  # each rank takes three steps


@pytest.mark.quick(1)
@pytest.mark.parametrize(("parallel", "expected"), [([], 0.003), (ASYNC, 0.006)], ids=["single", "async"])
def test_a_clipped_step_is_no_longer_than_its_rate(parallel: list[str], expected: float, tmp_path: Path) -> None:
    line = [*SMALL, "model=mlp", "model.dim=8", "optimizer=sgd", "optimizer.lr=1", "optimizer.momentum=0", "scheduler=constant",
            "precision=fp64", "trainer.max_epochs=null", "trainer.max_steps=3", "trainer.clip_grad_value=0.001", "trainer.eval_every=null", "checkpoint.every=null"]  # fmt: skip
    run = finished(*line, *parallel, root=tmp_path / "runs")
    begun = dict(model_of(run).named_parameters())
    farthest = max((run.weights[name] - begun[name].double()).abs().max().item() for name in begun)
    assert farthest == pytest.approx(expected, abs=1e-12)


# --- parameter groups


class Normed(nn.Module):
    """A norm whose weights are a matrix, and a bias that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.norm = nn.LayerNorm([3, 2])
        self.bias = nn.Parameter(torch.zeros(3, 2))
        self.hidden = nn.Linear(6, 6)


def test_norms_and_biases_of_any_shape_are_not_decayed_nor_orthogonalised() -> None:
    model = Normed()
    trained = trainable(model, hidden=["norm.weight", *hidden_matrices(model)])
    names = {id(item.parameter): item.name for item in trained}
    made = adamw(trained, lr=0.1, betas=[0.9, 0.99], eps=1e-8, weight_decay=0.3)
    decayed = [names[id(p)] for group in made.param_groups if group["weight_decay"] for p in group["params"]]
    assert decayed == ["first.weight", "last.weight", "hidden.weight"]
    made = muon(trained, lr=0.1, momentum=0.9, weight_decay=0.3, adamw_lr=0.1, adamw_betas=[0.9, 0.99], adamw_eps=1e-8)
    assert not {"norm.weight", "bias"} & {names[id(p)] for p in made.param_groups[0]["params"]}


def test_a_frozen_first_layer_leaves_the_hidden_matrices_as_they_are() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    hidden = hidden_matrices(model)
    freeze_parameters(model, ["0.*"])
    assert hidden_matrices(model) == hidden == ["1.weight", "2.weight"]


# --- what is refused


def test_a_tied_weight_is_frozen_by_either_name() -> None:
    for pattern in ("0.*", "2.*"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        model[2].weight = model[0].weight
        freeze_parameters(model, [pattern])
        assert [item.name for item in trainable(model, hidden=[])] == ["1.weight", "1.bias"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("first", "second"), [("head.*", ""), ("", "head.*")])
def test_a_run_may_freeze_other_parameters_than_the_one_it_begins_from(first: str, second: str, tmp_path: Path) -> None:
    line = [*SMALL, "model=mlp", "trainer.max_epochs=null"]
    begun = finished(*line, "trainer.max_steps=3", f"trainer.freeze=[{first}]", root=tmp_path / "first")
    line += ["trainer.max_steps=6", f"run.resume={begun.directory}", f"trainer.freeze=[{second}]"]
    ended = finished(*line, root=tmp_path / "second")
    assert "continuing from" in ended.output
    for parameter, tensor in ended.weights.items():
        assert torch.equal(tensor, begun.weights[parameter]) == (second != "" and parameter.startswith("head."))
