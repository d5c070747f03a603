"""Rules between sections; the parameters of a rule name its sections."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from framework.build import components
from framework.checkpoint.file_tensors import stored_tensors
from framework.config.init_from import entries_of
from framework.config.launch import LaunchSection
from framework.config.model_keys import init_problems
from framework.config.period import seconds_of
from framework.config.schema import Node, PrecisionSection, PredictSection, RunSection
from framework.config.trainer import CheckpointSection, TrainerSection
from framework.preflight.processes import axes_of
from framework.runtime.objects import is_url, url_problems
from framework.runtime.plain import Invalid
from framework.runtime.problem import Problem, shown


def name_is_a_directory(name: str) -> Iterator[Problem]:
    if "/" in name or name.strip() in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 200:
        yield Problem("name", f"{shown(name)} is not valid", "a directory's name: no slash, at most 200 bytes")


def micro_batch_fits(global_batch_size: int, micro_batch_size: int | str | None) -> Iterator[Problem]:
    if isinstance(micro_batch_size, int) and micro_batch_size > global_batch_size:
        what = f"{micro_batch_size} is more than global_batch_size={global_batch_size}"
        yield Problem("micro_batch_size", what, f"at most {global_batch_size}")


def bitwise_needs_micro_batches(invariance: str, micro_batch_size: int | str | None) -> Iterator[Problem]:
    if invariance == "bitwise" and not isinstance(micro_batch_size, int):
        what = f"{micro_batch_size or 'null'}, but invariance=bitwise needs micro-batches"
        yield Problem("micro_batch_size", what, "a number; any world size up to global_batch_size / micro_batch_size "
                      "then gives the same bits")  # fmt: skip


def bitwise_couples_no_micro_batches(invariance: str, trainer: TrainerSection) -> Iterator[Problem]:
    if invariance == "bitwise" and trainer.sync_batchnorm:
        what = "true, but invariance=bitwise needs statistics over one micro-batch, not over processes"
        yield Problem("trainer.sync_batchnorm", what, "false")


def statistics_are_over_samples(trainer: TrainerSection, parallel: Node) -> Iterator[Problem]:
    axes = sorted({"tensor", "pipeline", "context"} & parallel.keys())
    if trainer.sync_batchnorm and axes and {"replicate", "shard"} & parallel.keys():  # else all processes have all samples
        what = f"true, but processes along the {axes[0]} axis do not have their own samples"
        yield Problem("trainer.sync_batchnorm", what, "false, or parallel=ddp, zero, fsdp or hsdp")


def float8_has_its_devices(
    precision: PrecisionSection, device: str, parallel: Node, launch: LaunchSection
) -> Iterator[Problem]:
    """Refuse what this machine shows to be impossible; the processes of a job check their own devices."""
    if precision.name != "float8":
        return
    import torch

    from framework.modules.float8 import float8_fault

    is_elsewhere = launch.kind == "slurm" and device != "cpu"
    # only check whether a device exists: after CUDA is initialised here, no process forked from this one can use it
    here = [] if device != "cpu" and torch.cuda.is_available() else [torch.device("cpu")]
    if not is_elsewhere and (fault := float8_fault(here)):
        yield Problem("precision", f"float8, but {fault}", "bf16")
    elif "tensor" in parallel:
        yield Problem("precision", "float8, but parallel cuts linear layers, and their scales are for whole layers", "bf16")


def mps_computes_alone(
    device: str, precision: PrecisionSection, parallel: Node, launch: LaunchSection, dataset: Node
) -> Iterator[Problem]:
    if device != "mps":
        return
    from framework.distributed.devices import NO_MPS, has_mps  # torch

    if launch.kind == "local" and not has_mps():
        yield Problem("device", f"{NO_MPS} here", "cpu")
    elif axes_of(parallel) or launch.most_processes > 1:
        yield Problem("device", "mps, but Apple's GPUs have no collectives", "parallel=single and one process, or device=cpu")
    if precision.name in ("fp64", "fp16", "tf32"):
        yield Problem("precision", f"{precision.name}, but device=mps computes in float32", "fp32 or bf16, or device=cpu")
    if dataset.get("num_workers"):
        yield Problem("dataset.num_workers", "a process that is forked beside Apple's GPU library crashes", "0")


def rollback_has_checkpoints(trainer: TrainerSection, checkpoint: CheckpointSection) -> Iterator[Problem]:
    divergence = trainer.divergence
    if divergence.action == "rollback" and divergence.back > checkpoint.keep_last:
        what = f"{divergence.back}, but checkpoint.keep_last={checkpoint.keep_last} keeps fewer"
        yield Problem("trainer.divergence.back", what, f"at most {checkpoint.keep_last}")
    if divergence.action == "rollback" and seconds_of(checkpoint.every) is not None:
        what = f"{checkpoint.every}, but a rollback to a checkpoint that a clock decides would not compute the same again"
        yield Problem("checkpoint.every", what, "steps, epochs, samples or tokens")


def clocks_decide_nothing(trainer: TrainerSection) -> Iterator[Problem]:
    stopping = trainer.early_stopping
    if (
        seconds_of(trainer.eval_every) is not None
        and stopping.patience is not None
        and not stopping.monitor.startswith("train/")
    ):
        what = f"{trainer.eval_every}, but early stopping that counts a clock's evaluations would not compute the same again"
        yield Problem("trainer.eval_every", what, "steps, epochs, samples or tokens")


def weights_come_from_one_place(model: Node, run: RunSection) -> Iterator[Problem]:
    init_from = model.get("init_from")
    if init_from is None:
        return
    if problems := init_problems(init_from):
        yield from problems
    elif run.resume not in ("auto", "never", "must"):
        what = "cannot be given together with run.resume: each chooses the first weights"
        yield Problem("model.init_from", what, "one of them")
    else:
        try:
            stored_tensors(entries_of(init_from))
        except (Invalid, ValueError, OSError) as error:
            yield Problem("model.init_from", str(error), "a safetensors file, an index of several, or a folder with either")


def folder_holds_samples(mode: str, predict: PredictSection, dataset: Node) -> Iterator[Problem]:
    """Refuse a folder if the dataset cannot make samples from it. This builds the dataset, which reads no file."""
    if mode != "predict" or predict.files is None:
        return
    folder, built = Path(predict.files), components.dataset(dataset)
    if not hasattr(built, "read_folder"):
        what = f"{dataset['_target_']} has no read_folder(folder)"
        yield Problem("predict.files", what, "predict.split, or a dataset of images")
    elif not folder.is_dir():
        yield Problem("predict.files", f"{shown(predict.files)} is not a directory", "a folder of images")
    else:
        try:
            built.read_folder(folder)
        except (ValueError, OSError) as error:
            yield Problem("predict.files", str(error), "a folder of images")


def processes_can_share(launch: LaunchSection, dataset: Node) -> Iterator[Problem]:
    """Refuse several processes where they cannot share a semaphore: the kernel keeps semaphores in /dev/shm."""
    if launch.kind != "local" or not (launch.most_processes > 1 or dataset.get("num_workers")):
        return
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        key = "launch.nproc_per_node" if launch.most_processes > 1 else "dataset.num_workers"
        what = f"several processes, but /dev/shm cannot be used ({error.strerror})"
        yield Problem(key, what, "a /dev/shm that can be written (docker run --shm-size), or one process")


def sockets_have_short_paths(launch: LaunchSection, dataset: Node) -> Iterator[Problem]:
    """Refuse loader processes below a long TMPDIR: they send tensors by sockets there, and a socket's path has 107 bytes."""
    folder = tempfile.gettempdir()
    if launch.kind == "local" and dataset.get("num_workers") and (size := len(os.fsencode(folder))) > _LONGEST_TMPDIR:
        what = f"{folder} has {size} bytes, and loader processes need sockets below it"
        yield Problem("TMPDIR", what, f"at most {_LONGEST_TMPDIR} bytes, or dataset.num_workers=0")


_LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")


def stores_can_be_reached(run: RunSection) -> Iterator[Problem]:
    if run.mirror is not None:
        yield from url_problems("run.mirror", run.mirror)
    if is_url(run.resume):
        yield from url_problems("run.resume", run.resume)


RULES: tuple[Callable[..., Iterator[Problem]], ...] = (
    name_is_a_directory,
    micro_batch_fits,
    mps_computes_alone,
    bitwise_needs_micro_batches,
    bitwise_couples_no_micro_batches,
    statistics_are_over_samples,
    float8_has_its_devices,
    rollback_has_checkpoints,
    clocks_decide_nothing,
    weights_come_from_one_place,
    processes_can_share,
    sockets_have_short_paths,
    stores_can_be_reached,
)
