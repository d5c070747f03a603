"""The one entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import sys
from pathlib import Path

from framework.config import force_values, register_resolvers, sweep_points
from framework.environment import Environment
from framework.help import help_text
from framework.launch.start import check, report, start
from framework.launch.sweep import Sweep
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
    if "--cfg" in flags or "--multirun" in flags or problems:  # every value of a sweep, before its first run
        for point in sweep_points(overrides) if "--multirun" in flags else [overrides]:
            problems += [problem for problem in check(point, world_size=None)[1] if problem not in problems]
    if problems:
        return report(problems)
    return _through_hydra(flags, overrides) if flags else start(overrides)


def _through_hydra(flags: dict[str, str], overrides: list[str]) -> int:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    sweep = Sweep()

    @hydra.main(config_path=CONF, config_name="config", version_base="1.3")
    def run_job(config: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        GlobalHydra.instance().clear()  # a run composes for itself
        if sweep.run(overrides) == Exit.PREEMPTED:  # so is the sweep: the same command continues both
            sys.exit(Exit.PREEMPTED)

    register_resolvers()
    # flags first: argparse, which reads them for Hydra, takes none between overrides
    sys.argv[1:] = [*(word for flag in flags.items() for word in flag if word), *force_values(overrides)]
    run_job()
    return sweep.report()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    PREEMPTION.ignore()  # all is done: a signal must not make this a failure while the interpreter is taken down
    sys.exit(code)
