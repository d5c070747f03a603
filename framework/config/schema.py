"""The typed configuration: sections, the types of their keys, and the rules in a section."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from framework.config.folders import DOTTED
from framework.config.launch import LaunchSection
from framework.config.section import OTHER_VALIDATION, Count, Positive, Section, setting, texts_in
from framework.config.trainer import CheckpointSection, TrainerSection
from framework.runtime.problem import Problem

Node = dict[str, Any]  # a component's node: data for its `_target_`


INIT = ("init_from", "init_digest")  # not arguments of the model: the source of its weights, and the files' checksums
OF_DATA = ("batch_transform", "keep_on_cpu", "fold", "folds")  # not arguments of the dataset: what happens to its samples
OF_SCHEDULER = ("every",)  # when a scheduler of torch takes a step: each epoch, or each step of the optimizer
OWN = {
    "model": ("init_from", "parts"),
    "dataset": OF_DATA,
    "optimizer": ("groups", "turns"),
    "scheduler": OF_SCHEDULER,
}  # the framework's keys in components' nodes


class RunSection(Section):
    root: str = setting("runs", "the folder of all runs")
    mirror: str | None = setting(
        None, "an object store with a copy of each run: s3://BUCKET/FOLDER; the same command can continue from the copy alone"
    )
    resume: str = setting("auto", "auto, never (start over), must, or the path (or URL) of a run or checkpoint")
    id: str = setting(..., "a hash of everything that decides the results", written="${run_id:}")
    dir: str = setting(..., "the directory of this run", written="${run.root}/${name}/${run.id}")
    code: Literal["same", "accept"] = setting(
        "same",
        "same = refuse to continue with other code than at the start of the run; accept = continue, and record the changes",
    )
    data: Literal["same", "accept"] = setting("same", "the same for the samples of the run's splits")
    checkpoint: int | str = setting("last", "the weights for eval, predict and export: last, best, final, a step, or a path")
    group: str | None = setting(None, "the group of the run, for loggers that show groups; null = the sweep, in a sweep")

    def rules(self) -> Iterator[Problem]:
        for name, path in {"root": self.root, "dir": self.dir}.items():
            if not path or path.startswith("~"):
                yield Problem(name, f"{path!r} is not valid", "a directory; ~ is not replaced: use $HOME")


OneSplit = Literal["train", "val", "test"] | OTHER_VALIDATION


class EvalSection(Section):
    split: OneSplit = setting("test", "train, val, val.NAME or test")


class PredictSection(Section):
    split: OneSplit = setting("test", "train, val, val.NAME or test")
    files: str | None = setting(None, "or a folder of files, for example images")


class ReportSection(Section):
    every_s: Annotated[float, Field(gt=0, le=86400)] | None = setting(
        None, "seconds between repeated writes of the page, until Ctrl-C, so that it shows running runs; null = write it once"
    )


class ExportSection(Section):
    formats: Annotated[list[Literal["safetensors", "pt2", "onnx", "huggingface"]], Field(min_length=1)] | None = setting(
        None, "safetensors, pt2 (torch.export), onnx, huggingface; null = the first three, if they are installed"
    )


class BackendSection(Section):
    name: str | None = setting("auto", "the name with which it is registered, in lower case")
    module: str | None = setting(None, "the module of another package to import, which registers the back end")

    def device(self, asked: str) -> str:
        """Return the device for auto, cuda or cpu. Only some backends support CUDA."""
        if asked != "auto" or self.module is not None:
            return asked
        return {"auto": "auto", "nccl": "cuda"}.get(self.name or "", "cpu")


class PrecisionSection(Section):
    name: Literal["fp32", "bf16", "float8", "fp16", "tf32", "fp64"] = setting("fp32", "the format of the computation")
    optimizer_state: Literal["bf16"] | None = setting(
        None, "bf16 = half the memory for what the optimizer keeps between steps; null = the type of the parameters"
    )


def _with_value_of(other: Node, node: Node, path: list[str]) -> Node:
    """Return a node with the value that another node has at a path."""
    name, *rest = path
    return {**node, name: _with_value_of(other[name], node.get(name) or {}, rest) if rest else other[name]}


class RunConfig(Section):
    """The configuration of a run. The components' nodes are checked against the signatures of their `_target_`."""

    name: str = setting("default", "first part of the run directory", execution=True)
    mode: Literal["train", "plan", "check", "eval", "export", "predict", "report", "status", "cancel"] = setting(
        "train", "what to do; for the other modes, see the examples above", execution=True
    )
    seed: Count = setting(0, "all random draws of the run depend on it")
    global_batch_size: Positive = setting(64, "samples in one optimizer step, over all processes")
    micro_batch_size: Positive | Literal["auto"] | None = setting(
        None, "samples in one forward and backward; null = a process's whole share; auto = as much of it as fits"
    )
    drop_last: bool = setting(False, "drop the short last batch of an epoch instead of training on it")
    invariance: Literal["samples", "bitwise"] = setting(
        "samples", "every world size uses the same samples in the same steps; bitwise = it also computes the same bits"
    )
    device: Literal["auto", "cuda", "cpu", "mps"] = setting(
        "auto", "cuda, cpu, mps (Apple's GPU); auto = CUDA if there is any and the backend supports it", execution=True
    )
    rehearse: bool = setting(
        True, "try a batch of the data on the CPU, in a separate process, before the run starts", execution=True
    )
    draft: bool = setting(
        False, "try something out: one folder RUN.ROOT/draft, which the next draft replaces; nothing is checked", execution=True
    )
    trainer: TrainerSection = setting(TrainerSection(), "the training loop")
    checkpoint: CheckpointSection = setting(CheckpointSection(), "when checkpoints are saved, and which are kept")
    run: RunSection = setting(..., "where the run is, and how it continues", execution=True)
    eval: EvalSection = setting(EvalSection(), "mode=eval", execution=True)
    export: ExportSection = setting(ExportSection(), "mode=export", execution=True)
    predict: PredictSection = setting(PredictSection(), "mode=predict", execution=True)
    report: ReportSection = setting(ReportSection(), "mode=report", execution=True)
    launch: LaunchSection = setting(LaunchSection(), "processes, nodes and jobs", execution=True)
    backend: BackendSection = setting(BackendSection(), "the library that moves data between processes", execution=True)
    precision: PrecisionSection = setting(PrecisionSection(), "the format of the computation")
    model: Node
    dataset: Node
    task: Node
    parallel: Node
    optimizer: Node
    scheduler: Node
    sampler: Node = {}  # empty: a random permutation
    logger: dict[str, Any] = setting({}, "one component per logger, by name", execution=True)
    metric: dict[str, Any] = {}  # one component per additional metric, by name
    part: dict[str, Any] = {}  # one component per additional part of the loop, by name
    extra: Node = {}  # the user's own keys: part of the identity; the framework does not read them

    @property
    def known_micro_batch_size(self) -> int | None:
        """The samples of a micro-batch, or None if they depend on the processes: auto is a number in the workers."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def is_deterministic(self) -> bool:
        """Whether the same command must give the same bits on CUDA."""
        return self.invariance == "bitwise" if self.trainer.deterministic is None else self.trainer.deterministic

    def begun(self) -> "RunConfig":
        """Return the configuration for a restart: `run.resume=never` must not start from the beginning a second time."""
        return self.with_run(resume="auto") if self.run.resume == "never" else self

    def evaluated(self, asked: "RunConfig", *, given: list[str]) -> "RunConfig":
        """Return a run's configuration for mode=eval, export and predict: without the parts that only training needs.

        `asked` is the configuration of the new command line, `given` are the keys that this line names.
        """
        how = {"mode", "eval", "export", "predict", "parallel", "launch", "device", "backend"}
        how |= {"precision", "micro_batch_size", "metric"} & {key.partition(".")[0] for key in given}
        dataset = asked.dataset if "dataset" in given else self.dataset  # other data, or other keys of the same
        for path in (key.split(".")[1:] for key in given if key.startswith("dataset.")):
            dataset = _with_value_of(asked.dataset, dataset, path)
        off: dict[str, Any] = dict.fromkeys(
            ("compile", "activation_checkpointing", "activation_offload", "sync_batchnorm"), False
        )
        off |= {"limit_batches": None, "overfit_batches": None}
        changed = {
            "dataset": dataset,
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


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a section and its subsections by their dotted keys."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if (inner := section_of(field.annotation)) is not None:
            yield from fields_of(inner, f"{prefix}{name}.")


def keys_of(section: type[Section], prefix: str = "") -> list[str]:
    return [key for key, _ in fields_of(section, prefix)]


STATIC_KEYS = keys_of(RunConfig)  # keys that are independent of the chosen options
