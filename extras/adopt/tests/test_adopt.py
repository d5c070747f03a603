"""`python -m extras.adopt MODULE:MODEL`: the file it writes, and its word on each strategy, which a run then keeps."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.adopt import __main__ as program
from extras.adopt.program import TRAINER, trainer_keys
from tests.harness import typed
from tests.test_loop import TINY

SMALL = [word for word in TINY if not word.startswith("model")] + ["trainer.max_steps=2"]

NET = '''
from torch import nn


class OddNet(nn.Module):
    """Layers one after the other, in a list."""

    def __init__(self, in_channels, image_size, num_classes, hidden=12, act=nn.ReLU, drop: float = 0.5, widths=[3, 4],
                 fill="${a}", unknown=["???"]):
        super().__init__()
        assert (fill, unknown) == ("${a}", ["???"])
        self.first = nn.Linear(in_channels * image_size**2, hidden)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), act(), nn.Dropout(drop)) for _ in range(4))
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Plain:
    pass


class Wide(nn.Module):
    def __init__(self, width: int, *sizes, yes={1: 2}, num_classes=10, **more):
        super().__init__()
        self.layer = nn.Linear(64 * width, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))
'''


@pytest.fixture
def adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """Return what runs the program in a project, with its checks forked from here, for its exit code and what it says."""

    def check(line: list[str]) -> str:
        done = typed("mode=check", *line, directory=tmp_path)
        return done.output if done.code else ""

    def run(*words: str) -> tuple[int, str]:
        try:
            code = program.main([*words])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, "".join(capsys.readouterr())

    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "odd.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(program, "_check", check)
    yield run
    for name in ("nets", "nets.odd"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_file_has_every_plain_argument_and_the_strategies_are_told_apart(
    adopted: Callable[..., Any], tmp_path: Path
) -> None:
    code, output = adopted("nets/odd.py:OddNet", "dataset.num_workers=0", "parallel=ddp,context")
    assert code == 0, output
    text = (tmp_path / "conf" / "model" / "odd_net.yaml").read_text()
    assert yaml.safe_load(text) == {
        "_target_": "nets.odd.OddNet", "hidden": 12, "drop": 0.5, "widths": [3, 4], "fill": r"\${a}",
    }  # fmt: skip
    assert text.startswith("# Layers one after the other, in a list.\n")
    assert re.search(r"ddp +yes\n", output)
    assert re.search(r"context +not yet:\n +parallel: OddNet does not have mixers\(\)", output)
    run = typed("model=odd_net", *SMALL, "rehearse=false", "parallel=pipeline", "launch.nproc_per_node=2", directory=tmp_path)
    assert run.code == 0, run.output


def test_what_has_no_default_is_asked_for_and_the_file_stays(adopted: Callable[..., Any], tmp_path: Path) -> None:
    code, output = adopted("nets.odd:Wide", "parallel=ddp")
    assert code == 78 and "before any strategy:" in output and "model.width: " in output
    file = tmp_path / "conf" / "model" / "wide.yaml"
    assert not {"# sizes", "# more"} & {line.partition(":")[0] for line in file.read_text().splitlines()}
    file.write_text(file.read_text() + "# mine\n")
    code, output = adopted("nets.odd:Wide", "parallel=ddp")
    assert code == 78 and "is not changed" in output and file.read_text().endswith("# mine\n"), output


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "needs a model"),
        (["nets.odd:OdNet"], "OdNet"),
        (["nets.odd:Plain"], "nets.odd.Plain is not a class of torch.nn.Module, LightningModule or LightningDataModule"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: list[str], answer: str, adopted: Callable[..., Any], tmp_path: Path
) -> None:
    code, output = adopted(*words)
    assert code == 78 and answer in output and len(output.splitlines()) == 1, output
    assert not (tmp_path / "conf").exists()


PROGRAM = {
    "src/lit.py": """
import torch
from pytorch_lightning import LightningDataModule, LightningModule  # the other name of lightning.pytorch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor
from torch.utils.data import DataLoader, TensorDataset


class Lit(LightningModule):
    def __init__(self, net, optimizer, folder):
        super().__init__()
        self.net, self.make = net, optimizer
        assert folder == "data"

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss" if self.trainer.evaluating else "train_loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return self.make(self.parameters())

    def configure_callbacks(self):
        return [EarlyStopping("val_loss"), LearningRateMonitor()]


class Data(LightningDataModule):
    def __init__(self, batch_size, held=0):
        super().__init__()
        self.batch_size, self.held = batch_size, held

    def _loader(self, is_shuffled):
        draws = torch.Generator().manual_seed(0)
        samples = TensorDataset(torch.randn(24, 4, generator=draws), torch.randint(0, 3, (24,), generator=draws))
        return DataLoader(samples, self.batch_size, shuffle=is_shuffled)

    def train_dataloader(self):
        return self._loader(True)

    def val_dataloader(self):
        return self._loader(False)

    def state_dict(self):
        return {"place": 1} if self.held else {}

    def load_state_dict(self, state):
        pass
""",
    "configs/train.yaml": """
# @package _global_
defaults: [_self_, {data: own}, {model: own}, {callbacks: own}, {logger: null}, {trainer: cpu}, {paths: own}, {hydra: own},
           {experiment: null}, {hparams_search: null}, optional local: own]
task_name: train
seed: null
""",
    "configs/data/own.yaml": "{_target_: src.lit.Data, batch_size: 8}",
    "configs/model/own.yaml": """
_target_: src.lit.Lit
net: {_target_: torch.nn.Linear, in_features: 4, out_features: 3}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
folder: ${paths.data_dir}
""",
    "configs/callbacks/own.yaml": """
early: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val_loss}
best: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val_loss, dirpath: "${paths.output_dir}/checkpoints"}
bar: {_target_: lightning.pytorch.callbacks.RichProgressBar}
other: {_target_: lightning.pytorch.callbacks.Timer}
""",
    "configs/trainer/cpu.yaml": """{_target_: lightning.pytorch.Trainer, max_epochs: 2, accelerator: cpu, devices: 1, gradient_clip_val: 0.5,
min_epochs: 1, val_check_interval: 1.0, limit_train_batches: 1.0, num_sanity_val_steps: 2}""",
    "configs/trainer/ddp.yaml": """{defaults: [cpu], devices: 2, strategy: ddp_spawn, max_time: 1h,
limit_val_batches: 1}""",
    "configs/paths/own.yaml": """
root_dir: ${oc.env:PROJECT_ROOT}
data_dir: ${paths.root_dir}/data
output_dir: ${hydra:runtime.output_dir}
""",
    "configs/hydra/own.yaml": """
defaults: [override hydra_logging: colorlog, override job_logging: colorlog]
run: {dir: logs}
""",
    "configs/logger/many.yaml": """
csv: {_target_: lightning.pytorch.loggers.csv_logs.CSVLogger}
board: {_target_: lightning.pytorch.loggers.TensorBoardLogger, save_dir: "${oc.env:NOWHERE}"}
""",
    "configs/experiment/fast.yaml": """
# @package _global_
defaults: [override /trainer: ddp, override /logger: many]
seed: 5
model: {optimizer: {lr: 0.2}}
""",
    "configs/hparams_search/tpe.yaml": """
# @package _global_
defaults: [override /hydra/sweeper: optuna]
optimized_metric: val_loss
hydra:
  mode: MULTIRUN
  sweeper:
    _target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper
    direction: minimize
    storage: null
    n_trials: 3
    params: {model.optimizer.lr: "interval(0.1, 0.2)", data.batch_size: "choice(4, 8)"}
""",
}


@pytest.fixture
def template(adopted: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Write a program in the shape of lightning-hydra-template; return what adopts it."""
    monkeypatch.setenv("PROJECT_ROOT", str(tmp_path))
    for name, text in PROGRAM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.lstrip())
    yield lambda *words: adopted("configs/train.yaml", *words)


@pytest.mark.slow
def test_a_program_like_lightning_hydra_template_is_an_experiment(template: Callable[..., Any], tmp_path: Path) -> None:
    code, output = template("experiment=fast", "hparams_search=tpe", "parallel=fsdp")
    assert code == 0 and re.search(r"fsdp +yes\n", output), output
    text = (tmp_path / "conf" / "experiment" / "fast.yaml").read_text()
    found = yaml.safe_load(text)
    assert found.pop("task")["module"] == {
        "_target_": "src.lit.Lit", "net": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
        "optimizer": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.2}, "folder": "data",
    }  # fmt: skip
    assert found == {
        "defaults": [{"override /task": "lightning"}, {"override /dataset": "lightning"}, {"override /parallel": "ddp"},
                     {"override /logger": ["tensorboard"]}],
        "dataset": {"module": {"_target_": "src.lit.Data", "batch_size": "${global_batch_size}"}},
        "global_batch_size": 8, "name": "train", "seed": 5, "device": "cpu",
        "trainer": {"max_epochs": 2, "eval_every": "1ep", "clip_grad_norm": 0.5,
                    "early_stopping": {"monitor": "val/val_loss", "mode": "min", "patience": 3, "min_delta": 0.0}},
        "checkpoint": {"monitor": "val/val_loss", "mode": "min", "keep_best": 1}, "launch": {"nproc_per_node": 2},
    }  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# @package _global_", "# global_batch_size: of all 2 processes; Lightning's batch_size is that of one",
        "# trainer.limit_val_batches=1 is not taken (docs/migration.md)", "# trainer.max_time=1h is not taken (docs/migration.md)",
        "# callbacks.other, a Timer, is not taken (trainer.max_steps)",
    ]  # fmt: skip
    search = re.search(r"its search is: steadfast (.+)", output)
    assert search is not None and shlex.split(search[1]) == [
        "experiment=fast", "-m", "task.module.optimizer.lr=interval(0.1, 0.2)", "global_batch_size=choice(4, 8)",
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "checkpoint.monitor=val/val_loss", "checkpoint.mode=min",
    ]  # fmt: skip
    losses = []
    for name, words in (("two", []), ("one", ["parallel=single", "launch.nproc_per_node=1"])):
        run = typed("experiment=fast", "rehearse=false", "logger=none", f"name={name}", *words, directory=tmp_path)
        assert run.code == 0, run.output
        (rows,) = (tmp_path / "runs" / name).glob("*/metrics.jsonl")
        losses.append([row["loss"] for row in map(json.loads, rows.read_text().splitlines())])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) > 3


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["experiment=fats"], "Could not find 'experiment/fats'"),
        (["~model"], "has no LightningModule (a section `model` with a `_target_`)"),
        (["+data.held=1"], "its state_dict has place, but the run orders the samples"),
    ],
)
def test_what_is_no_such_program_says_why(words: list[str], answer: str, template: Callable[..., Any]) -> None:
    code, output = template(*words, "parallel=ddp")
    assert code == 78 and answer in output, output


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"check_val_every_n_epoch": 5, "val_check_interval": 1.0}, {"eval_every": "5ep"}),
        ({"val_check_interval": 0.25}, {"eval_every": "0.25ep"}),
        ({"val_check_interval": 200}, {"eval_every": 200}),
        ({"max_epochs": -1, "max_steps": 7}, {"max_epochs": None, "max_steps": 7}),
        ({"max_steps": 7}, {"max_epochs": None, "max_steps": 7}),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, {"clip_grad_value": 1}),
        ({"fast_dev_run": True}, {"max_steps": 1}),
        ({"log_every_n_steps": 1, "limit_val_batches": 1.0, "accumulate_grad_batches": 1}, {"log_every": 1}),
    ],
)
def test_the_arguments_of_a_trainer_are_keys(given: dict[str, Any], keys: dict[str, Any]) -> None:
    sections: dict[str, dict[str, Any]] = {"trainer": {}, "launch": {}}
    assert [*trainer_keys(TRAINER | given, {"defaults": []}, sections)] == []
    assert {key: sections["trainer"][key] for key in keys} == keys


@pytest.mark.parametrize(
    "given", [{"accumulate_grad_batches": 4}, {"limit_train_batches": 3}, {"limit_val_batches": 0}, {"min_epochs": 3}]
)
def test_an_argument_that_has_no_key_is_named(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    (remark,) = trainer_keys(TRAINER | given, {"defaults": []}, {"trainer": {}, "launch": {}})
    assert remark.startswith(f"trainer.{name}={value} is not taken")
