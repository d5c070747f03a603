"""The table of modes: for each mode its subject, the work of the command's own process, and the work of each worker."""

from dataclasses import dataclass
from typing import Literal

from framework.config.schema import RunConfig


@dataclass(frozen=True)
class Command:
    """A command line and its checked configuration."""

    line: list[str]
    config: RunConfig


@dataclass(frozen=True)
class Mode:
    """One value of `mode`. `parent` and `worker` are dotted paths, imported when they are needed.

    `parent` gets the Command, or run.root for a mode about all runs of a root, and returns the exit code.
    `worker` gets a Builder, on every rank.
    """

    about: Literal["run", "existing run", "root"]
    parent: str
    worker: str = ""
    may_give: tuple[str, ...] = ()  # keys that the command line may set for an existing run


_HOW = ("mode", "run.dir", "run.root", "run.checkpoint")
MODES = {
    "train": Mode("run", parent="framework.cli.run.launch", worker="framework.modes.train.train"),
    "plan": Mode("run", parent="framework.cli.overview.print_plan"),
    "eval": Mode(
        "existing run",
        parent="framework.cli.run.launch",
        worker="framework.modes.evaluate.evaluate",
        may_give=(*_HOW, "eval", "parallel", "launch", "backend", "precision", "micro_batch_size", "dataset.num_workers"),
    ),
    "export": Mode(
        "existing run", parent="framework.cli.run.launch", worker="framework.modes.export.export", may_give=(*_HOW, "export")
    ),
    "report": Mode("root", parent="framework.cli.overview.make_report"),
    "status": Mode("root", parent="framework.cli.overview.print_status"),
}
