"""The one entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import sys
from pathlib import Path

from framework.config import force_values, register_resolvers, sweep_points
from framework.help import help_text
from framework.launch.start import check, report, start
from framework.launch.sweep import start_in_child
from framework.outcome import Exit
from framework.syntax import split_flags

CONF = str(Path(__file__).resolve().parent / "conf")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    flags, overrides, problems = split_flags(arguments)
    if "--help" in flags and not problems:
        print(help_text())
        return Exit.FINISHED
    if "--cfg" in flags or "--multirun" in flags or problems:  # every value of a sweep, before its first run
        for point in sweep_points(overrides) if "--multirun" in flags else [overrides]:
            problems += [problem for problem in check(point, world_size=None)[1] if problem not in problems]
    if problems:
        return report(problems)
    return _through_hydra(arguments) if flags else start(overrides)


def _through_hydra(arguments: list[str]) -> int:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    codes = []

    @hydra.main(config_path=CONF, config_name="config", version_base="1.3")
    def run_job(config: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        GlobalHydra.instance().clear()  # a run composes for itself
        codes.append(start_in_child(overrides))
        if codes[-1] == Exit.PREEMPTED:  # so is the sweep: the same command continues both
            sys.exit(Exit.PREEMPTED)

    register_resolvers()
    sys.argv[1:] = force_values(arguments)
    run_job()
    return max(codes, default=Exit.FINISHED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
