"""Optimizers, schedules, loss scale, averaged weights: the right numbers, and the same under every strategy."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from framework.checkpoint.manifest import read_state
from framework.config.folders import options
from framework.config.targets import component
from framework.modules.structure import in_eval_mode
from framework.optim import optimizers, schedules
from framework.optim.optimizers import Muon, Trainable, adamw, hidden_matrices, muon, orthogonalised, sgd, trainable
from framework.optim.precision import PRECISIONS, LossScale, with_bf16_states
from framework.optim.update import AveragedWeights, Update
from framework.runtime.exits import Diverged
from framework.training.loop import Trainer
from tests.harness import (
    Counting,
    Ended,
    around,
    assert_close,
    assert_same_bits,
    before_each,
    command,
    files_below,
    finished,
    once,
)
from tests.test_resume import after_step, preempt, preempted

# --- optimizers under strategies, in float64; matrices of odd sizes, so that no shard is even

RUN = [
    "dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.num_train=60", "dataset.num_val=9",
    "dataset.num_test=9", "dataset.seq_len=7", "dataset.vocab_size=13", "model=gpt", "model.dim=12",
    "model.num_layers=2", "model.num_heads=2", "global_batch_size=8", "micro_batch_size=3", "trainer.max_epochs=null",
    "trainer.max_steps=12", "trainer.log_every=1", "trainer.eval_every=null", "checkpoint.every=null",
    "precision=fp64", "scheduler=constant",
]  # fmt: skip
OPTIMIZERS = {
    "adam": ["optimizer=adam"],
    "adamw": ["optimizer=adamw", "optimizer.weight_decay=0.1"],
    "muon": ["optimizer=muon", "optimizer.weight_decay=0.1"],
    "sgd": ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"],
}
SHARDED = ["parallel=fsdp", "launch.nproc_per_node=2"]


def test_every_optimizer_is_tested_here() -> None:
    assert sorted(OPTIMIZERS) == sorted(options("optimizer"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "strategy", "ranks"),
    [("muon", "fsdp", 3), ("muon", "ddp", 2), ("sgd", "fsdp", 2), ("adam", "ddp", 3), ("adamw", "fsdp", 3)],
)
def test_an_optimizer_takes_the_same_steps_on_shards(optimizer: str, strategy: str, ranks: int, tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS[optimizer], f"parallel={strategy}", f"launch.nproc_per_node={ranks}"]
    assert_close(finished(*line, root=tmp_path / "runs"), once(*RUN, *OPTIMIZERS[optimizer]))


@pytest.mark.slow
def test_an_optimizer_continues_from_shards_on_one_process(tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS["muon"]]
    begun = preempted(*line, *SHARDED, at=5, root=tmp_path / "first")
    assert_close(finished(*line, f"run.resume={begun.directory}", root=tmp_path / "second"), once(*RUN, *OPTIMIZERS["muon"]))


def test_states_in_bf16_are_the_same_on_shards_and_after_a_stop(tmp_path: Path) -> None:
    line = [*RUN, *OPTIMIZERS["muon"], "precision.optimizer_state=bf16"]
    begun = preempted(*line, *SHARDED, at=5, root=tmp_path / "runs")
    stored = {name: value for file in files_below(begun.directory, "shard*") for name, value in load_file(file).items()}
    states = [value for name, value in stored.items() if name.startswith("optimizer/") and value.ndim]
    assert {value.dtype for value in states} == {torch.bfloat16}
    assert_close(finished(*line, root=tmp_path / "runs"), once(*line))


def adagrad(trained: list[Trainable]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([item.parameter for item in trained], lr=0.1)


@pytest.mark.parametrize("name", ["adamw", "muon", "adagrad"])
def test_between_steps_states_are_in_bf16_and_a_step_computes_in_the_type_of_the_parameters(name: str) -> None:
    of_adamw = partial(adamw, lr=0.1, betas=[0.9, 0.99], eps=1e-8, weight_decay=0.1)
    build: Any = {"adamw": of_adamw, "muon": made_muon, "adagrad": adagrad}[name]
    ours, theirs = model(), model()
    theirs.load_state_dict(ours.state_dict())
    held, plain = with_bf16_states(build)(trained(ours)), build(trained(theirs))
    for _ in range(3):
        for one, two in zip(ours.parameters(), theirs.parameters()):
            one.grad, two.grad = (gradient := torch.randn(one.shape)), gradient.clone()
        held.step()
        plain.step()
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, two)
            for name, value in plain.state[two].items():
                rounded = value.bfloat16() if value.ndim else value
                assert held.state[one][name].dtype == rounded.dtype and torch.equal(held.state[one][name], rounded)
                value.copy_(rounded)


# --- parameter groups


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5), nn.LayerNorm(5),
                         nn.Linear(5, 6), nn.Linear(6, 3))  # fmt: skip


def trained(module: nn.Module) -> list[Trainable]:
    return trainable(module, hidden=hidden_matrices(module))


made_muon = partial(muon, lr=0.02, momentum=0.9, weight_decay=0.1, adamw_lr=1e-3, adamw_betas=[0.9, 0.95], adamw_eps=1e-8)


def names_by_decay(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[float, list[str]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_decay: dict[float, list[str]] = {}
    for group in optimizer.param_groups:
        by_decay.setdefault(group["weight_decay"], []).extend(names[id(p)] for p in group["params"])
    return by_decay


@pytest.mark.parametrize(
    "make",
    [partial(adamw, lr=0.1, betas=[0.9, 0.99], eps=1e-8), partial(sgd, lr=0.1, momentum=0.9, nesterov=False)],
    ids=["adamw", "sgd"],
)
def test_vectors_are_not_decayed(make: Callable[..., torch.optim.Optimizer]) -> None:
    module = model()
    by_decay = names_by_decay(make(trained(module), weight_decay=0.3), module)
    assert by_decay[0.3] == ["0.weight", "3.weight", "5.weight", "6.weight"]
    assert by_decay[0.0] == ["0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias", "5.bias", "6.bias"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_takes_torchs_steps_in_one_pass(nesterov: bool) -> None:
    ours, theirs, counting = model(), model(), Counting()
    theirs.load_state_dict(ours.state_dict())
    optimizer = sgd(trained(ours), lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.0)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        for one, two in zip(ours.parameters(), theirs.parameters()):
            one.grad = two.grad = torch.randn(one.shape)
        with counting:
            optimizer.step()
        other.step()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert counting.calls["_fused_sgd_"] == 4 and not counting.calls["add_"]


def test_muon_orthogonalises_matrices_between_the_first_and_the_last() -> None:
    module = model()
    made = made_muon(trained(module))
    by_decay = names_by_decay(made, module)
    assert by_decay[0.1] == ["3.weight", "5.weight"]
    assert {group["kind"]: group["lr"] for group in made.param_groups} == {"muon": 0.02, "adamw": 1e-3}


def test_one_muon_step_is_the_formula() -> None:
    torch.manual_seed(0)
    first, hidden, last = (nn.Parameter(torch.randn(6, 4, dtype=torch.float64)) for _ in range(3))
    before, grad = hidden.detach().clone(), torch.randn(6, 4, dtype=torch.float64)
    made = made_muon(
        [Trainable("a", first, False, True), Trainable("b", hidden, True, True), Trainable("c", last, False, True)]
    )
    hidden.grad = grad.clone()
    made.step()
    update = (before * (1 - 0.02 * 0.1) - hidden.detach()) / (0.02 * 0.2 * math.sqrt(6))
    left, singular, right = torch.linalg.svd(update, full_matrices=False)
    assert singular.min() > 0.6 and singular.max() < 1.3  # "nearly orthogonal": Jordan et al. 2024
    left_grad, _, right_grad = torch.linalg.svd(grad, full_matrices=False)
    polar, polar_of_grad = left @ right, left_grad @ right_grad
    assert torch.allclose(polar, polar_of_grad, atol=1e-10)


def test_our_adamw_inside_muon_is_torchs() -> None:
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(torch.arange(5, dtype=torch.float64)) for _ in range(2))
    ours = made_muon([Trainable("a", mine, False, False)], adamw_lr=1e-2)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(5):
        mine.grad = torch.randn(5, dtype=torch.float64)
        theirs.grad = mine.grad.clone()
        ours.step()
        reference.step()
    assert torch.allclose(mine, theirs, atol=1e-14, rtol=0)


# --- the loss scale of fp16


def finite(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value)


def test_the_loss_scale_halves_after_an_overflow_and_doubles_after_a_quiet_spell() -> None:
    scale = LossScale(8.0, growth_interval=3)
    values = []
    for norm in (1.0, 2.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0):
        assert scale.accepts(finite(norm)) == math.isfinite(norm)
        values.append(scale.value)
    assert values == [8, 8, 4, 4, 4, 8, 4, 4, 4, 8]
    assert scale.num_skipped == 2


def test_a_gradient_that_overflows_without_a_scale_is_a_divergence() -> None:
    scale = LossScale(2.0, growth_interval=3)
    assert not scale.accepts(finite(math.inf)) and scale.value == 1.0
    with pytest.raises(Diverged):
        scale.accepts(finite(math.inf))


def test_gradients_are_unscaled_exactly() -> None:
    scale = LossScale(2.0**16, growth_interval=5)
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, 3.0, -7.0]) * 2.0**16
    scale.unscale([parameter, nn.Parameter(torch.zeros(1))])
    assert parameter.grad.tolist() == [1.0, 3.0, -7.0]


FP16 = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=20", "dataset.num_test=20", "dataset.image_size=8",
    "model=mlp", "model.dim=16", "global_batch_size=16", "trainer.max_epochs=null", "trainer.max_steps=24",
    "trainer.log_every=1", "trainer.eval_every=null", "checkpoint.every=null", "precision=fp16",
]  # fmt: skip


def scale_from(initial: float, *, growth_interval: int, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def plant() -> None:
        scale = functools.partial(LossScale, initial, growth_interval=growth_interval)
        PRECISIONS["fp16"] = dataclasses.replace(PRECISIONS["fp16"], loss_scale=scale)
        then()

    return plant


def note_steps(file: Path) -> Callable[[], None]:
    """Return what makes a command write, for each step, the loss scale before it and whether any parameter changed."""

    def train_step(original: Any, trainer: Trainer, *args: object, **kwargs: object) -> object:
        scale, before = trainer.update.loss_scale.value, [p.detach().clone() for p in trainer.parameters]
        result = original(trainer, *args, **kwargs)
        moved = any(not torch.equal(p, q) for p, q in zip(trainer.parameters, before))
        with open(file, "a") as out:
            out.write(json.dumps([scale, moved]) + "\n")
        return result

    return lambda: around(Trainer, "train_step", train_step)


def loss_scale_of(ended: Ended) -> dict[str, float]:
    checkpoint = max((ended.directory / "checkpoints").iterdir())
    return read_state(checkpoint)["loss_scale"]


def test_fp16_skips_the_steps_that_overflow_and_learns_after_them(tmp_path: Path) -> None:
    plant = scale_from(2.0**23, growth_interval=2000, then=note_steps(tmp_path / "steps"))
    run = finished(*FP16, "optimizer.lr=0.01", root=tmp_path / "runs", before=plant)
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    rows = [row for row in run.rows if row["split"] == "train"]
    skipped = [not moved for _, moved in steps]
    num_skipped = sum(skipped)
    assert skipped[0] and not all(skipped[-3:]) and num_skipped < 12
    assert [scale for scale, _ in steps] == [2.0 ** (23 - sum(skipped[:i])) for i in range(24)]
    assert [row["grad_norm"] is None for row in rows] == skipped
    assert loss_scale_of(run)["num_skipped"] == num_skipped
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert "Infinity" not in (run.directory / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_fp16_skips_the_same_steps_on_two_processes(tmp_path: Path) -> None:
    """A strategy that averages must not compute with losses that are larger by the number of processes."""
    plant, line = scale_from(2.0**20, growth_interval=3), [*FP16, "micro_batch_size=8"]
    one = finished(*line, root=tmp_path / "one", before=plant)
    two = finished(*line, "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "two", before=plant)
    assert loss_scale_of(two) == loss_scale_of(one) and loss_scale_of(one)["num_skipped"] > 2
    skipped = [[row["grad_norm"] is None for row in run.rows if row["split"] == "train"] for run in (one, two)]
    assert skipped[0] == skipped[1]


@pytest.mark.slow
def test_the_loss_scale_survives_a_resume(tmp_path: Path) -> None:
    plant = scale_from(2.0**12, growth_interval=5)
    whole = finished(*FP16, root=tmp_path / "whole", before=plant)
    assert loss_scale_of(whole) == {"value": 2.0**16, "num_quiet_steps": 4, "num_skipped": 0}  # 24 = 4 x 5 + 4
    stopped = scale_from(2.0**12, growth_interval=5, then=after_step(13, preempt))
    assert command(*FP16, root=tmp_path / "cut", before=stopped).code == 75
    cut = finished(*FP16, root=tmp_path / "cut", before=plant)
    assert loss_scale_of(cut) == loss_scale_of(whole)
    assert_same_bits(cut, whole)


# --- the moving average


def test_averaged_weights_are_the_closed_form() -> None:
    torch.manual_seed(0)
    weights = torch.randn(8, 3, dtype=torch.float64)  # w_0 and seven steps
    parameter = nn.Parameter(weights[0].clone())
    average = AveragedWeights([Trainable("w", parameter, False, True)], share=lambda step: 0.2)
    for step in range(1, 8):
        parameter.data.copy_(weights[step])
        average.update(0)
        share = [0.8**step, *(0.2 * 0.8 ** (step - k) for k in range(1, step + 1))]
        expected = sum(a * w for a, w in zip(share, weights))
        assert torch.allclose(average.tensors["w"], expected, atol=1e-14, rtol=0)


def test_an_error_in_an_evaluation_leaves_the_weights_and_the_mode_of_training() -> None:
    model = nn.Linear(2, 1, bias=False).train()
    nn.init.ones_(model.weight)
    average = AveragedWeights([Trainable("w", model.weight, False, True)], share=lambda step: 0.5)
    nn.init.constant_(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    update = Update(optimizer, seed=0, peak_lr=0.5, schedule=schedules.Schedule(lambda step: 1.0), loss_scale=LossScale(),
                    changes=[], average=average)  # fmt: skip
    with pytest.raises(ValueError, match="a metric"), update.averaged(), in_eval_mode(model):
        assert model.weight.tolist() == [[1.0, 1.0]] and not model.training
        raise ValueError("a metric")
    assert model.weight.tolist() == [[3.0, 3.0]] and average.tensors["w"].tolist() == [[1.0, 1.0]] and model.training


# --- schedules: the share of the peak at steps 0, 1, ... of 10

VALUES = {
    "constant": ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    "constant, no warm-up": ({"warmup_steps": 0}, [1] * 10),
    "range_test": ({"start_ratio": 1e-9}, [10.0**-power for power in range(9, -1, -1)]),
    "cosine": ({"warmup_steps": 2, "min_lr_ratio": 0.2}, [0.5, 1.0, *(0.2 + 0.4 * (1 + math.cos(math.pi * k / 8)) for k in range(8))]),
    "cosine, no warm-up": ({"warmup_steps": 0, "min_lr_ratio": 0.0}, [0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]),
    "cosine, warm-up longer than the run": ({"warmup_steps": 20, "min_lr_ratio": 0.0}, [(k + 1) / 20 for k in range(10)]),
    "cosine, warm-up all of the run": ({"warmup_steps": 10, "min_lr_ratio": 0.0}, [(k + 1) / 10 for k in range(10)]),
    "step": ({"warmup_steps": 2, "milestones": [4, 7], "gamma": 0.1}, [0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]),
    "step, none": ({"warmup_steps": 0, "milestones": [], "gamma": 0.1}, [1] * 10),
    "wsd": ({"warmup_steps": 2, "decay_steps": 4, "min_lr_ratio": 0.0}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
    "wsd, no decay": ({"warmup_steps": 0, "decay_steps": 0, "min_lr_ratio": 0.0}, [1] * 10),
    "wsd, floor": ({"warmup_steps": 0, "decay_steps": 10, "min_lr_ratio": 0.5}, [1 - k / 20 for k in range(10)]),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_schedule_has_these_values(case: str) -> None:
    arguments, expected = VALUES[case]
    schedule = getattr(schedules, case.partition(",")[0])
    assert [schedule(step, 10, **arguments) for step in range(10)] == pytest.approx(expected, abs=1e-12)


def test_every_schedule_is_tested_here_and_never_leaves_0_to_1() -> None:
    assert {case.partition(",")[0] for case in VALUES} == set(options("scheduler"))
    for name, (arguments, _) in VALUES.items():
        schedule = component({"_target_": f"framework.optim.schedules.{name.partition(',')[0]}", **arguments})
        for total in (1, 2, 10, 1000):
            assert all(0 <= schedule(step, total) <= 1 for step in range(total)), (name, total)


def test_the_rate_of_every_step_is_the_schedules(tmp_path: Path) -> None:
    line = [arg for arg in FP16 if not arg.startswith("precision")]
    line += ["scheduler=wsd", "scheduler.warmup_steps=4", "scheduler.decay_steps=6"]
    line += ["optimizer=sgd", "optimizer.lr=0.5"]
    preempted(*line, at=11, root=tmp_path / "runs")
    rows = [row for row in finished(*line, root=tmp_path / "runs").rows if row["split"] == "train"]
    expected = [0.5 * schedules.wsd(k, 24, warmup_steps=4, decay_steps=6, min_lr_ratio=0.0) for k in range(24)]
    assert [row["lr"] for row in rows] == pytest.approx(expected, abs=1e-15)


# --- Muon's work, dealt out


def moves(
    rank: int, num_ranks: int, boxes: dict[int, Tensor], iteration: Literal["bf16"] | None = None
) -> tuple[int, list[Tensor]]:
    """Return how many matrices a rank has iterated on in a step, and the parameters after it; the others' are in `boxes`."""
    draw, count = torch.Generator().manual_seed(1), 0
    parameters = [nn.Parameter(torch.randn(5, 3 + index, generator=draw)) for index in range(5)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    made = made_muon([Trainable(str(n), parameter, True, True) for n, parameter in enumerate(parameters)], iteration=iteration)
    assert isinstance(made, Muon)
    seen = 0

    def counted(matrix: Tensor, **options: Any) -> Tensor:
        nonlocal count
        count += 1
        return orthogonalised(matrix, **options)

    def exchange(matrices: list[Tensor]) -> None:
        nonlocal seen
        for index, matrix in enumerate(matrices):
            if index == rank:
                boxes[seen + index] = matrix.clone()
            matrix.copy_(boxes.get(seen + index, torch.zeros_like(matrix)))
        seen += len(matrices)

    if num_ranks > 1:
        made.deal(exchange, rank=rank, num_ranks=num_ranks)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizers, "orthogonalised", counted)
        made.step()
    return count, [parameter.detach() for parameter in parameters]


def test_each_rank_iterates_on_its_share_of_the_matrices() -> None:
    count, expected = moves(0, 1, {})
    assert count == 5
    boxes: dict[int, Tensor] = {}
    counts = [moves(rank, 2, boxes)[0] for rank in range(2)]
    assert counts == [3, 2] and sorted(boxes) == [0, 1, 2, 3, 4]
    for rank in range(2):
        assert all(map(torch.equal, moves(rank, 2, boxes)[1], expected))


def test_a_matrix_may_be_orthogonalised_in_sixteen_bits() -> None:
    plain, short = moves(0, 1, {})[1], moves(0, 1, {}, "bf16")[1]
    for one, other in zip(plain, short):
        assert one.dtype == other.dtype and not torch.equal(one, other)
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0)


@pytest.mark.slow
def test_what_a_strategy_builds_deals_the_work_out(tmp_path: Path) -> None:
    def note_shares() -> None:
        before_each(optimizers, "orthogonalised", note)

    def note(*_: Any, **__: Any) -> None:
        with (tmp_path / f"rank_{os.environ['RANK']}").open("a") as file:
            file.write("x")

    for strategy in ("ddp", "fsdp"):
        for path in tmp_path.glob("rank_*"):
            path.unlink()
        line = [*RUN, *OPTIMIZERS["muon"], f"parallel={strategy}", "launch.nproc_per_node=2", "rehearse=false"]
        finished(*line, root=tmp_path / strategy, before=note_shares)
        shares = [len(path.read_text()) for path in sorted(tmp_path.glob("rank_*"))]
        assert shares == [72, 72]  # of 12 matrices in each of 12 steps
