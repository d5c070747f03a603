"""`steadfast draw schedule|mesh|pipeline|memory`: pictures of what a command line would do, without starting a run."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.cli.run import checked_line
from framework.config.targets import locate
from framework.launch.claim import print_problems
from framework.runs.figures import png_of
from framework.runtime.exits import Exit, Interrupted
from framework.runtime.files import replacing
from framework.runtime.log import LOGGER, start_console
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    pass

Drawn = tuple[list[str], Any]  # the printed lines, and the figure

_USAGE = "steadfast draw {} [group=option ...] [key=value ...] [out=FILE.png]"


def draw_plan(arguments: list[str]) -> int:
    """Draw one picture of what a command line would do, and print its main numbers. Return the exit code."""
    what, given = (arguments or [""])[0], arguments[1:]
    line = [argument for argument in given if not argument.startswith("out=")]
    if what not in _PLANS or any(argument.startswith("-") for argument in line):
        return print_problems([Problem("draw", "needs a picture and a command line", _USAGE.format("|".join(_PLANS)))])
    outs = [argument.partition("=")[2] for argument in given if argument.startswith("out=")] or [f"{what}.png"]
    target = Path(outs[-1])
    if target.suffix != ".png" or not target.parent.is_dir():
        return print_problems([Problem("out", f"{target} cannot be written", "a file NAME.png in a folder that exists")])
    start_console(rank=0)
    PREEMPTION.watch()
    try:
        drawn = _drawn(what, line)
    except Interrupted as end:
        LOGGER.error("%s", end)
        return end.code
    if not isinstance(drawn, tuple):
        return print_problems(drawn)
    try:
        with replacing(target) as beside:
            beside.write_bytes(png_of(drawn[1], dpi=110))
    except OSError as error:
        LOGGER.error("%s could not be written: %s", target, error.strerror)
        return Exit.DISK
    print("\n".join([*drawn[0], f"{what}: {target}"]))
    return Exit.FINISHED


def _drawn(what: str, line: list[str]) -> Drawn | list[Problem]:
    """Return the picture for a valid command line, or the problems of an invalid one."""
    draft = checked_line(line)
    config = draft.config
    if draft.problems or config is None:
        return draft.problems
    if config.mode != "train":
        return [Problem("mode", f"{config.mode}, but only a training run can be drawn", "the command line without mode")]
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.preflight.child import problems_in_child
    from framework.preflight.dry_build import dry_build

    if problems := problems_in_child(partial(dry_build, config)):
        return problems
    try:
        plan = locate(_PLANS[what])(Builder(config, world=World.alone()))
        return plan.lines(), plan.drawn()
    except (ValueError, OSError) as error:
        return [Problem.of_line(str(error))]


_PLANS = {  # imported when they are needed
    "schedule": "framework.cli.plan_schedule.planned_steps",
    "mesh": "framework.cli.plan_mesh.planned_mesh",
    "pipeline": "framework.cli.plan_pipeline.planned_pipeline",
    "memory": "framework.cli.plan_memory.planned_memory",
}
