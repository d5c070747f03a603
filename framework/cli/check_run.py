"""mode=check: a test of a run in seconds. It writes nothing."""

import math
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from framework.config.draft import Draft
from framework.config.modes import MODES, Command
from framework.launch.decision import print_problems
from framework.preflight.slurm import job_problems
from framework.runs.facts import is_brief
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER

if TYPE_CHECKING:
    from rich.table import Table

_MOST_ROWS = 8  # in the table at a run's start, so that it fits into the first screen


def check_run(command: Command) -> int:
    """Print the model's summary, do the rehearsal (whatever `rehearse` says), and print its time. Return the exit code."""
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.preflight.dry_build import build_problems
    from framework.preflight.rehearsal import rehearse

    config, start = command.config, time.monotonic()
    build = Builder(config, world=World.alone())
    problems = build_problems(build, is_shown=True)
    if not problems:
        print_summary(build.summary, file=sys.stdout)
        draft = Draft(dict(config), rehearse(build, unfinished="problem"))
        draft.check(job_problems)
        problems = draft.problems
    if problems:
        return print_problems(problems)
    took = time.monotonic() - start
    LOGGER.info("checked in %.1f s: the rehearsal finds no problem; the run would be in %s", took, config.run.dir)
    return Exit.FINISHED


def shows_model(mode: str) -> bool:
    """Return whether a run's start shows the model: on a terminal."""
    return MODES[mode].about == "run" and not Environment.read().is_foreign and sys.stderr.isatty() and not is_brief()


def print_summary(rows: list[dict[str, Any]], *, file: TextIO, is_short: bool = False) -> None:
    """Print a table of a model's modules, as wide as the terminal. With `is_short`, print the first outermost modules only.

    A narrow terminal gets no shapes.
    """
    from rich.console import Console

    named = [(row["name"], row) for row in rows]
    shown = [(name, row) for name, row in named if "." not in name][:_MOST_ROWS] if is_short else named
    console = Console(file=file, width=None if file.isatty() else 120)
    console.print(_table(shown, is_narrow=console.width < 60))
    if len(shown) < len(rows):
        console.print(f"and {len(rows) - len(shown)} more: mode=check shows all", highlight=False)


def _table(named: list[tuple[str, dict[str, Any]]], *, is_narrow: bool) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="none")  # no "\x1b" under NO_COLOR
    for name in ("module", "kind", *(() if is_narrow else ("returns",)), "parameters", "FLOPs"):
        is_number = name in ("parameters", "FLOPs")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold", min_width=4)
    for module, row in named:
        several = f"{row['count']} x " if row["count"] > 1 else ""
        frozen = "" if row["trained"] == row["parameters"] else f" ({row['trained']:,} trained)"
        parameters = f"{several}{row['parameters']:,}{frozen}"
        flops = "" if row["flops"] is None else f"{several}{_in_units(row['flops'])}"
        shape = () if is_narrow else (row["shape"],)
        table.add_row(module or "(the model)", row["kind"], *shape, parameters, flops)
    return table


def _in_units(value: float) -> str:
    """Return a number with three digits and the largest fitting unit."""
    power = min(5, int(math.log(max(value, 1), 1000)))
    return f"{value / 1000**power:.3g}{' kMGTP'[power].strip()}"
