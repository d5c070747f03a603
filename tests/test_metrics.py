"""What is measured is what docs/metrics.md says it is."""

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from framework.build import components
from framework.checkpoint.state import Progress
from framework.config.trainer import EarlyStopping
from framework.data.loader import Loader
from framework.engine.sums import as_sums, loss_in, means
from framework.modules import flops
from framework.runs.metrics_file import MACHINE
from framework.runtime.exits import Unfit
from framework.tasks.classification import Classification
from framework.tasks.language_modeling import LanguageModeling
from framework.training.loop import Trainer
from framework.training.machine import Machine
from framework.training.metrics import Metrics
from framework.training.speed import PARTS, Speed
from framework.training.tracking import Patience, Tracker
from tests.harness import before_each, checked, command, exact_rows, finished, together
from tests.test_loop import GPT, TINY, rows_of
from tests.test_resume import after_step, crash

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


# --- the last and the best


def test_a_metric_that_is_not_finite_is_never_the_best_and_no_improvement() -> None:
    settings = EarlyStopping(patience=2, monitor="val/late", mode="max", min_delta=0.0)
    patience = Patience(settings)
    tracker = Tracker(
        monitor="val/late", mode="max", patience=patience, derive=dict, metrics=Metrics({}, pairs=tuple, device=CPU, seed=0)
    )
    for step, (value, best, is_over) in enumerate([(None, None, False), (1.0, 1.0, False), (None, 1.0, False), (2.0, 2.0, False),
                                                   (None, 2.0, False), (None, 2.0, True)]):  # fmt: skip
        row = {"step": step, "split": "val", "loss": 1.0, "late": value}
        tracker.note(row)
        patience.note(row)
        assert (tracker.best, patience.is_exhausted, tracker.monitored(step=step)) == (best, is_over, value)
        assert tracker.splits["val"]["last"] == row
    with pytest.raises(Unfit, match=r"val/late is not measured \(one of val/loss\)"):
        tracker.note({"step": 9, "split": "val", "loss": 1.0})


# --- metrics of a task


@pytest.mark.parametrize(("num_classes", "top5"), [(8, 5 / 8), (3, 1.0)])
def test_top5_is_the_share_of_targets_among_the_five_largest(num_classes: int, top5: float) -> None:
    logits_BC = torch.arange(float(num_classes)).repeat(num_classes, 1)  # of eight, the five largest are classes 3 to 7
    measured = Classification(label_smoothing=0.0).metrics(logits_BC, torch.arange(num_classes))
    assert means(as_sums(measured), num_samples=num_classes) == {"top5": top5, "accuracy": 1 / num_classes}


def measured(task: Any, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    loss = task.loss(logits, targets), task.loss_weight(targets)
    return means(as_sums({"loss": loss, **task.metrics(logits, targets)}), num_samples=len(targets))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_labels_that_torch_ignores_are_in_no_mean(label_smoothing: float) -> None:
    task, labels = Classification(label_smoothing=label_smoothing), torch.tensor([2, -100, 7, -100, 1])
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, kept = measured(task, logits, labels), labels != -100
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels, label_smoothing=label_smoothing).item(), rel=1e-12)
    assert found["accuracy"] == (logits.argmax(1) == labels)[kept].double().mean()
    assert found["top5"] == (logits.topk(5).indices == labels[:, None]).any(1)[kept].double().mean()
    shares = F.one_hot(labels.clamp(min=0), 8).double()  # of mixed samples: all of them count
    expected = F.cross_entropy(logits, shares, label_smoothing=label_smoothing).item()
    assert measured(task, logits, shares)["loss"] == pytest.approx(expected, rel=1e-12)


def test_plain_numbers_are_sums_and_weights() -> None:
    found = as_sums({"loss": (torch.tensor(6.0), 4), "right": 3, "share": (1, 2.0)})
    assert means(found, num_samples=12) == {"loss": 1.5, "right": 0.25, "share": 0.5}
    assert {value.dtype for name, value in found.items() if name != "loss"} == {torch.float64}
    for wrong in (None, "3", [3.0], torch.ones(2)):
        with pytest.raises(Unfit, match="task: loss is .* number or a tensor of shape"):
            as_sums({"loss": (torch.tensor(6.0), wrong)})
    with pytest.raises(TypeError, match="loss is a float, but it must be a tensor"):
        loss_in({"loss": (6.0, 4)})


def test_a_label_for_each_pixel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 4, 4\]"):
        Classification(label_smoothing=0.0).loss(torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long))


@pytest.mark.parametrize("bytes_per_token", [None, 4.0])
def test_perplexity_and_bits_follow_from_the_loss(bytes_per_token: float | None) -> None:
    task = LanguageModeling(bytes_per_token=bytes_per_token)
    logits_BTV, targets_BT = torch.zeros(3, 5, 16), torch.zeros(3, 5, dtype=torch.long)  # uniform over 16 tokens
    expected = {"perplexity": 16.0, "bits_per_token": 4.0} | ({} if bytes_per_token is None else {"bits_per_byte": 1.0})
    assert task.derived(measured(task, logits_BTV, targets_BT)) == pytest.approx(expected, abs=1e-4)


def test_tokens_whose_target_is_ignored_do_not_count() -> None:
    task = LanguageModeling(bytes_per_token=None)
    logits_BTV, targets_BT = torch.randn(2, 5, 16), torch.randint(16, (2, 5))
    targets_BT[0, 1:] = -100
    counted = logits_BTV[targets_BT != -100], targets_BT[targets_BT != -100]
    found = measured(task, logits_BTV, targets_BT)
    assert found["loss"] == pytest.approx(F.cross_entropy(*counted).item())
    assert found["accuracy"] == pytest.approx((counted[0].argmax(-1) == counted[1]).double().mean().item())


def test_text_knows_that_a_token_is_a_byte(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_text("print('to be or not to be')\n" * 60)
    line = ["dataset=text", f"dataset.root={tmp_path}/text", "dataset.seq_len=8", "model=gpt", "model.dim=8",
            "model.num_layers=1", "model.num_heads=1", "trainer.max_steps=2", "trainer.log_every=1"]  # fmt: skip
    run = finished(*line, root=tmp_path / "runs")
    for row in run.rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=1e-5)


# --- speed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def spend(speed: Speed, clock: SimpleNamespace, **seconds: float) -> None:
    for phase, spent in seconds.items():
        speed.enter(phase)
        clock.now += spent


STEP = {"data": 1.0, "forward_backward": 2.0, "optimizer": 0.5, "loop": 0.25}


def test_a_row_splits_the_time_of_its_steps(clock: SimpleNamespace) -> None:
    speed = Speed(torch.device("cpu"), tokens_per_sample=7, flops_per_sample=30.0, peak_flops=120.0)
    spend(speed, clock, start=50.0)
    speed.begin(step=4, samples_seen=40)
    spend(speed, clock, **STEP)
    spend(speed, clock, evaluation=60.0, checkpoint=0.5, **STEP)
    row = speed.row(step=6, samples_seen=56)
    assert row == {
        "step_s": 4.0, "data_s": 1.0, "forward_backward_s": 2.0, "optimizer_s": 0.5, "checkpoint_s": 0.25,
        "samples_per_s": 2.0, "tokens_per_s": 14.0, "mfu": 0.5, "data_share": 0.25,
    }  # fmt: skip
    spend(speed, clock, loop=0.5)
    assert speed.step_s(step=6) == 0.0, "no step since the row"
    spend(speed, clock, **STEP)
    assert speed.step_s(step=7) == 4.25
    assert speed.row(step=7, samples_seen=66)["step_s"] == 4.25  # of what came since


def test_a_tick_tells_the_time_and_the_part_of_it_in_steps(clock: SimpleNamespace) -> None:
    speed = Speed(torch.device("cpu"))
    spend(speed, clock, start=5.0, evaluation=6.0, checkpoint=7.0, **STEP)
    progress = Progress(step=0, samples_seen=0, wall_s=0.0)
    for _ in range(2):  # the second adds nothing
        speed.tick(progress)
        assert (progress.wall_s, progress.train_s) == (21.75, 3.75)


def test_without_tokens_or_a_known_peak_there_is_no_such_number() -> None:
    speed = Speed(torch.device("cpu"), flops_per_sample=30.0)
    names = {"samples_per_s", "step_s", "data_share", *(f"{part}_s" for part in PARTS)}
    assert speed.row(step=1, samples_seen=1).keys() == names


def slow(part: str, *, seconds: float) -> Callable[[], None]:
    """Return what makes a part of every step slow."""
    places = {
        "data": (Loader, "train_step"), "forward_backward": (Classification, "loss"), "optimizer": (torch.optim.AdamW, "step"),
        "checkpoint": (Trainer, "commit"),
    }  # fmt: skip
    return lambda: before_each(*places[part], lambda *_, **__: time.sleep(seconds))


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", PARTS)
def test_what_is_slow_shows_in_its_part_of_the_step(part: str, tmp_path: Path) -> None:
    line = [*TINY, "trainer.max_steps=4", "trainer.eval_every=null", "checkpoint.every=1"]
    run = finished(*line, root=tmp_path / "runs", before=slow(part, seconds=0.1))
    for row in rows_of(run, "train")[1:]:
        assert row[f"{part}_s"] >= 0.1
        assert sum(row[f"{name}_s"] for name in PARTS) <= row["step_s"] * (1 + 1e-9)
        assert row["samples_per_s"] * row["step_s"] == pytest.approx(8 if row["step"] == 3 else 16)


@pytest.mark.slow
def test_goodput_counts_what_a_kill_has_cost(tmp_path: Path) -> None:
    line = [*TINY, "trainer.max_steps=9", "trainer.eval_every=null", "checkpoint.every=4"]
    plant = together(slow("optimizer", seconds=0.1), after_step(7, crash))
    killed = command(*line, root=tmp_path / "runs", before=plant).summary
    ended = finished(*line, root=tmp_path / "runs", before=slow("optimizer", seconds=0.1))
    summary = ended.summary
    assert summary["began"] == killed["began"]
    assert summary["train_s"] >= 0.9  # nine steps count ...
    assert summary["goodput"] <= summary["train_s"] / (summary["train_s"] + 0.3)  # ... and three were lost
    assert 0 < rows_of(ended, "train")[-1]["goodput"] <= 1


@pytest.mark.slow
def test_the_memory_of_each_rank_is_in_the_summary_and_the_most_in_the_rows(tmp_path: Path) -> None:
    def plant() -> None:  # what is written is resident
        before_each(Trainer, "fit", lambda trainer: bytearray(300 << 20) if trainer.world.rank == 1 else None)

    line = [*TINY, "trainer.max_steps=2", "parallel=ddp", "launch.nproc_per_node=2"]
    run = finished(*line, root=tmp_path / "runs", before=plant)
    first, second = run.summary["memory_gib"]
    assert second - first > 0.2
    assert rows_of(run, "train")[-1]["memory_gib"] == pytest.approx(second, abs=0.05)


# --- floating-point operations


def test_a_linear_layer_needs_two_operations_a_weight_and_pass() -> None:
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5)), torch.empty(2, 10)
    first, second = 2 * 10 * 20, 2 * 20 * 5
    assert flops.flops_per_sample(model, batch) == 2 * first + 3 * second  # no gradient of the data


def model_and_batch(*line: str) -> tuple[Any, torch.Tensor]:
    """Return the model of a line, without numbers, and a batch for it."""
    config = checked(*line)
    with torch.device("meta"):
        model = components.model(config.model, seed=config.seed)
    return model, components.example(components.dataset(config.dataset).info)


def test_a_gpt_needs_six_operations_a_weight_and_token_and_its_attention() -> None:
    model, batch = model_and_batch(*GPT, "model.dropout=0", "dataset.seq_len=32", "model.dim=64")
    dim, seq_len, num_layers = 64, 32, len(model.layers)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    head = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices -= sum(weight.numel() for weight in embeddings if id(weight) not in head)
    expected = 6 * matrices * seq_len + 12 * num_layers * dim * seq_len**2
    assert flops.flops_per_sample(model, batch) == pytest.approx(expected, rel=0.1)


def test_a_model_that_asks_for_numbers_has_no_count() -> None:
    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with torch.device("meta"):
        assert flops.flops_per_sample(Asks(3, 3), torch.empty(2, 3)) is None


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989), ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156), ("Tesla V100-SXM2-32GB", "bf16", None), ("NVIDIA GeForce GT 710", "fp32", None),
    ],
)  # fmt: skip
def test_the_peak_is_the_data_sheets_where_it_is_known(name: str, precision: str, tflops: float | None) -> None:
    assert flops.peak_of(name, precision=precision) == (tflops and tflops * 1e12)


def test_mfu_is_the_share_of_the_peak_of_all_devices(tmp_path: Path) -> None:
    def plant() -> None:
        flops.peak_flops = lambda device, *, precision: 1e9

    line = [*TINY, "trainer.max_steps=2", "parallel=ddp", "launch.nproc_per_node=2"]
    run = finished(*line, root=tmp_path / "runs", before=plant)
    needed = flops.flops_per_sample(*model_and_batch(*line))
    for row in rows_of(run, "train"):
        assert row["mfu"] == pytest.approx(row["samples_per_s"] * needed / 2e9)


# --- the page


def test_every_number_of_a_row_is_in_the_documentation(tmp_path: Path) -> None:
    run = finished(*GPT, "model.dropout=0", "precision=fp64", "task.bytes_per_token=3.5", root=tmp_path / "runs")
    names = {name for row in run.rows for name in row} | set(MACHINE) | {"top5", "mae"}
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert names - documented == {"split"}
    assert run.summary["memory_gib"]


@pytest.mark.slow
def test_the_use_of_the_machine_is_in_the_training_rows_if_it_is_asked_for(tmp_path: Path) -> None:
    line = [*TINY, "parallel=ddp", "launch.nproc_per_node=2"]
    plain = finished(*line, root=tmp_path / "plain")
    run = finished(*line, "trainer.log_machine=true", root=tmp_path / "runs")
    assert run.directory.name == plain.directory.name and exact_rows(run) == exact_rows(plain)
    for before, row in zip(plain.rows, run.rows, strict=True):
        is_train = row["split"] == "train"
        assert row.keys() - before.keys() == ({"cpu_cores", "resident_gib", "disk_free_gib"} if is_train else set())
        assert not is_train or (0 <= row["cpu_cores"] < 64 and 0.1 < row["resident_gib"] < 100 and row["disk_free_gib"] > 0)


def test_the_use_of_gpus_is_a_mean_and_their_memory_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40)
    world: Any = SimpleNamespace(
        device=torch.device("cuda", 1), world_size=2, agreement=SimpleNamespace(sum=lambda values: 2 * values)
    )
    machine = Machine(tmp_path, world=world)
    for found in (None, object()):  # without nvidia-ml-py, and with it
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        row = machine.columns()
        assert row["gpu_memory_gib"] == 140 and row.get("gpu_use") == (0.4 if found else None)
