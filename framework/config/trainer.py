"""The sections `trainer` and `checkpoint`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from framework.config.period import Period
from framework.config.section import AboveZero, Count, Positive, Section, setting
from framework.runtime.problem import Problem


class EarlyStopping(Section):
    patience: Positive | None = setting(None, "evaluations without improvement before the run ends; null = off")
    monitor: str = setting("val/loss", "the metric that has to improve: SPLIT/METRIC")
    mode: Literal["min", "max"] | None = setting(
        None, "whether less (min) or more (max) is better; null = as the metric defines it"
    )
    min_delta: Annotated[float, Field(ge=0)] = setting(0.0, "smallest change that counts as an improvement")


class Divergence(Section):
    """What a non-finite loss or gradient causes.

    `raise` ends the run. `skip` leaves out the step. `rollback` continues from the `back`-th newest checkpoint, with the
    batches after the non-finite batch. `skip` and `rollback` happen at most `limit` times in a run.
    Source of the rollback: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", section 5.1.
    """

    action: Literal["raise", "skip", "rollback"] = setting(
        "raise", "raise = end the run; skip = skip the step; rollback = continue from an earlier checkpoint with later batches"
    )
    limit: Positive = setting(10, "largest number of skipped steps or rollbacks in one run")
    back: Positive = setting(1, "rollback: to the newest checkpoint (1), the checkpoint before it (2), ...")


class TrainerSection(Section):
    max_steps: Positive | None = setting(None, "optimizer steps; the shorter of this and max_epochs ends the run")
    max_epochs: Positive | None = setting(40, "passes over the training set")
    eval_every: Period | None = setting(
        100, "optimizer steps between evaluations, or 1ep, 5000samples, 8000tokens, 10min; null = only at the end"
    )
    log_every: Positive = setting(10, "optimizer steps between training rows")
    log_machine: bool = setting(
        False, "columns of the training rows for what the run uses of CPUs, GPUs, memory and disk", execution=True
    )
    limit_batches: Positive | None = setting(None, "batches of an epoch, and of an evaluation; null = all")
    overfit_batches: Positive | None = setting(
        None, "train only on so many batches, repeatedly, and evaluate on the same batches; null = off"
    )
    clip_grad_norm: AboveZero | None = setting(None, "largest global L2 norm of the gradient; null = off")
    clip_grad_value: AboveZero | None = setting(
        None, "largest absolute value of an element of the gradient, after clip_grad_norm; null = off"
    )
    freeze: list[str] = setting(
        [], "parameters that are not trained, by patterns of their names, for example [embedding.*, layers.0.*]"
    )
    channels_last: bool | None = setting(
        None, "give the model images in channels-last order, which is faster on tensor cores; null = off", execution=True
    )
    compile: bool | Literal["reduce-overhead", "max-autotune"] = setting(
        False, "torch.compile the model's blocks, and the loss of task=language_modeling; or with a mode of torch.compile"
    )
    compile_dynamic: bool | None = setting(
        False, "with compile: a program for each shape (false), one for any shape (true), or as torch.compile decides (null)"
    )
    activation_checkpointing: bool | Annotated[int, Field(ge=2)] | Literal["operations"] = setting(
        False,
        "recompute the blocks' activations in the backward pass; N = of every Nth block; operations = all except products",
        execution=True,
    )
    activation_offload: bool = setting(False, "keep activations in CPU memory between forward and backward", execution=True)
    sync_batchnorm: bool = setting(False, "take BatchNorm's statistics over the samples of all processes, not of a micro-batch")
    deterministic: bool | None = setting(
        None,
        "on CUDA: use only kernels with repeatable bits, which may be slower; null = only with invariance=bitwise",
        execution=True,
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None, "decay of an exponential moving average of the weights; evaluations use the average; null = off"
    )
    early_stopping: EarlyStopping = setting(EarlyStopping(), "the end of a run that does not improve any more")
    divergence: Divergence = setting(Divergence(), "when a loss or gradient is not finite, on any process")
    profile: bool | Literal["all"] = setting(
        False, "record a torch.profiler trace of a few steps: true = on rank 0, all = on every rank", execution=True
    )

    def rules(self) -> Iterator[Problem]:
        if self.limit_batches is not None and self.overfit_batches is not None:
            yield Problem("limit_batches", "cannot be given together with trainer.overfit_batches", "one of them")
        if self.compile and self.activation_checkpointing == "operations":
            what = "operations, but the operations of a compiled block (trainer.compile) are not visible"
            yield Problem("activation_checkpointing", what, "true, or a number of blocks")
        if self.max_steps is None and self.max_epochs is None:
            what = "null, and trainer.max_epochs is null too: the run would never end"
            yield Problem("max_steps", what, "a number for one of them")
        stopping = self.early_stopping
        is_evaluated = not stopping.monitor.startswith("train/")
        if stopping.patience is not None and is_evaluated and self.eval_every is None:
            what = "is counted in evaluations, but with trainer.eval_every=null there is only one evaluation, at the end"
            yield Problem("early_stopping.patience", what, "a number for trainer.eval_every")


class CheckpointSection(Section):
    every: Period | None = setting(
        100,
        "optimizer steps between checkpoints, or 1ep, 5000samples, 8000tokens, 10min; null = only at the end",
        execution=True,
    )
    keep_last: Positive = setting(2, "number of newest checkpoints to keep", execution=True)
    keep_best: Count = setting(0, "number of best checkpoints to keep in addition", execution=True)
    monitor: str = setting("val/loss", "the metric that decides which checkpoint is best")
    mode: Literal["min", "max"] | None = setting(
        None, "whether less (min) or more (max) is better; null = as the metric defines it"
    )
    async_save: bool | None = setting(
        None, "write in the background; training waits only for a copy; null = where it saves time", execution=True
    )
    max_failures: Count = setting(3, "consecutive failed saves before the run ends (exit 74)", execution=True)

    @property
    def direction(self) -> Literal["min", "max"]:
        """The mode, which the preflight has set."""
        return self.mode or "min"
