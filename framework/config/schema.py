"""The typed schema of the configuration: the sections, and what their keys hold."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EarlyStopping(Section):
    patience: int | None
    monitor: str
    mode: Literal["min", "max"]
    min_delta: float


class Divergence(Section):
    action: Literal["raise", "skip", "rollback"]
    limit: int
    back: int


class GradNoise(Section):
    eta: float | None
    gamma: float


class Trainer(Section):
    max_steps: int | None
    max_epochs: int | None
    eval_every: int | None
    log_every: int
    clip_grad_norm: float | None
    clip_grad_value: float | None
    grad_noise: GradNoise
    freeze: list[str]
    compile: bool
    activation_checkpointing: bool
    sync_batchnorm: bool
    ema_decay: float | None
    early_stopping: EarlyStopping
    divergence: Divergence
    profile: bool | Literal["all"]


class Checkpoint(Section):
    every: int | None
    keep_last: int
    keep_best: int
    monitor: str
    mode: Literal["min", "max"]
    async_save: bool | None
    max_failures: int


class Run(Section):
    root: str
    resume: str
    id: str
    dir: str
    checkpoint: int | str
    group: str | None


class Eval(Section):
    split: Literal["train", "val", "test"]


class Export(Section):
    formats: list[Literal["safetensors", "pt2", "onnx"]] | None


class Launch(Section):
    kind: Literal["local", "slurm"]
    nproc_per_node: int | None
    nnodes: int | str
    max_restarts: int
    timeout_s: float
    grace_s: float | None


class Slurm(Section):
    partition: str | None
    time_min: int | None
    account: str | None
    qos: str | None
    mem_gb: float | None
    cpus_per_task: int | None
    gpus_per_node: int | None
    constraint: str | None
    exclude: str | None
    setup: list[str]
    snapshot: bool
    signal_s: int
    requeue: bool
    array_parallelism: int | None


class SlurmLaunch(Launch):
    slurm: Slurm


class Backend(Section):
    name: Literal["auto", "gloo", "nccl", "mpi", "ucc"]


class Precision(Section):
    name: Literal["fp32", "bf16", "fp16", "tf32", "fp64"]


Component = dict[str, Any]


class Config(Section):
    """The root. The component groups are checked against their `_target_`'s signature."""

    name: str
    mode: Literal["train", "plan", "eval", "export", "report", "status"]
    seed: int
    global_batch_size: int
    micro_batch_size: int | None
    drop_last: bool
    invariance: Literal["samples", "bitwise"]
    trainer: Trainer
    checkpoint: Checkpoint
    run: Run
    eval: Eval
    export: Export
    launch: Launch
    backend: Backend
    precision: Precision
    model: Component
    dataset: Component
    task: Component
    parallel: Component
    optimizer: Component
    scheduler: Component
    logger: dict[str, Any]  # components by name, each checked like the others


class SlurmConfig(Config):
    launch: SlurmLaunch


COMPONENTS = ("model", "dataset", "task", "parallel", "optimizer", "scheduler")


def keys_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and of those in it."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += keys_of(field.annotation, prefix + name + ".")
    return keys


STATIC_KEYS = keys_of(SlurmConfig)  # those that do not depend on which options are chosen
