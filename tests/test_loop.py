"""What the loop does and leaves: when it ends, what it keeps and measures, and switches that may not change it."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import read_state
from framework.runtime.torch_compiler import has_compiler
from framework.training.loop import Trainer
from tests.harness import Ended, after_each, around, assert_same_bits, command, finished, once, outputs_of, together
from tests.test_resume import after_step, preempt, preempted

# 3 steps an epoch, the last of 8 samples
TINY = [
    "dataset=synthetic", "dataset.num_train=40", "dataset.num_val=23", "dataset.num_test=17", "dataset.image_size=8",
    "model=mlp", "model.dim=8", "global_batch_size=16", "optimizer.lr=0.02", "scheduler=constant",
    "trainer.log_every=1",
]  # fmt: skip
BASE = [*TINY, "trainer.max_epochs=4", "trainer.eval_every=5", "checkpoint.every=4"]


def base() -> Ended:
    return once(*BASE, with_curves=True)


def rows_of(ended: Ended, split: str) -> list[dict[str, Any]]:
    return [row for row in ended.rows if row["split"] == split]


def steps_of(ended: Ended, split: str) -> list[int]:
    return [row["step"] for row in rows_of(ended, split)]


def kept(ended: Ended) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (ended.directory / "checkpoints").iterdir())


def planted_losses(losses: list[float]) -> Callable[[], None]:
    """Return what makes the evaluations of "val" report these losses, by their steps' order."""

    def record(original: Any, trainer: Trainer, row: dict[str, Any]) -> bool:
        if row["split"] == "val":
            row = row | {"loss": losses[row["step"] // 2 - 1]}  # evaluated every 2 steps
        return original(trainer, row)

    return lambda: around(Trainer, "record", record)


# --- when it ends


@pytest.mark.parametrize(("max_steps", "max_epochs", "last"), [("7", "4", 7), ("100", "2", 6)])
def test_the_shorter_of_max_steps_and_max_epochs_ends_the_run(
    max_steps: str, max_epochs: str, last: int, tmp_path: Path
) -> None:
    line = [*TINY, f"trainer.max_steps={max_steps}", f"trainer.max_epochs={max_epochs}", "trainer.eval_every=null"]
    run = finished(*line, root=tmp_path / "runs")
    assert steps_of(run, "train") == list(range(1, last + 1))
    assert steps_of(run, "val") == steps_of(run, "test") == [last]  # eval_every=null: only at the end
    assert run.summary["step"] == last
    assert run.summary["samples_seen"] == sum(16 if step % 3 else 8 for step in range(1, last + 1))
    assert [row["epoch"] for row in rows_of(run, "train")] == [step // 3 for step in range(last)]


STOPPING = [*TINY, "trainer.max_epochs=10", "trainer.eval_every=2", "trainer.early_stopping.patience=3"]
LOSSES = [2.0, 1.5, 1.6, 1.4, 1.4, 1.5, 1.4, 0.1, 0.1, 0.1]  # at steps 2, 4, ...: no better than at 8 until 14


@pytest.mark.slow
def test_early_stopping_and_the_best_checkpoints_go_on_through_a_resume_on_several_processes(tmp_path: Path) -> None:
    line = [*STOPPING, "checkpoint.keep_last=1", "checkpoint.keep_best=2", "checkpoint.every=null", "parallel=ddp",
            "launch.nproc_per_node=3"]  # fmt: skip
    stopped = command(*line, root=tmp_path / "runs", before=together(planted_losses(LOSSES), after_step(11, preempt)))
    assert stopped.code == 75 and kept(stopped) == [8, 10, 12]
    run = finished(*line, root=tmp_path / "runs", before=planted_losses(LOSSES))
    assert run.summary["step"] == 14 and run.summary["status"] == "finished"
    assert steps_of(run, "val") == [2, 4, 6, 8, 10, 12, 14] and steps_of(run, "test") == [14]
    assert kept(run) == [8, 10, 14]  # of three that are as good, the earliest two, and the last
    assert run.summary["metrics"]["val"]["best"]["step"] == 8
    assert read_state(run.directory / "checkpoints" / "step_00000014")["patience"] == {"best": 1.4, "num_bad": 3}


def test_early_stopping_asks_for_min_delta(tmp_path: Path) -> None:
    line = [*STOPPING, "trainer.early_stopping.min_delta=0.45"]
    run = finished(*line, root=tmp_path / "runs", before=planted_losses(LOSSES))
    assert run.summary["step"] == 10  # 2.0, 1.5 (better), 1.6, 1.4, 1.4


def test_a_run_stopped_by_its_training_loss_is_evaluated_at_its_last_step(tmp_path: Path) -> None:
    early = ["trainer.early_stopping.monitor=train/loss", "trainer.early_stopping.patience=1"]
    run = finished(*TINY, "trainer.max_epochs=20", "trainer.eval_every=null", *early, root=tmp_path / "runs")
    losses = [row["loss"] for row in rows_of(run, "train")]
    assert losses[-1] >= min(losses[:-1]) and len(losses) < 60
    assert steps_of(run, "val") == steps_of(run, "test") == [len(losses)]


# --- which checkpoints it keeps

EVERY_FOURTH = ["checkpoint.every=4", "checkpoint.keep_last=2", "checkpoint.keep_best=1"]
MAXIMUM = ["checkpoint.every=null", "checkpoint.keep_last=1", "checkpoint.keep_best=2", "checkpoint.mode=max"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "losses", "steps"),
    [
        (EVERY_FOURTH, [2.0, 1.9, 1.1, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2], [6, 16, 18]),  # the best is between two checkpoints
        (MAXIMUM, [2.0, 3.0, 1.0, 5.0, 1.0, 4.0, 1.0, 1.0, 1.0], [8, 12, 18]),  # 4.0, at step 12, is no new best but the second
    ],
    ids=["minimum", "maximum"],
)
def test_the_best_checkpoints_are_kept_beside_the_last(
    options: list[str], losses: list[float], steps: list[int], tmp_path: Path
) -> None:
    line = [*TINY, "trainer.max_epochs=6", "trainer.eval_every=2", *options]
    run = finished(*line, root=tmp_path / "runs", before=planted_losses(losses))
    assert kept(run) == steps
    best = run.directory / "checkpoints" / f"step_{steps[0]:08d}"
    assert read_state(best)["monitor"] == losses[steps[0] // 2 - 1]


@pytest.mark.slow
def test_the_best_by_a_training_metric_are_kept(tmp_path: Path) -> None:
    line = [*TINY, "checkpoint.monitor=train/loss", "checkpoint.keep_best=2", "checkpoint.every=null", "trainer.log_every=1"]
    run = finished(*line, root=tmp_path / "runs")
    losses = {row["loss"]: row["step"] for row in rows_of(run, "train")}
    best = {losses[loss] for loss in sorted(losses)[:2]}
    assert best <= {int(path.name.removeprefix("step_")) for path in run.directory.glob("checkpoints/step_*")}


# --- what it measures


def test_the_summary_has_every_key_of_the_contract() -> None:
    summary = base().summary
    assert {"status", "step", "samples_seen", "metrics", "world_size", "parallel", "parameters", "wall_s", "restarts",
            "error"} <= summary.keys()  # fmt: skip
    assert (summary["status"], summary["step"], summary["samples_seen"]) == ("finished", 12, 160)
    assert (summary["world_size"], summary["parallel"], summary["restarts"], summary["error"]) == (1, "single", 0, None)
    assert summary["parameters"] == sum(tensor.numel() for tensor in base().weights.values())
    assert 0 < summary["wall_s"] < 60


def test_rows_have_the_keys_of_the_contract() -> None:
    every = {"step", "split", "loss", "accuracy", "top5"}
    train = every | {"lr", "grad_norm", "epoch", "samples_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s",
                     "checkpoint_s", "data_share", "memory_gib", "goodput"}  # fmt: skip
    for row in base().rows:
        assert row.keys() == (train if row["split"] == "train" else every)


WAYS = {"ddp 3": ["parallel=ddp", "launch.nproc_per_node=3"], "fsdp 2": ["parallel=fsdp", "launch.nproc_per_node=2"]}


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
def test_evaluation_counts_every_sample_once(way: str, tmp_path: Path) -> None:
    run = finished(*BASE, *WAYS[way], "precision=fp64", root=tmp_path / "runs")
    for split in ("val", "test"):  # 23 = 16 + 7, 17 = 16 + 1: a rank or two with nothing
        expected, row = measured(run, split), rows_of(run, split)[-1]
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def measured(run: Ended, split: str) -> dict[str, float]:
    """Measure by hand, with torch alone, what a run's weights are worth."""
    logits, y = outputs_of(run, split)
    assert len(y) == {"val": 23, "test": 17}[split]
    loss = torch.nn.functional.cross_entropy(logits, y).item()
    return {"loss": loss, "accuracy": (logits.argmax(1) == y).double().mean().item()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", [[], ["parallel=fsdp", "launch.nproc_per_node=2"]], ids=["single", "fsdp 2"])
def test_the_averaged_weights_are_what_is_evaluated_and_exported(strategy: list[str], tmp_path: Path) -> None:
    run = finished(*BASE, *strategy, "trainer.ema_decay=0.8", root=tmp_path / "runs")
    last = rows_of(run, "val")[-1]
    assert last["loss"] == pytest.approx(measured(run, "val")["loss"], abs=1e-6)
    assert abs(last["loss"] - rows_of(base(), "val")[-1]["loss"]) > 1e-3  # and they are others than the last weights
    if not strategy:
        assert [row["loss"] for row in rows_of(run, "train")] == [row["loss"] for row in rows_of(base(), "train")]


# --- switches that may not change the numbers

COUPLED = [
    "dataset=synthetic", "dataset.num_train=40", "dataset.num_val=20", "dataset.num_test=20", "dataset.image_size=8",
    "model=cnn", "model.channels=[4,8]", "model.norm=batch", "model.dropout=0.2", "global_batch_size=16",
    "micro_batch_size=6", "trainer.max_epochs=3", "trainer.log_every=1", "trainer.eval_every=4", "checkpoint.every=null",
]  # fmt: skip
GPT = [
    "dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.num_train=40", "dataset.num_val=9",
    "dataset.num_test=9", "dataset.seq_len=6", "model=gpt", "model.dim=8", "model.num_layers=2", "model.num_heads=2",
    "model.dropout=0.2", "global_batch_size=8", "trainer.max_epochs=2", "trainer.log_every=1", "checkpoint.every=null",
]  # fmt: skip


@pytest.mark.slow  # tests/models/test_recomputation.py compares blocks
@pytest.mark.parametrize("line", [COUPLED, GPT], ids=["BatchNorm and dropout", "gpt"])
def test_recomputed_activations_give_the_same_bits(line: list[str], tmp_path: Path) -> None:
    plain = finished(*line, root=tmp_path / "plain")
    for which in ("true", "2", "operations"):
        recomputed = finished(*line, f"trainer.activation_checkpointing={which}", root=tmp_path / which)
        assert_same_bits(recomputed, plain)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
@pytest.mark.parametrize("how", [["true"], ["reduce-overhead", "null"], ["max-autotune", "true"]], ids=lambda how: how[0])
def test_a_compiled_model_is_compiled_once_for_all_runs_and_has_the_same_losses(how: list[str], tmp_path: Path) -> None:
    def count(trainer: Trainer) -> None:
        from torch._dynamo.utils import counters

        found = counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]
        (tmp_path / "graphs").write_text(json.dumps(found))

    # whole batches only: each other size is one more graph to compile
    line = [*TINY, "dataset.num_train=32", "dataset.num_val=16", "dataset.num_test=16", "trainer.max_epochs=4"]
    plain = finished(*line, root=tmp_path / "plain")
    keys = (f"trainer.{key}={value}" for key, value in zip(("compile", "compile_dynamic"), how))
    line, counted = [*line, *keys], lambda: after_each(Trainer, "fit", count)
    run = finished(*line, root=tmp_path / "runs", before=counted, timeout_s=300)
    num_graphs, num_hits = json.loads((tmp_path / "graphs").read_text())
    assert num_graphs > 0 and num_hits == 0
    assert run.weights.keys() == plain.weights.keys()
    for mine, other in zip(run.rows, plain.rows, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
    command(*line, "seed=1", root=tmp_path / "runs", before=counted)
    assert json.loads((tmp_path / "graphs").read_text()) == [num_graphs, num_graphs]


def test_without_a_compiler_a_warning_says_so_and_the_run_goes_on(tmp_path: Path) -> None:
    def hide_compiler() -> None:
        from torch._inductor import config

        config.cpp.cxx = (None, "/nonexistent")  # as CXX=/nonexistent in the environment does

    run = finished(*BASE, "trainer.compile=true", root=tmp_path / "runs", before=hide_compiler)
    assert run.output.count("WARNING: trainer.compile is off: no C++ compiler was found") == 1
    assert_same_bits(run, base())


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_a_precision_learns_what_fp32_does(precision: str, tmp_path: Path) -> None:
    run = finished(*BASE, f"precision={precision}", root=tmp_path / "runs")
    losses, reference = ([row["loss"] for row in rows_of(one, "train")] for one in (run, base()))
    assert losses[-1] < losses[0] - 0.3
    assert (losses == reference) == (precision == "tf32")  # on a CPU tf32 is fp32
    if precision == "bf16":  # fp16 skips a step or two at first
        assert losses == pytest.approx(reference, abs=0.05)
    assert {tensor.dtype for tensor in run.weights.values()} == {torch.float32}


# --- the files


def drawn(
    metrics: Path, target: Path, monkeypatch: pytest.MonkeyPatch, *, restarts: Sequence[int] = (), title: str = "t"
) -> Any:
    from matplotlib.figure import Figure

    from framework.runs.curves import draw_curves

    found: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (found.append(self), save(self, *args, **kwargs)))
    draw_curves(metrics, target, title=title, monitor="val/loss", mode="min", restarts=[*restarts])
    return found[0]


def test_a_picture_takes_any_text_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["$_per_$", "\\$x$", "精度", "loss"]
    rows = [{"step": step, "split": "val", **dict.fromkeys(names, 1e-9 * step)} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = drawn(tmp_path / "metrics.jsonl", tmp_path / "curves.png", monkeypatch, title="cost_$5_and_$6")
    shown = [text._preprocess_math(text.get_text()) for text in [*figure.texts, *(axes.title for axes in figure.axes)]]
    assert {text for text, is_formula in shown if not is_formula} == {"cost_$5_and_$6", *names}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", broken)
    run = finished(*BASE, root=tmp_path / "runs", with_curves=True)
    assert "curves.png could not be drawn: RuntimeError: no font" in run.output
    assert re.search(r"finished: model\.safetensors and metrics\.jsonl are in", run.output)
    assert not [*run.directory.glob("*curves.png*")]


def test_the_panels_are_the_losses_and_metrics_with_every_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(base().directory / "metrics.jsonl", tmp_path / "curves.png", monkeypatch, restarts=[4, 9])
    panels = {axes.get_title(): {line.get_label(): line for line in axes.lines} for axes in figure.axes}
    train = rows_of(base(), "train")
    for name in ("lr", "grad_norm", "samples_per_s"):
        line = panels.pop(name)["train"]
        assert list(zip(line.get_xdata(), line.get_ydata())) == [(row["step"], row[name]) for row in train if name in row]
    assert panels.keys() == {"loss", "accuracy", "top5"}
    for name, lines in panels.items():
        for split in ("train", "val", "test"):
            rows = rows_of(base(), split)
            assert list(lines[split].get_xdata()) == [row["step"] for row in rows]
            assert list(lines[split].get_ydata()) == [row[name] for row in rows]
        (best,) = (line for label, line in lines.items() if label.startswith("best "))
        step, value = (min if name == "loss" else max)(
            ((row["step"], row[name]) for row in rows_of(base(), "val")), key=lambda p: p[1]
        )
        assert (list(best.get_xdata()), list(best.get_ydata())) == ([step], [value])
    for axes in figure.axes:
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [4, 9]


@pytest.mark.slow
def test_the_summary_tells_at_which_steps_the_run_was_continued(tmp_path: Path) -> None:
    for step in (6, 9):
        stopped = command(*BASE, root=tmp_path / "runs", before=after_step(step, preempt))
        assert f"stopped after step {step}; the same command continues from the checkpoint of step {step}" in stopped.output
    run = finished(*BASE, root=tmp_path / "runs", with_curves=True)
    assert run.summary["continued_at"] == [6, 9] and run.summary["restarts"] == 2
    assert (run.directory / "curves.png").exists()


def test_resuming_from_the_path_of_a_run_or_of_one_checkpoint(tmp_path: Path) -> None:
    begun = preempted(*BASE, at=9, root=tmp_path / "first")
    assert kept(begun) == [8, 9]
    for path in (begun.directory, begun.directory / "checkpoints" / "step_00000008"):
        run = finished(*BASE, f"run.resume={path}", root=tmp_path / path.name)
        assert f"continuing from {begun.directory / 'checkpoints'}" in run.output
        assert_same_bits(run, base())
    assert kept(begun) == [8, 9]  # the other run is as it was


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("model.dim=9", r"0\.bias is torch\.float32 \[8\] in the checkpoint, torch\.float32 \[9\] in this run"),
        ("model.num_layers=1", r"layers\.1\.0\.bias is not in this run"),
        ("optimizer=sgd", r"framework\.optim\.optimizers\.adamw.*framework\.optim\.optimizers\.sgd"),
        ("trainer.ema_decay=0.5", r"average/head\.bias is not in the checkpoint"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(changed: str, told: str, tmp_path: Path) -> None:
    refused = command(*BASE, changed, f"run.resume={base().directory}", root=tmp_path / "runs")
    assert refused.code == 65, refused.output
    assert re.search(f"does not fit this run: .*{told}", refused.output), refused.output
    assert refused.summary["status"] == "failed" and "does not fit this run" in refused.summary["error"]
    assert "Traceback" not in refused.output and not (refused.directory / "metrics.jsonl").exists()


def test_the_same_command_of_a_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    shutil.copytree(base().root, tmp_path / "runs")
    directory = tmp_path / "runs" / base().directory.relative_to(base().root)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    again = command(*BASE, root=tmp_path / "runs")
    assert again.code == 0 and "finished already, at step 12" in again.output
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_a_learning_rate_that_never_rises_is_said(tmp_path: Path) -> None:
    run = finished(*BASE, "scheduler.warmup_steps=100000", root=tmp_path / "runs")
    assert run.output.count("the learning rate never exceeds") == 1 and "never exceeds" not in base().output
