"""The table of modes. Each mode has a subject, work for the command's own process, and work for each worker."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from framework.config.schema import RunConfig, RunSection


@dataclass(frozen=True)
class Command:
    """A command line and its checked configuration."""

    line: list[str]
    config: "RunConfig"


@dataclass(frozen=True)
class Mode:
    """One value of `mode`. `parent`, `worker` and `sweep` are dotted paths, which are imported when they are needed.

    `parent` gets the Command, and returns the exit code. `worker` gets a Builder, on every rank. `sweep` gets a Sweep, and
    returns the exit code.
    """

    name: str
    about: Literal["run", "existing run", "root"]
    parent: str
    worker: str = ""
    sweep: str = ""
    may_give: tuple[str, ...] = ()  # keys that the command line may set; for a new run, any


_HOW = ("mode", "run.dir", "run.root", "run.checkpoint")
_FORWARD = ("parallel", "launch", "device", "backend", "precision", "micro_batch_size")
_OF_EVALUATION, _OF_PREDICTION = (*_HOW, "eval", *_FORWARD, "dataset"), (*_HOW, "predict", *_FORWARD, "dataset.num_workers")
_OF_EXPORT, _OF_STATUS = (*_HOW, "export", "launch"), ("mode", "run.root")
_LAUNCH = "framework.cli.run.launch"
_MODES = (
    Mode("train", "run", parent=_LAUNCH, worker="framework.modes.train.train", sweep="framework.sweep.sweep.run_jobs"),
    Mode("plan", "run", parent="framework.cli.overview.print_plan", sweep="framework.sweep.sweep.print_sweep_plan"),
    Mode("check", "run", parent="framework.cli.check_run.check_run"),
    Mode("eval", "existing run", parent=_LAUNCH, worker="framework.modes.evaluate.evaluate", may_give=_OF_EVALUATION),
    Mode("predict", "existing run", parent=_LAUNCH, worker="framework.modes.predict.predict", may_give=_OF_PREDICTION),
    Mode("export", "existing run", parent=_LAUNCH, worker="framework.modes.export.export", may_give=_OF_EXPORT),
    Mode("cancel", "run", parent="framework.cli.control.cancel_run", sweep="framework.sweep.sweep.cancel_jobs"),
    Mode("report", "root", parent="framework.cli.overview.make_report", may_give=(*_OF_STATUS, "report.every_s")),
    Mode("status", "root", parent="framework.cli.overview.print_status", sweep="framework.sweep.sweep.print_sweep_status",
         may_give=_OF_STATUS),
)  # fmt: skip
MODES = {mode.name: mode for mode in _MODES}


def folder_of(run: "RunSection", mode: str) -> Path:
    """Return the folder for a command's own files: for a new run, the run's directory.

    For an existing run, which may be active, return a folder inside the run's directory.
    """
    return Path(run.dir, f".{mode}") if MODES[mode].about == "existing run" else Path(run.dir)
