"""`steadfast promote`: the command of the last draft, as a run."""

import shlex
from pathlib import Path

from framework.config.arguments import split_flags
from framework.config.compose import compose_line
from framework.config.validation import validate
from framework.launch.decision import print_problems
from framework.runs.provenance import Provenance
from framework.runtime.problem import Problem
from framework.runtime.program import program


def promote(arguments: list[str]) -> int:
    """Start the run that the last draft was a draft of: its command without `draft=true`. Return the exit code.

    `run.root=PATH` names the folder of the runs. Any other argument is added to the command.
    """
    roots = [text for text in arguments if text.startswith("run.root=")]
    _, _, problems = split_flags(arguments)
    config = validate(compose_line(roots)).config
    root = "runs" if config is None else config.run.root
    latest = Provenance(Path(root, "draft")).latest
    if latest is None:
        problems.append(Problem("promote", f"{root}/draft has no draft", "draft=true KEY=VALUE ... makes one; run.root=PATH"))
    if latest is None or problems:
        return print_problems(problems)
    line = [word for word in shlex.split(latest.line) if not word.startswith("draft=")]
    print(shlex.join([*program().split(), *line, *arguments]), flush=True)
    from framework.cli.run import start  # it imports what starts a run

    return start([*line, *arguments])
