"""Rules between sections (a rule's parameters name them), and the metrics that can be monitored."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from framework.checkpoint.plain import Invalid
from framework.checkpoint.tensors import read_header
from framework.config.schema import BackendSection, CheckpointSection, Node, RunSection, TrainerSection
from framework.config.spelling import did_you_mean
from framework.config.targets import locate
from framework.runtime.problem import Problem, shown


def name_is_a_directory(name: str) -> Iterator[Problem]:
    if "/" in name or name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 200:
        yield Problem("name", f"{shown(name)} is not valid", "a directory's name: no slash, at most 200 bytes")


def micro_batch_fits(global_batch_size: int, micro_batch_size: int | None) -> Iterator[Problem]:
    if micro_batch_size is not None and micro_batch_size > global_batch_size:
        what = f"{micro_batch_size} is more than global_batch_size={global_batch_size}"
        yield Problem("micro_batch_size", what, f"at most {global_batch_size}")


def bitwise_needs_micro_batches(invariance: str, micro_batch_size: int | None) -> Iterator[Problem]:
    if invariance == "bitwise" and micro_batch_size is None:
        what = "null, but invariance=bitwise is about sums over micro-batches"
        yield Problem("micro_batch_size", what, "a number; any world size up to global_batch_size / micro_batch_size "
                      "then gives the same bits")  # fmt: skip


def bitwise_couples_no_micro_batches(invariance: str, trainer: TrainerSection) -> Iterator[Problem]:
    if invariance == "bitwise" and trainer.sync_batchnorm:
        what = "true, but invariance=bitwise takes statistics over a micro-batch: others depend on who runs what beside it"
        yield Problem("trainer.sync_batchnorm", what, "false")


def statistics_are_over_samples(trainer: TrainerSection, parallel: Node) -> Iterator[Problem]:
    axes = sorted({"tensor", "pipeline", "context"} & parallel.keys())
    if trainer.sync_batchnorm and axes:
        what = f"true, but processes along the {axes[0]} axis have no samples of their own"
        yield Problem("trainer.sync_batchnorm", what, "false, or parallel=ddp, zero, fsdp or hsdp")


def mpi_saves_between_steps(backend: BackendSection, checkpoint: CheckpointSection) -> Iterator[Problem]:
    if backend.name == "mpi" and checkpoint.async_save:
        what = "true, but over MPI no thread may communicate while a step does"
        yield Problem("checkpoint.async_save", what, "null or false, or backend=gloo")


def rollback_has_checkpoints(trainer: TrainerSection, checkpoint: CheckpointSection) -> Iterator[Problem]:
    divergence = trainer.divergence
    if divergence.action == "rollback" and divergence.back > checkpoint.keep_last:
        what = f"{divergence.back}, but checkpoint.keep_last={checkpoint.keep_last} keeps fewer"
        yield Problem("trainer.divergence.back", what, f"at most {checkpoint.keep_last}")


def weights_come_from_one_place(model: Node, run: RunSection) -> Iterator[Problem]:
    path = model.get("init_from")
    if path is None:
        return
    if not isinstance(path, str):
        yield Problem("model.init_from", f"{shown(path)} is not valid", "text, or null")
    elif run.resume not in ("auto", "never", "must"):
        what = "is given, and so is run.resume: each says where the weights are from"
        yield Problem("model.init_from", what, "one of them")
    else:
        try:
            read_header(Path(path))
        except (Invalid, ValueError) as error:
            yield Problem("model.init_from", f"{shown(path)} {error}", "the path of a safetensors file")


RULES: tuple[Callable[..., Iterator[Problem]], ...] = (
    name_is_a_directory,
    micro_batch_fits,
    bitwise_needs_micro_batches,
    bitwise_couples_no_micro_batches,
    statistics_are_over_samples,
    mpi_saves_between_steps,
    rollback_has_checkpoints,
    weights_come_from_one_place,
)


def monitors_are_metrics(task: Node, trainer: TrainerSection, checkpoint: CheckpointSection) -> Iterator[Problem]:
    """Refuse to monitor a metric that the task does not have. This imports the task."""
    metrics = metric_names(task)
    choices = [f"{split}/{metric}" for split in ("val", "train") for metric in ["loss", *(metrics or ["METRIC"])]]
    stopping = trainer.early_stopping
    monitors = {"checkpoint.monitor": checkpoint.monitor, "trainer.early_stopping.monitor": stopping.monitor}
    for key, monitor in monitors.items():
        if monitor in choices or (metrics is None and re.fullmatch("(val|train)/.+", monitor)):
            continue
        close = did_you_mean(monitor, choices)
        expected = "one of " + ", ".join(choices) + (f"; {close}" if close else "")
        yield Problem(key, f"{monitor!r} is not valid", expected)


def metric_names(task: Node) -> list[str] | None:
    """Return the names that a task's `metrics` and `derived` return; None if the source does not list them plainly."""
    try:
        found = locate(str(task.get("_target_")))
    except ValueError:
        return None
    if not hasattr(found, "metrics"):
        return None
    names: list[str] = []
    for method in (getattr(found, name) for name in ("metrics", "derived") if hasattr(found, name)):
        if (returned := _returned(method)) is None:
            return None
        names += returned
    return list(dict.fromkeys(names)) or None


def _returned(method: Callable[..., Any]) -> list[str] | None:
    """Return the keys of the dictionaries that a method returns, if they are literals."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return None
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    keys = [key for value in values if isinstance(value, ast.Dict) for key in value.keys]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    is_plain = all(isinstance(value, ast.Dict) for value in values) and len(names) == len(keys)
    return names if is_plain else None
