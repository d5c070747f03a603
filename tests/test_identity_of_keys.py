"""Each key of the configuration with another value: it is part of the identity exactly if the run computes something else."""

from pathlib import Path
from typing import Any

import pytest

from framework.config.compose import compose_line
from framework.config.identity import flat
from framework.config.schema import STATIC_KEYS
from tests.harness import Ended, finished, is_close, once

# short batches, batch statistics, dropout, augmentation and accumulation
RUN = ["dataset=synthetic", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8", "dataset.image_size=8",
       "dataset.augment=true", "model=cnn", "model.channels=[4,8]", "model.norm=batch", "model.dropout=0.1", "precision=fp64",
       "global_batch_size=16", "micro_batch_size=8", "trainer.max_epochs=null", "trainer.max_steps=8", "trainer.eval_every=2",
       "trainer.log_every=4", "optimizer.lr=0.01", "scheduler.warmup_steps=2"]  # fmt: skip

OTHERS = {
    "name": "other", "seed": 1, "global_batch_size": 12, "micro_batch_size": 4, "drop_last": "true", "device": "cpu",
    "invariance": "bitwise", "trainer.max_steps": 7, "trainer.max_epochs": 2, "trainer.eval_every": 3, "trainer.log_every": 3,
    "trainer.limit_batches": 1, "trainer.overfit_batches": 1, "trainer.clip_grad_norm": 0.01, "trainer.clip_grad_value": 1e-4,
    "trainer.freeze": "[head*]", "trainer.channels_last": "true", "trainer.log_machine": "true", "trainer.compile_dynamic": "true",
    "trainer.activation_checkpointing": "true", "trainer.activation_offload": "true", "trainer.deterministic": "true",
    "trainer.ema_decay": 0.5, "trainer.early_stopping.patience": 1, "trainer.early_stopping.monitor": "val/accuracy",
    "trainer.early_stopping.mode": "min", "trainer.early_stopping.min_delta": 9.0, "trainer.divergence.limit": 3,
    "trainer.divergence.back": 2, "trainer.profile": "true", "checkpoint.every": 2, "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 1, "checkpoint.async_save": "true", "checkpoint.max_failures": 1, "run.group": "group",
    "run.code": "accept", "run.data": "accept", "report.every_s": 5.0, "precision.name": "fp32", "precision.optimizer_state": "bf16", "launch.max_restarts": 1,
    "launch.timeout_s": 50.0, "launch.keep_freed_memory": "false", "launch.grace_s": 5.0, "model.channels": "[4,4]",
    "model.norm": "group", "model.dropout": 0.2, "task.label_smoothing": 0.1, "dataset.num_train": 32, "dataset.num_val": 4,
    "dataset.augment": "false", "dataset.num_workers": 1, "optimizer.lr": 0.02, "optimizer.betas": "[0.8,0.9]",
    "optimizer.eps": 1e-2, "optimizer.weight_decay": 0.5, "scheduler.warmup_steps": 3, "scheduler.min_lr_ratio": 0.5,
}  # fmt: skip

# keys and what is given with them in both runs, so that the key has a meaning
WITH = {
    "trainer.early_stopping.min_delta": "trainer.early_stopping.patience=1",
    "trainer.early_stopping.patience": "trainer.early_stopping.min_delta=9.0",
    "launch.max_restarts": "parallel=ddp launch.nproc_per_node=2",
}
OPTIONS = {"parallel=ddp launch.nproc_per_node=2": "", "logger=tensorboard": "", "optimizer=sgd": "", "scheduler=constant": "",
           "sampler=windowed sampler.window=4": "", "parallel=fsdp launch.nproc_per_node=2": "",
           "parallel=fsdp parallel.reduce_dtype=fp32 launch.nproc_per_node=2": "parallel=fsdp launch.nproc_per_node=2",
           "parallel=fsdp parallel.prefetch=1 launch.nproc_per_node=2": "parallel=fsdp launch.nproc_per_node=2",
           "parallel=ddp parallel.bucket_cap_mb=1 launch.nproc_per_node=2": "", "part=gradient_norms": ""}  # fmt: skip

# in the identity, although these runs compute the same: with another model, on a GPU, or after a fault they do not
MAY_CHANGE = {"trainer.compile", "trainer.sync_batchnorm", "trainer.divergence.action", "checkpoint.monitor", "checkpoint.mode",
              "invariance", "part=gradient_norms"}  # fmt: skip
ELSEWHERE = ("mode", "eval", "predict", "export", "backend", "rehearse", "draft", "run.root", "run.mirror", "run.resume", "run.id", "run.dir",
             "run.checkpoint", "launch.kind", "launch.nnodes", "launch.nproc_per_node", "launch.slurm", "extra", "logger",
             "metric", "part", "sampler", "parallel", *MAY_CHANGE)  # fmt: skip
QUICK = ["seed", "micro_batch_size", "trainer.log_every", "trainer.early_stopping.monitor", "checkpoint.keep_best",
         "trainer.activation_checkpointing", "parallel=ddp launch.nproc_per_node=2"]  # fmt: skip


def line(change: str) -> tuple[list[str], list[str]]:
    """Return two lines: with the key, or option, and without it."""
    if "=" in change:
        return [*RUN, *change.split()], [*RUN, *OPTIONS[change].split()]
    given = WITH.get(change, "").split()
    value = {"trainer.max_epochs": ["trainer.max_steps=null"]}.get(change, [])
    return [*RUN, *given, *value, f"{change}={OTHERS[change]}"], [*RUN, *given]


def results(ended: Ended) -> list[Any]:
    """Return the weights, and all values of the evaluations, which a run computes."""
    rows = [[row[name] for name in ("step", "split", "loss", "accuracy")] for row in ended.rows if row["split"] != "train"]
    return [rows, [[name, str(tensor.dtype), tensor.double().flatten().tolist()] for name, tensor in ended.weights.items()]]


@pytest.mark.quick(len(QUICK))
@pytest.mark.parametrize("change", sorted([*OTHERS, *OPTIONS], key=lambda change: change not in QUICK))
def test_a_key_is_part_of_the_identity_exactly_if_the_run_computes_something_else(change: str, tmp_path: Path) -> None:
    one, other = line(change)
    ids = {compose_line(words).config["run"]["id"] for words in (one, other)}
    before, after = results(once(*other)), results(finished(*one, root=tmp_path))
    assert (len(ids) == 1) == is_close(before, after, tolerance=1e-9) or (change in MAY_CHANGE and len(ids) == 2)


def test_every_key_is_tried() -> None:
    known = {*flat(compose_line(RUN).config), *STATIC_KEYS}
    leaves = {key for key in known if not any(other.startswith(f"{key}.") for other in known) and not key.endswith("._target_")}
    facts = {f"model.{name}" for name in ("num_classes", "in_channels", "image_size")}  # null: as the data have them
    sizes = {key for key in leaves if key.startswith("dataset.") and key not in OTHERS}  # of the synthetic samples
    untried = {
        key for key in leaves - OTHERS.keys() - facts - sizes if not any(f"{key}.".startswith(f"{name}.") for name in ELSEWHERE)
    }
    assert not untried
