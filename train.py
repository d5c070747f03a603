"""The one entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import sys
from pathlib import Path

from framework.config import force_values, register_resolvers
from framework.environment import Environment
from framework.help import help_text
from framework.launch.start import check, report, start
from framework.launch.sweep import sweep
from framework.outcome import Exit
from framework.preemption import PREEMPTION
from framework.syntax import split_flags

CONF = str(Path(__file__).resolve().parent / "conf")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    flags, overrides, problems = split_flags(arguments, is_launched=Environment.read().is_launched)
    if "--help" in flags and not problems:
        print(help_text())
        return Exit.FINISHED
    if flags.keys() == {"--multirun"}:
        return sweep(overrides, problems)
    if flags or problems:
        problems += check(overrides, world_size=None)[1]
    if problems:
        return report(problems)
    return _through_hydra(flags, overrides) if flags else start(overrides)


def _through_hydra(flags: dict[str, str], overrides: list[str]) -> int:
    """Have Hydra print what its own flags ask for."""
    import hydra

    @hydra.main(config_path=CONF, config_name="config", version_base="1.3")
    def run_job(config: object) -> None:
        raise AssertionError("these flags print, and run nothing")

    register_resolvers()
    # flags first: argparse, which reads them for Hydra, takes none between overrides
    sys.argv[1:] = [*(word for flag in flags.items() for word in flag if word), *force_values(overrides)]
    run_job()
    return Exit.FINISHED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    PREEMPTION.ignore()  # all is done: a signal must not make this a failure while the interpreter is taken down
    sys.exit(code)
