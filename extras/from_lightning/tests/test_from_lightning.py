"""LightningModules of other people compute here what they compute under Lightning, and the same on any number of processes."""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from extras.adopt import __main__ as adopt
from extras.from_lightning.data import DataModule, LoaderSampler
from extras.from_lightning.optimizers import configured_by
from extras.from_lightning.tests import modules
from framework.data.order import Order
from tests.harness import assert_close, assert_same_bits, command, exact_rows, finished, once, refused, typed
from tests.test_resume import after_step, crash

HERE = "extras.from_lightning.tests.modules"
SIZE, STEPS, SEED = 16, 10, 3  # two epochs of 4 batches and a short one
RUN = [
    "task=lightning", "dataset=lightning", f"dataset.module._target_={HERE}.Data", f"global_batch_size={SIZE}", f"seed={SEED}",
    "precision=fp64", "trainer.max_epochs=2", "trainer.eval_every=5", "trainer.log_every=1",
]  # fmt: skip
NET = [f"task.module.net._target_={HERE}.net"]
ADAM = ["+task.module.optimizer={_target_: torch.optim.Adam, _partial_: true, lr: 0.01}"]
CASES: dict[str, list[str]] = {
    "Classifier": [*NET, *ADAM],
    "VAE": [],
    "LanguageModel": ["dataset.module.kind=tokens"],
    "GAN": [],
    "IndexedGAN": [],
    "Teacher": [],
    "Alone": [],
    "Habits": [],
    "Schedules": [],
    "EveryOther": [],
    "Skips": [],
    "SkipsByContent": [],
    "Queue": [],
    "CountsItself": [],
    "PlateauByHand": ["checkpoint.monitor=val/val_elbo", "checkpoint.mode=min"],
    "Wasserstein": [],
    "Halves": [],
}


def line(name: str, *more: str) -> list[str]:
    return [*RUN, f"task.module._target_={HERE}.{name}", *CASES[name], *more]


class InOurOrder(L.LightningDataModule):
    """The same data in the order and the batches of a run."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        data.setup("fit")

    def train_dataloader(self) -> Any:
        order = Order(num_samples=len(self.data.fit), global_batch_size=SIZE, seed=SEED, drop_last=False)
        seen = 0
        batches = []
        for _ in range(8 * 5):
            batches.append(order.batch(seen)[1].tolist())
            seen += len(batches[-1])

        class Batches:
            def __init__(self) -> None:
                self.epoch = 0

            def __iter__(self) -> Iterator[list[int]]:
                self.epoch += 1
                yield from batches[(self.epoch - 1) * 5 : self.epoch * 5]

            def __len__(self) -> int:
                return 5

        return DataLoader(self.data.fit, batch_sampler=Batches())  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader()


class Note(L.Callback):
    """What each step has logged."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.losses.append(found | ({"loss": float(outputs["loss"])} if outputs else {}))


def draw_alike() -> None:
    """Let what a step draws depend on its shape alone: the two frameworks seed their draws differently."""

    def drawn(*shape: int, **_: Any) -> torch.Tensor:
        return torch.arange(float(np.prod(shape)), dtype=torch.float64).mul(7.0).cos().reshape(shape)

    torch.randn = drawn  # type: ignore[assignment]
    torch.randn_like = lambda tensor: drawn(*tensor.shape)  # type: ignore[assignment]


def under_lightning(
    module: Callable[[], L.LightningModule], data: Any, *, max_epochs: int = 2
) -> tuple[Any, list[dict[str, float]], dict[str, float]]:
    """Return the module that Lightning has trained in one process, what each step has logged, and the last evaluation."""
    torch.manual_seed(SEED)
    made, note = module().double(), Note()
    trainer = L.Trainer(
        max_epochs=max_epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[note],
        enable_model_summary=False, num_sanity_val_steps=0, precision="64-true",
    )  # fmt: skip
    trainer.fit(made, InOurOrder(data))
    return made, note.losses, {name: float(value) for name, value in trainer.callback_metrics.items()}


MADE: dict[str, Callable[[], L.LightningModule]] = {
    "Classifier": lambda: modules.Classifier(modules.net(), modules.adam),
    "VAE": modules.VAE,
    "LanguageModel": modules.LanguageModel,
    "GAN": modules.GAN,
    "IndexedGAN": modules.GAN,  # Lightning 2 does not take it
    "Teacher": modules.Teacher,
    "Alone": modules.Alone,
    "Habits": modules.Habits,
    "Schedules": modules.Schedules,
    "EveryOther": modules.EveryOther,
    "Skips": modules.Skips,
    "SkipsByContent": modules.SkipsByContent,
    "Queue": modules.Queue,
    "CountsItself": modules.CountsItself,
    "PlateauByHand": modules.PlateauByHand,
    "Wasserstein": modules.Wasserstein,
    "Halves": modules.Halves,
}


@pytest.mark.quick(6)
@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_lightning_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = once(*line(name), before=draw_alike)
    for function in ("randn", "randn_like"):
        monkeypatch.setattr(torch, function, getattr(torch, function))
    draw_alike()
    kind = "tokens" if name == "LanguageModel" else "points"
    made, losses, evaluated = under_lightning(MADE[name], modules.Data(kind, SIZE))
    rows = [row for row in exact_rows(ended) if row["split"] == "train"]
    assert len(rows) == len(losses) == STEPS
    for row, logged in zip(rows, losses):
        for column in ("loss", "train_loss", "agreement", "train_kl", "g_loss", "d_loss", "slope"):
            is_skipped = "loss" not in logged and name.startswith("Skips")
            assert not is_skipped or row["loss"] is None
            if column in logged and not is_skipped:  # Lightning keeps what an earlier step has logged
                assert row[column] == pytest.approx(logged[column], rel=1e-6), (row, logged)  # Lightning logs in float32
    if name == "Habits":  # Lightning tells at the next batch what the hook at the end of an epoch has logged
        assert rows[4]["seen"] == pytest.approx(losses[5]["seen"], rel=1e-6)
    (last,) = (row for row in exact_rows(ended) if row["split"] == "val" and row["step"] == STEPS)
    common = {own: value for name, value in evaluated.items() if (own := name.removeprefix("val/")) in last}
    assert common or name in ("VAE", "Alone", "Wasserstein", "Queue"), evaluated  # it returns its loss, and logs nothing
    for column, value in common.items():
        assert last[column] == pytest.approx(value, rel=1e-6), (last, evaluated)
    for parameter, value in made.state_dict().items():
        assert torch.allclose(ended.weights[parameter], value, rtol=1e-10, atol=1e-10), parameter


@pytest.mark.slow
def test_a_scheduler_that_follows_a_metric_does_what_it_does_under_lightning(tmp_path: Path) -> None:
    own = ["+task.module.scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, "
           "factor: 0.1, patience: 0, threshold: 0.9}", "trainer.max_epochs=4"]  # fmt: skip
    ended = once(*line("Classifier"), *own)
    rates = [row["lr"] for row in exact_rows(ended) if row["split"] == "train"]
    assert rates == pytest.approx([0.01] * 10 + [0.001] * 5 + [0.0001] * 5)  # the first value is no plateau
    killed = command(*line("Classifier"), *own, "checkpoint.every=6", root=tmp_path, before=after_step(13, crash))
    assert killed.code != 0
    assert_same_bits(finished(*line("Classifier"), *own, "checkpoint.every=6", root=tmp_path), ended)


@pytest.mark.slow
def test_a_step_of_lightning_1_that_returns_none_leaves_its_optimizer_out(tmp_path: Path) -> None:
    by_hand, indexed = (once(*line(name), "task.module.every=2") for name in ("GAN", "IndexedGAN"))
    assert all(torch.equal(indexed.weights[name], value) for name, value in by_hand.weights.items())
    assert not any(torch.equal(once(*line("GAN")).weights[name], value) for name, value in by_hand.weights.items())
    rows = [row for row in exact_rows(indexed) if row["split"] == "train"]
    assert all(row["stepped_0"] == row["stepped_1"] == 1.0 for row in rows)  # a hook gets the number too


def test_a_module_gets_a_batch_without_targets_as_it_is_of_any_dataset() -> None:
    kept = [word for word in RUN if not word.startswith("dataset")]
    line = [*kept, "dataset=map_style", f"task.module._target_={HERE}.TakesWhole"]
    by_name = once(*line, "task.module.has_names=true", f"dataset.train._target_={HERE}.named_points")
    alone = once(*line, "task.module.has_names=false", f"dataset.train._target_={HERE}.bare_points")
    assert_same_bits(by_name, alone)


def test_an_evaluation_has_the_values_of_its_own_and_without_a_clear_loss_that_of_the_training() -> None:
    measured, silent = exact_rows(once(*line("GAN"), f"task.module._target_={HERE}.LogsAlike"))[-2:]
    assert measured.keys() == {"step", "split", "loss", "g_loss", "d_loss"}
    assert measured["loss"] == silent["loss"] > 1.0 > 0.0 > measured["g_loss"]  # the same samples


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "strategy"), [
    ("Schedules", "ddp"), ("Wasserstein", "fsdp"), ("GAN", "ddp"), ("Classifier", "fsdp"), ("Teacher", "fsdp"), ("Habits", "ddp"),
    ("Skips", "ddp"), ("Classifier", "ddp"), ("PlateauByHand", "ddp"), ("Skips", "fsdp"), ("GAN", "fsdp"), ("Teacher", "ddp"), ("Habits", "fsdp"),
    ("IndexedGAN", "ddp"), ("IndexedGAN", "fsdp"), ("Halves", "fsdp"), ("Halves", "zero"),
])  # fmt: skip
def test_two_processes_and_a_kill_change_nothing(name: str, strategy: str, tmp_path: Path) -> None:
    two = [*line(name, "micro_batch_size=3", "checkpoint.every=3"), f"parallel={strategy}", "launch.nproc_per_node=2"]
    assert command(*two, "launch.max_restarts=0", root=tmp_path, before=after_step(8, crash)).code != 0
    assert_close(finished(*two, root=tmp_path), once(*line(name, "micro_batch_size=3", "checkpoint.every=3")))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("module", "ranks"), [("Classifier", 1), ("Predicting", 2), ("Classifier", 2), ("Predicting", 1)])
def test_a_prediction_is_what_the_predict_step_returns_or_without_one_the_forward(
    module: str, ranks: int, tmp_path: Path
) -> None:
    trained = finished(*line("Classifier"), f"task.module._target_={HERE}.{module}", "trainer.max_epochs=1", root=tmp_path)
    way = ["predict.split=val", "parallel=ddp", f"launch.nproc_per_node={ranks}"]
    done = command("mode=predict", f"run.dir={trained.directory}", *way, root=tmp_path / "predict")
    assert done.code == 0, done.output
    written = load_file(trained.directory / "predictions" / "val.safetensors")["output"]
    data = modules.Data("points", SIZE)
    data.setup("fit")
    made = MADE["Classifier"]().double().eval()
    made.load_state_dict(trained.weights)
    expected = made(data.held_out.tensors[0])
    expected = expected.softmax(1) * 100 if module == "Predicting" else expected
    torch.testing.assert_close(written.double(), expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_losses_of_an_epoch_in_a_list_outlive_a_kill_and_are_refused_on_several_processes(tmp_path: Path) -> None:
    own = [*RUN, f"task.module._target_={HERE}.EpochMean", *CASES["Classifier"], "checkpoint.every=3"]
    assert command(*own, "launch.max_restarts=0", root=tmp_path, before=after_step(4, crash)).code != 0
    assert_same_bits(finished(*own, root=tmp_path), once(*own))
    two = refused(*own, "parallel=ddp", "launch.nproc_per_node=2", "micro_batch_size=4", "rehearse=true")
    assert "the module's list losses changes, and each process has its own" in two, two


def test_the_start_of_an_epoch_changes_nothing_where_a_run_continues_within_the_epoch(tmp_path: Path) -> None:
    own = [*RUN, f"task.module._target_={HERE}.BeginsAnew", *CASES["Classifier"], "checkpoint.every=2"]
    assert command(*own, "launch.max_restarts=0", root=tmp_path, before=after_step(8, crash)).code != 0
    assert_same_bits(finished(*own, root=tmp_path), ended := once(*own))
    rows = [row for row in exact_rows(ended) if row["split"] == "train"]
    assert [row["num_steps"] for row in rows] == [1, 2, 3, 4, 5] * 2


@pytest.mark.slow
def test_a_batch_that_only_some_processes_or_micro_batches_would_skip_is_refused(tmp_path: Path) -> None:
    whole = line("SkipsByContent")
    two = [*whole, "parallel=ddp", "launch.nproc_per_node=2"]
    unseen = [*two, f"task.module._target_={HERE}.SkipsUnseen"]
    for own, code, says in (
        ([*whole, "micro_batch_size=2"], 78, "returns None for some micro-batches of a step, and a loss for the others"),
        (two, 78, "returns None on 1 of 2 processes, and a loss for the others"),
        ([*unseen, "launch.max_restarts=0"], 1, "returns None, which its source does not show"),
    ):
        ended = command(*own, "rehearse=false", root=tmp_path)
        assert ended.code == code and says in ended.output, ended.output
    assert "returns None for some micro-batches" in refused(*whole, "rehearse=true")


@pytest.mark.slow
def test_a_part_that_lowers_the_rate_is_heard_or_refused_where_the_module_sets_its_rates(tmp_path: Path) -> None:
    part = ["part=plateau", "part.plateau.patience=0", "part.plateau.threshold=0.9", "trainer.max_epochs=4"]
    rates = [row["lr"] for row in exact_rows(once(*line("Classifier"), *part)) if row["split"] == "train"]
    assert rates == pytest.approx([0.01] * 10 + [0.001] * 5 + [0.0001] * 5)
    both = command(*line("PlateauByHand"), *part, "rehearse=false", root=tmp_path)
    assert "the module sets its rates, and a part sets loop.lr_share too" in both.output, both.output


def test_a_module_with_loaders_of_its_own_is_its_data_too() -> None:
    class Both(modules.Teacher):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.zeros(8, 6), torch.zeros(8)), batch_size=4)

    assert len(DataModule(module=Both, global_batch_size=4, drop_last=False).load("train")) == 8


def test_a_data_module_without_a_val_dataloader_trains_on_all_samples() -> None:
    data = DataModule(module=modules.WithoutValidation, global_batch_size=SIZE, drop_last=False)
    assert [len(data.load(split)) for split in ("train", "val", "test")] == [72, 72, 72]
    with pytest.raises(ValueError, match=re.escape("dataset.val: is missing (a stream; or dataset.length.val=N")):
        DataModule(module=modules.Endless, global_batch_size=SIZE, drop_last=False).load("train")


@pytest.mark.slow
def test_a_module_that_steps_two_optimizers_is_evaluated(tmp_path: Path) -> None:
    trained = finished(*line("Wasserstein"), "trainer.max_epochs=1", root=tmp_path)
    (row,) = (row for row in exact_rows(trained) if row["split"] == "val")
    done = command("mode=eval", f"run.dir={trained.directory}", "eval.split=val", root=tmp_path / "eval")
    assert done.code == 0 and f"{row['loss']:.6g}" in done.output, done.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("DiscriminatorFirst", "training_step steps optimizer 0 after optimizer 1"),
        ("Unseen", "without self.manual_backward(loss) since the last"),
        ("Halves", "for one loss of several optimizers, one optimizer with a group for each"),
    ],
)
def test_optimizers_that_are_not_seen_or_in_no_clear_order_are_refused(name: str, says: str) -> None:
    more = ["task.module.num_backwards=1"] if name == "Halves" else []
    assert says in refused(*RUN, f"task.module._target_={HERE}.{name}", *more, "rehearse=true")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_gradients_that_a_module_accumulates_itself_are_refused_with_keys_that_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [*RUN, f"task.module._target_={HERE}.Accumulates", "rehearse=true"]
    for after in (0, 1):
        said = refused(*own, f"+task.module.after={after}")
        assert "steps no optimizer with it" in said and "global_batch_size is N times, and micro_batch_size once" in said
    keys = ["+task.module.steps_always=true", "global_batch_size=32", "dataset.module.batch_size=32", "micro_batch_size=16"]
    ended = finished(*own, *keys, "rehearse=false", "trainer.max_steps=2", root=tmp_path, before=draw_alike)
    for function in ("randn", "randn_like"):
        monkeypatch.setattr(torch, function, getattr(torch, function))
    draw_alike()
    data = modules.Data("points", SIZE)
    data.setup("fit")
    order, made = Order(num_samples=72, global_batch_size=32, seed=SEED, drop_last=False), modules.Accumulates().double()
    seen = [number for place in (0, 32) for number in order.batch(place)[1].tolist()]
    trainer = L.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, limit_val_batches=0, precision="64-true")  # fmt: skip
    torch.manual_seed(SEED)
    made = modules.Accumulates().double()
    trainer.fit(made, DataLoader(data.fit, batch_sampler=[seen[start : start + SIZE] for start in range(0, 64, SIZE)]))
    for parameter, value in made.state_dict().items():
        assert torch.allclose(ended.weights[parameter], value, rtol=1e-10, atol=1e-10), parameter


@pytest.mark.slow
def test_a_mean_that_is_not_one_over_the_samples_is_named_with_its_line(tmp_path: Path) -> None:
    own = ["dataset.module.kind=tokens", "parallel=ddp", "launch.nproc_per_node=2", "rehearse=true", "trainer.max_steps=1"]
    ended = command(*RUN, f"task.module._target_={HERE}.MeanOverTokens", *own, root=tmp_path / "runs")
    line = inspect.getsourcelines(modules.LanguageModel.training_step)[1]
    assert f"its loss of a batch (at {modules.__file__}:{line}) is neither the sum nor the mean" in ended.output, ended.output


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_callbacks_of_a_module_are_keys_and_others_are_refused_by_name(tmp_path: Path) -> None:
    own = [*RUN, f"task.module._target_={HERE}.Stops", "trainer.max_epochs=8"]
    keys = ["trainer.early_stopping.monitor=val/val_loss", "trainer.early_stopping.mode=min", "trainer.early_stopping.patience=2",
            "trainer.early_stopping.min_delta=0.2"]  # fmt: skip
    said = refused(*own)
    assert all(key in said for key in keys), said
    ended = finished(*own, *keys, root=tmp_path)
    assert "checkpoint.monitor=val/val_loss checkpoint.mode=min checkpoint.keep_best=3" in ended.output, ended.output

    class Stopping(modules.Stops):
        def configure_callbacks(self) -> Any:
            return super().configure_callbacks()[0]

    made, losses, _ = under_lightning(Stopping, modules.Data("points", SIZE), max_epochs=8)
    assert ended.summary["step"] == len(losses) < 8 * 5
    for callback, says in (("Callback", "its methods as hooks of the module"), ("BackboneFinetuning", "part=unfreeze")):
        said = refused(*own, f"+task.module.callback={callback}")
        assert f"configure_callbacks returns {callback}, which this framework does not call" in said and says in said


def test_an_optimizer_that_computes_the_loss_itself_is_refused_with_the_reason() -> None:
    said = refused(*RUN, f"task.module._target_={HERE}.ByClosure")
    why = "LBFGS needs a closure, which computes the loss several times, but a step has only one backward pass"
    assert f"optimizer: {why} (another optimizer" in said and said.count("(") == 1, said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_hook_that_unfreezes_is_refused_and_the_part_it_names_computes_what_lightning_does(tmp_path: Path) -> None:
    said = refused(*RUN, f"task.module._target_={HERE}.Unfreezes")
    assert "on_train_epoch_start changes later which parameters are trained" in said and "part=unfreeze" in said, said
    late = command(*RUN, f"task.module._target_={HERE}.UnfreezesElsewhere", "rehearse=true", root=tmp_path)
    assert late.code == 78 and "step 10/10" not in late.output, late.output
    assert "on_train_epoch_start changes whether net.0.weight is trained" in late.output, late.output
    part = ["part=unfreeze", "part.unfreeze.groups=[[net.0.*]]", "part.unfreeze.every=5"]
    own = [*RUN, f"task.module._target_={HERE}.AllTrained", *part]
    ended = finished(*own, root=tmp_path / "one")
    made, _, _ = under_lightning(modules.Unfreezes, modules.Data("points", SIZE))
    for parameter, value in made.state_dict().items():
        assert torch.allclose(ended.weights[parameter], value, rtol=1e-10, atol=1e-10), parameter
    two = [*own, "parallel=ddp", "launch.nproc_per_node=2", "micro_batch_size=4", "checkpoint.every=3", "launch.max_restarts=0"]
    assert command(*two, root=tmp_path / "two", before=after_step(4, crash)).code != 0
    assert_close(finished(*two, root=tmp_path / "two"), ended)


def test_a_hook_that_is_not_called_is_refused() -> None:
    own = [*RUN, f"task.module._target_={HERE}.OwnBackward", "dataset.module.kind=tokens"]
    assert "OwnBackward overrides backward, which this framework does not call" in refused(*own)


def test_adopt_writes_options_for_a_module_and_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []
    monkeypatch.setattr(adopt, "_check", lambda line: asked.append(line) or "")
    assert adopt.main([f"{HERE}:VAE", f"{HERE}:Data", f"global_batch_size={SIZE}", "parallel=ddp"]) == 0
    assert asked[0][:2] == ["task=vae", "dataset=data"]
    own = ["task.module.beta=0.1", "trainer.max_steps=2", f"global_batch_size={SIZE}", "rehearse=false"]
    ended = typed("task=vae", "dataset=data", *own, directory=tmp_path)
    assert ended.code == 0 and ended.summary["step"] == 2, ended.output


class Loaders(modules.Data):
    """Loaders whose batches or order the run does not have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        loader = DataLoader(self.fit, batch_size=SIZE // 2 if self.kind == "size" else SIZE, drop_last=self.kind == "drops")
        return [loader] * 2 if self.kind == "several" else loader

    def test_dataloader(self) -> Any:
        return [self.val_dataloader()] * (2 if self.kind == "several" else 1)

    def val_dataloader(self) -> Any:
        chosen = torch.utils.data.SubsetRandomSampler(range(3)) if self.kind == "sampler" else None
        return DataLoader(self.held_out, batch_size=SIZE, sampler=chosen)


class Moves(modules.Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("make", "split", "says"),
    [
        (lambda: Loaders("size"), "train", "its batches have 8 samples, and those of the run 16 (global_batch_size=8)"),
        (lambda: Loaders("drops"), "train", "drops its last batch, but the run does not (drop_last=true)"),
        (lambda: Loaders("sampler"), "val", "has a SubsetRandomSampler, but the run orders its samples"),
        (
            lambda: Loaders("several"),
            "train",
            "train_dataloader returns 2 loaders (one; only val_dataloader may return several)",
        ),
        (lambda: Loaders("several"), "test", "test_dataloader returns 2 loaders"),
        (Moves, "train", "overrides on_after_batch_transfer, which is not called"),
    ],
)
def test_a_loader_that_the_run_would_change_is_refused(make: Callable[[], Any], split: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        DataModule(module=make, global_batch_size=SIZE, drop_last=False).load(split)
    assert len(DataModule(module=lambda: Loaders(""), global_batch_size=SIZE, drop_last=False).load(split)) > 3


def test_a_sampler_of_the_loader_s_own_draws_by_the_seed_and_the_epoch() -> None:
    kind: Any = {"module": modules.Weighted, "global_batch_size": SIZE, "drop_last": False}
    with pytest.raises(
        ValueError, match=re.escape("has a WeightedRandomSampler, but the run orders its samples (sampler=lightning)")
    ):
        DataModule(**kind).load("train")
    source = DataModule(**kind, sampler="of the run").load("train")
    draw = partial(LoaderSampler().epoch, source=source)
    first, again, other, next_one = draw(0, seed=1), draw(0, seed=1), draw(0, seed=2), draw(1, seed=1)
    assert len(first) == 48 and (source.gather(first)[1] > 0).all()
    assert (first == again).all() and (first != other).any() and (first != next_one).any()


@pytest.mark.slow
def test_an_iterable_dataset_of_a_loader_is_a_stream(tmp_path: Path) -> None:
    own = [f"task.module._target_={HERE}.Classifier", *CASES["Classifier"], f"dataset.module._target_={HERE}.Streams"]
    short = [*RUN, *own, "dataset.length={train: 72}", "micro_batch_size=3", "checkpoint.every=3"]
    two = [*short, "parallel=ddp", "launch.nproc_per_node=2", "launch.max_restarts=0"]
    assert command(*two, root=tmp_path, before=after_step(8, crash)).code != 0
    assert_close(finished(*two, root=tmp_path), once(*short))


class TwoSchedules(modules.Teacher):
    def configure_optimizers(self) -> Any:
        (optimizer,), (scheduler,) = super().configure_optimizers()
        return [optimizer], [scheduler, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)]


def test_two_schedulers_of_one_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="returns two schedulers for one optimizer"):
        configured_by(TwoSchedules)


SETS = [f"dataset.module._target_={HERE}.TwoSets", f"task.module._target_={HERE}.OnTwoSets", "checkpoint.monitor=val.1/loss"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_several_validation_loaders_measure_what_they_do_under_lightning(tmp_path: Path) -> None:
    ended = once(*RUN, *SETS, "trainer.max_epochs=4")
    made, _, evaluated = under_lightning(modules.OnTwoSets, modules.TwoSets("points", SIZE), max_epochs=4)
    last = {row["split"]: row for row in exact_rows(ended) if row["step"] == 2 * STEPS}
    for name, value in evaluated.items():
        column, _, number = name.removeprefix("val/").partition("/dataloader_idx_")
        split = "val.1" if number == "1" or name in ("val_1_spread", "val/acc_mean") else "val"
        assert last[split][column] == pytest.approx(value, rel=1e-6), (name, last)  # Lightning logs in float32
    assert len(evaluated) == 9 and "acc_mean" not in last["val"]
    for parameter, value in made.state_dict().items():
        assert torch.allclose(ended.weights[parameter], value, rtol=1e-10, atol=1e-10), parameter
    rates = [row["lr"] for row in exact_rows(ended) if row["split"] == "train"]
    assert rates[0] > rates[-1], "the scheduler follows the second loader"
    both = [f"{part}.module._target_={HERE}.WithOwnLoaders" for part in ("task", "dataset")]
    own = once(*RUN, *SETS, *both, "trainer.max_epochs=4")
    assert_same_bits(own, ended)
    again = command("mode=eval", f"run.dir={ended.directory}", "eval.split=val.1", root=tmp_path)
    assert again.code == 0 and f"{last['val.1']['loss']:.6g}" in again.output, again.output
    two = [*RUN, *SETS, "trainer.max_epochs=4", "micro_batch_size=3", "checkpoint.every=3", "dataset.module.kind=dictionary"]
    more = ["parallel=ddp", "launch.nproc_per_node=2", "launch.max_restarts=0"]
    assert command(*two, *more, root=tmp_path, before=after_step(8, crash)).code != 0
    assert_close(finished(*two, *more, root=tmp_path), ended)
    assert "finished already" in command(*two, *more, root=tmp_path).output


def test_what_several_validation_sets_cannot_have_is_refused() -> None:
    assert "two validation sets log 'acc' with one metric" in refused(*RUN, *SETS, "+task.module.shared=true", "rehearse=true")
    said = refused(*RUN, *SETS, "checkpoint.monitor=val.2/loss")
    assert "'val.2/loss' is not valid" in said and "val.1/loss" in said


@pytest.mark.slow
def test_what_a_module_gives_its_logger_is_media_of_the_run_or_refused_with_the_way(tmp_path: Path) -> None:
    two = ["micro_batch_size=8", "parallel=ddp", "launch.nproc_per_node=2", "rehearse=true"]
    pictures = finished(*RUN, f"task.module._target_={HERE}.Pictures", *two, root=tmp_path)
    found = {str(path.relative_to(pictures.directory / "media")) for path in pictures.directory.glob("media/**/*.*")}
    ends = {"input": "png", "red": "png", "sound": "wav", "story": "txt", "pairs/0": "png", "pairs/1": "png", "pairs/caption": "txt",
            "curve": "png", "table": "csv", "weights": "csv"}  # fmt: skip
    assert found == {f"val/{name}/step_{step:08}.{end}" for name, end in ends.items() for step in (5, 10)}
    assert (pictures.directory / "media/val/story/step_00000010.txt").read_text() == "8 points"
    assert (pictures.directory / "media/val/table/step_00000010.csv").read_text() == "a,b\n1,x\n"
    assert (pictures.directory / "lightning_logs/num_points").read_text() == "24"
    lines = (pictures.directory / "media/val/weights/step_00000010.csv").read_text().splitlines()
    assert lines[0] == "from,to,count" and sum(int(one.split(",")[2]) for one in lines[1:]) == 16 * 6
    first, last = (row for row in exact_rows(pictures) if row["split"] == "val")
    points = modules.Data("points", SIZE)
    points.setup("fit")
    x, y = points.held_out[:]
    assert (first["points"], first["epochs"], last["epochs"]) == (8, 1, 2)
    assert last["mean/y"] == pytest.approx(float(y.double().mean())) and last["mean/x"] == pytest.approx(float(x.mean()))
    red = Image.open(pictures.directory / "media/val/red/step_00000010.png")
    assert red.size == (6, 4) and red.getcolors() == [(24, (255, 0, 0))]
    again = command("mode=eval", f"run.dir={pictures.directory}", root=tmp_path)
    assert again.code == 0 and "tested" in again.output, again.output
    assert "self.logger.log: is not available (numbers: self.log" in refused(
        *RUN, f"task.module._target_={HERE}.Pictures", "+task.module.odd=true", "rehearse=true"
    )


@pytest.mark.slow
def test_a_module_that_takes_its_batch_whole_is_trained_predicted_and_exported(tmp_path: Path) -> None:
    whole = [f"dataset.module._target_={HERE}.Named", f"task.module._target_={HERE}.TakesAll", "rehearse=true"]
    trained = finished(*RUN, *whole, root=tmp_path)
    for mode in (["mode=export", "export.formats=[pt2]"], ["mode=predict", "predict.split=val"]):
        ended = command(*mode, f"run.dir={trained.directory}", root=tmp_path)
        assert ended.code == 0, ended.output
    predicted = load_file(trained.directory / "predictions" / "val.safetensors")["output"]
    data = modules.Named("points", SIZE)
    data.setup("fit")
    batch = next(iter(DataLoader(data.held_out, batch_size=24)))
    again = torch.export.load(trained.directory / "export" / "model.pt2").module()(batch)
    torch.testing.assert_close(again, predicted, rtol=1e-6, atol=1e-6, check_dtype=False)
