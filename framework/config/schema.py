"""The typed configuration: sections, the types of their keys, and the rules in a section."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from framework.config.launch import LaunchSection
from framework.config.section import AboveZero, Count, Positive, Section, texts_in
from framework.runtime.problem import Problem

Monitor = Annotated[str, Field(description="SPLIT/METRIC")]

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # a component's dotted path
Node = dict[str, Any]  # a component's node: data for its `_target_`


INIT = ("init_from", "init_digest")  # not arguments of the model: the source of its weights, and the files' checksums
OF_DATA = ("batch_transform", "keep_on_cpu")  # not arguments of the dataset: what happens to its micro-batches
OF_SCHEDULER = ("every",)  # when a scheduler of torch takes a step: each epoch, or each step of the optimizer
OWN = {
    "model": ("init_from", "parts"),
    "dataset": OF_DATA,
    "optimizer": ("groups", "turns"),
    "scheduler": OF_SCHEDULER,
}  # the framework's keys in components' nodes


class EarlyStopping(Section):
    patience: Positive | None
    monitor: Monitor
    mode: Literal["min", "max"] | None  # the preflight replaces null by the metric's direction
    min_delta: Annotated[float, Field(ge=0)]


class Divergence(Section):
    """What a non-finite loss or gradient causes.

    `raise` ends the run. `skip` leaves out the step. `rollback` continues from the `back`-th newest checkpoint, with the
    batches after the non-finite batch. `skip` and `rollback` happen at most `limit` times in a run.
    Source of the rollback: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", section 5.1.
    """

    action: Literal["raise", "skip", "rollback"]
    limit: Positive
    back: Positive


class GradNoise(Section):
    eta: AboveZero | None
    gamma: Annotated[float, Field(ge=0, le=1)]


class TrainerSection(Section):
    max_steps: Positive | None
    max_epochs: Positive | None
    eval_every: Positive | None
    log_every: Positive
    limit_batches: Positive | None = None
    overfit_batches: Positive | None = None
    clip_grad_norm: AboveZero | None
    clip_grad_value: AboveZero | None
    grad_noise: GradNoise
    freeze: list[str]
    channels_last: bool | None = None
    compile: bool
    activation_checkpointing: bool | Annotated[int, Field(ge=2)] | Literal["operations"]
    activation_offload: bool = False
    sync_batchnorm: bool
    deterministic: bool | None = None
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None
    early_stopping: EarlyStopping
    divergence: Divergence
    profile: bool | Literal["all"]

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
    every: Positive | None
    keep_last: Positive
    keep_best: Count
    monitor: Monitor
    mode: Literal["min", "max"] | None  # as in EarlyStopping
    async_save: bool | None
    max_failures: Count

    @property
    def direction(self) -> Literal["min", "max"]:
        """The mode, which the preflight has set."""
        return self.mode or "min"


class RunSection(Section):
    root: str
    mirror: str | None = None
    resume: str
    id: str
    dir: str
    code: Literal["same", "accept"] = "same"
    data: Literal["same", "accept"] = "same"
    checkpoint: int | str
    group: str | None

    def rules(self) -> Iterator[Problem]:
        for key in ("root", "dir"):
            path = getattr(self, key)
            if not path or path.startswith("~"):
                yield Problem(key, f"{path!r} is not valid", "a directory; ~ is not replaced: use $HOME")


class EvalSection(Section):
    split: Literal["train", "val", "test"]


class PredictSection(Section):
    split: Literal["train", "val", "test"]
    files: str | None


class ReportSection(Section):
    every_s: Annotated[float, Field(gt=0, le=86400)] | None = None


class ExportSection(Section):
    formats: Annotated[list[Literal["safetensors", "pt2", "onnx", "huggingface"]], Field(min_length=1)] | None


class BackendSection(Section):
    name: str | None
    module: str | None = None  # the module of another package's backend

    def device(self, asked: str) -> str:
        """Return the device for auto, cuda or cpu. Only some backends support CUDA."""
        if asked != "auto" or self.module is not None:
            return asked
        return {"auto": "auto", "nccl": "cuda"}.get(self.name or "", "cpu")


class PrecisionSection(Section):
    name: Literal["fp32", "bf16", "float8", "fp16", "tf32", "fp64"]


class RunConfig(Section):
    """The configuration of a run. The components' nodes are checked against the signatures of their `_target_`."""

    name: str
    mode: Literal["train", "plan", "check", "eval", "export", "predict", "report", "status", "cancel"]
    seed: Count
    global_batch_size: Positive
    micro_batch_size: Positive | None
    drop_last: bool
    invariance: Literal["samples", "bitwise"]
    rehearse: bool = True
    trainer: TrainerSection
    checkpoint: CheckpointSection
    run: RunSection
    eval: EvalSection
    export: ExportSection
    predict: PredictSection
    report: ReportSection = ReportSection()
    launch: LaunchSection
    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: BackendSection
    precision: PrecisionSection
    model: Node
    dataset: Node
    task: Node
    parallel: Node
    optimizer: Node
    scheduler: Node
    sampler: Node = {}  # empty: a random permutation
    logger: dict[str, Any]  # one component per logger, by name
    metric: dict[str, Any] = {}  # one component per additional metric, by name
    part: dict[str, Any] = {}  # one component per additional part of the loop, by name
    extra: Node = {}  # the user's own keys: part of the identity; the framework does not read them

    @property
    def is_deterministic(self) -> bool:
        """Whether the same command must give the same bits on CUDA."""
        return self.invariance == "bitwise" if self.trainer.deterministic is None else self.trainer.deterministic

    def in_group(self, group: str) -> "RunConfig":
        """Return the configuration with this `run.group`. An existing group stays."""
        return self if self.run.group is not None else self.with_run(group=group)

    def begun(self) -> "RunConfig":
        """Return the configuration for a restart: `run.resume=never` must not start from the beginning a second time."""
        return self.with_run(resume="auto") if self.run.resume == "never" else self

    def evaluated(self, asked: "RunConfig", *, given: list[str]) -> "RunConfig":
        """Return a run's configuration for mode=eval, export and predict: without the parts that only training needs.

        `asked` is the configuration of the new command line, `given` are the keys that this line names.
        """
        how = {"mode", "eval", "export", "predict", "parallel", "launch", "device", "backend"}
        how |= {"precision", "micro_batch_size", "metric"} & {key.partition(".")[0] for key in given}
        workers = {"num_workers": asked.dataset["num_workers"]} if "dataset.num_workers" in given else {}
        off: dict[str, Any] = dict.fromkeys(
            ("compile", "activation_checkpointing", "activation_offload", "sync_batchnorm"), False
        )
        off |= {"limit_batches": None, "overfit_batches": None}
        changed = {
            "dataset": self.dataset | workers,
            "run": asked.run.model_copy(update={"id": self.run.id}),
            "model": {name: value for name, value in self.model.items() if name not in INIT},
            "trainer": self.trainer.model_copy(update=off),
            "invariance": "samples",
            "logger": {},
            "part": {},
        }
        return self.model_copy(update={name: getattr(asked, name) for name in how} | changed)

    def with_run(self, **values: Any) -> "RunConfig":
        return self.model_copy(update={"run": self.run.model_copy(update=values)})

    def targets(self) -> list[str]:
        """Return the `_target_` of each component, and all other texts in the components that are dotted paths."""
        return targets_in(dict(self))

    def plain(self) -> dict[str, Any]:
        """Return the configuration as plain data, which can be frozen."""
        return self.model_dump(exclude_unset=True)


def targets_in(sections: Mapping[str, Any]) -> list[str]:
    """Return the `_target_` of each component in these sections, and all other texts in them that are dotted paths."""
    texts = (text for group in (*COMPONENTS, "metric", "part") for text in texts_in(sections.get(group)))
    return [text for text in texts if DOTTED.fullmatch(text)]


COMPONENTS = ("model", "dataset", "sampler", "task", "parallel", "optimizer", "scheduler")
SEVERAL = ("logger", "metric", "part")  # groups with any number of options per run; each option is a named component


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section type of a field, which may be optional. Return None if the field holds a value."""
    members = [annotation, *getattr(annotation, "__args__", ())]
    found = [kind for kind in members if isinstance(kind, type) and issubclass(kind, Section)]
    return found[0] if found else None


def completed(values: dict[str, Any], defaults: dict[str, Any], *, section: type[Section] = RunConfig) -> dict[str, Any]:
    """Return a section's values, with defaults for missing keys: an earlier version did not have these keys."""
    kinds = {name: section_of(field.annotation) for name, field in section.model_fields.items() if name in values}
    inner = {name: completed(values[name], defaults[name], section=kind) for name, kind in kinds.items()
             if kind is not None and isinstance(values[name], dict) and isinstance(defaults.get(name), dict)}  # fmt: skip
    return defaults | values | inner


def keys_of(section: type[Section], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and its subsections."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if (inner := section_of(field.annotation)) is not None:
            keys += keys_of(inner, prefix + name + ".")
    return keys


STATIC_KEYS = keys_of(RunConfig)  # keys that are independent of the chosen options
