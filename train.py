"""The one entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import signal
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run watches for it, Ctrl-C simply ends this
try:
    from framework.cli.run import check, start
    from framework.config.arguments import split_flags
    from framework.config.compose import print_by_hydra
    from framework.config.help import help_text, version_text
    from framework.launch.claim import report
    from framework.runtime.environment import Environment
    from framework.runtime.exits import Exit
    from framework.runtime.preemption import PREEMPTION
    from framework.runtime.stdio import speak
    from framework.sweep.sweep import sweep

    if find_spec("torch") is None:  # imported late, for that takes seconds
        raise ModuleNotFoundError("No module named 'torch'")
except ModuleNotFoundError as error:
    sys.exit(f"{error} in {sys.executable} (pip install -r requirements.txt, or activate the environment that has it)")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    flags, overrides, problems = split_flags(arguments, is_launched=Environment.read().is_launched)
    if not problems and flags.keys() & {"--help", "--version"}:
        print(help_text() if "--help" in flags else version_text())
        return Exit.FINISHED
    if flags.keys() == {"--multirun"}:
        return sweep(overrides, problems)
    if flags or problems:
        problems += check(overrides, world_size=None)[1]
    if problems:
        return report(problems)
    if flags:
        print_by_hydra(flags, overrides)
        return Exit.FINISHED
    return start(overrides)


if __name__ == "__main__":
    code = speak(main, sys.argv[1:])
    PREEMPTION.ignore()  # all is done: a signal must not make this a failure while the interpreter is taken down
    sys.exit(code)
