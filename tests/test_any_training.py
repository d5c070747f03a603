"""A user's own loss, step, data and metrics: under every strategy what one process computes, resumed to the same bits."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from framework.build import components
from framework.config.folders import options
from framework.data.order import Order
from tests.harness import Ended, assert_close, assert_computes_or_is_refused, assert_same_bits, checked, finished, once, refused
from tests.test_conformance import CONTEXTS, FOR_EXPERTS, MODELS, NOT_EQUAL, RUN, SMALL, layouts, name
from tests.test_resume import assert_survives_a_kill

STRATEGIES = [
    (strategy, *layouts(strategy)[0])
    for strategy in sorted(options("parallel"), key=lambda strategy: strategy != "context")
    if strategy not in ("single", *NOT_EQUAL, *FOR_EXPERTS)
]
IDS = [name(*strategy) for strategy in STRATEGIES]


# --- weights of targets

MASKED = [*RUN, *MODELS["gpt, tied"], "dataset._target_=tests.trainings.Masked"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "mesh"), STRATEGIES, ids=IDS)
def test_a_mean_over_tokens_is_that_of_one_process(strategy: str, ranks: int, mesh: list[str], tmp_path: Path) -> None:
    processes = [f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}", "rehearse=false"]
    assert_close(finished(*MASKED, *processes, root=tmp_path / "runs"), once(*MASKED))


def test_a_mean_over_tokens_is_that_over_the_whole_global_batch() -> None:
    first, *_, last = [row for row in once(*MASKED).rows if row["split"] == "train"]
    config = checked(*MASKED)
    dataset, model = components.dataset(config.dataset), components.model(config.model, seed=0).double()
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=14, seed=0, drop_last=False)
    arrays = [torch.from_numpy(array) for array in source.gather(order.batch(0)[1])]
    inputs, targets = dataset.transform(*arrays, keys=None)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())  # torch's mean over what is not ignored
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert first["grad_norm"] == pytest.approx(torch.stack([g.norm() for g in gradient]).norm().item(), rel=1e-10)
    assert last["loss"] != first["loss"]


# --- steps of a task's own

STEPS = {
    "Consistency": [], "Contrastive": ["checkpoint.monitor=val/loss"], "Distillation": [],
    "SelfDistillation": ["trainer.ema_decay=0.9"], "GradientPenalty": ["precision=fp64"],
}  # fmt: skip
WHOLE = "the task has its own step"
REFUSED = {
    **{(task, strategy): WHOLE for task in STEPS for strategy in ("pipeline", "ddp+pp", *CONTEXTS)},
    **{(task, "pp+fsdp+tp"): "the task has its own step" for task in STEPS},
    **{("GradientPenalty", strategy): "differentiates the model itself" for strategy in ("fsdp", "hsdp")},
    **{("GradientPenalty", strategy): "2 processes" for strategy in ("tensor", "fsdp+tp")},
}
CELLS = [(step, *strategy) for step in STEPS for strategy in STRATEGIES]
QUICK = [cell for cell in CELLS if cell[:2] in [("Consistency", "auto"), ("Contrastive", "fsdp"), ("Distillation", "zero"), ("SelfDistillation", "ddp"),
         ("GradientPenalty", "ddp"), ("Contrastive", "pipeline")]]  # fmt: skip


def own_step(task: str) -> list[str]:
    return [
        *RUN, *SMALL, "optimizer.eps=1e-4", "model._target_=tests.trainings.Net", f"task._target_=tests.trainings.{task}",
        *STEPS.get(task, []),
    ]  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize(("task", "strategy", "ranks", "mesh"), sorted(CELLS, key=lambda cell: cell not in QUICK))
def test_a_step_computes_what_it_does_on_one_process_or_is_refused(
    task: str, strategy: str, ranks: int, mesh: list[str], tmp_path: Path
) -> None:
    words = [f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}"]
    assert_computes_or_is_refused(own_step(task), words, REFUSED.get((task, strategy)), root=tmp_path / "runs")


OTHERS = [
    ("Contrastive", "parallel=ddp launch.nproc_per_node=3 rehearse=true"),
    ("SelfDistillation", "parallel=fsdp launch.nproc_per_node=3 rehearse=true"),
    # it differentiates the model itself, whose weights stay
    ("GradientPenalty", "parallel=hsdp launch.nproc_per_node=2 parallel.reshard_after_forward=false rehearse=true"),
    ("GradientPenalty", "parallel=zero launch.nproc_per_node=2"),
    ("InPieces", "parallel=fsdp launch.nproc_per_node=2"),  # it calls methods of the model
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "words"), OTHERS)
def test_a_step_computes_the_same_on_other_processes_too(task: str, words: str, tmp_path: Path) -> None:
    assert_close(finished(*own_step(task), *words.split(), root=tmp_path / "runs"), once(*own_step(task)))


KILLED = [("SelfDistillation", "ddp"), ("Contrastive", "fsdp")]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "strategy"), KILLED)
def test_killed_a_step_of_ones_own_ends_with_the_same_bits(task: str, strategy: str, tmp_path: Path) -> None:
    line = [*own_step(task), "checkpoint.every=2", f"parallel={strategy}", "launch.nproc_per_node=2"]
    assert_survives_a_kill(*line, at=3, root=tmp_path)


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_processes(tmp_path: Path) -> None:
    line = [*own_step("Consistency"), "invariance=bitwise"]
    runs = [
        finished(*line, *words, root=tmp_path / str(number))
        for number, words in enumerate([[], ["parallel=ddp", "launch.nproc_per_node=3"]])
    ]
    assert_same_bits(*runs)


FAULTS = {
    "mean": ("MeanLoss", [], "is the mean of its halves' losses"),
    "trained teacher": ("TrainedTeacher", [], "task: its parameter teacher.stem.1.weight would not be trained"),
    "no average": ("SelfDistillation", ["trainer.ema_decay=null"], "trainer.ema_decay: null, but the task's step needs"),
    "gather by micro-batches": ("Contrastive", ["invariance=bitwise"], "invariance: bitwise, which runs each micro-batch alone"),
    "no rows": ("NoRows", [], "step() returns a number, which has no rows"),
    "no loss": ("NoLoss", [], "step() returns outputs, and no loss"),
    "compression": (
        "Consistency",
        ["parallel=ddp", "parallel.compression=fp16", "launch.nproc_per_node=2"],
        "parallel.hook: extras.compression.hooks.half",
    ),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize(("task", "words", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_step_that_breaks_the_promise_is_refused_before_the_start(task: str, words: list[str], expected: str) -> None:
    assert expected in refused(*own_step(task), *words, "rehearse=true")


@pytest.mark.slow
def test_a_teacher_is_in_no_checkpoint_and_what_a_task_counts_in_a_buffer_is() -> None:
    assert not [name for name in tensors_of(once(*own_step("Distillation"))) if "teacher" in name]
    assert "task/centre" in tensors_of(once(*own_step("SelfDistillation")))


def tensors_of(run: Ended) -> list[str]:
    (checkpoint,) = (run.directory / "checkpoints").glob("step_*")
    names: list[str] = []
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names += opened.keys()
    return names
