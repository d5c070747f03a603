"""The table of modes: what each is about, what the command's own process does, and what each worker does."""

from dataclasses import dataclass
from typing import Literal

from framework.config.schema import RunConfig


@dataclass(frozen=True)
class Command:
    """A command line and the checked configuration that it composes to."""

    line: list[str]
    config: RunConfig


@dataclass(frozen=True)
class Mode:
    """One value of `mode`. `parent` and `worker` are dotted paths, imported when they are needed.

    `parent` is called with the Command, and returns the exit code; of a mode about all runs of a root, with that root.
    `worker` is called with a Builder, on every rank.
    """

    about: Literal["run", "existing run", "root"]
    parent: str
    worker: str = ""
    may_give: tuple[str, ...] = ()  # the keys that the command line may give of an existing run: the rest is the run's


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
