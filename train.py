"""The one entry point: `python train.py [group=option ...] [key=value ...]`, also under torchrun."""

import sys
from pathlib import Path

from framework.launch.start import start

CONF = str(Path(__file__).resolve().parent / "conf")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code. Anything with a flag (--help, --cfg, -m) is Hydra's to parse."""
    if not any(argument.startswith("-") for argument in arguments):
        return start(arguments)
    return _through_hydra(arguments)


def _through_hydra(arguments: list[str]) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from framework.config import force_values, register_resolvers
    from framework.launch.start import check, report

    if "--cfg" in arguments or "-c" in arguments:  # Hydra would print a configuration that cannot run
        _, problems = check([argument for argument in arguments if "=" in argument], world_size=None)
        if problems:
            return report(problems)
    codes = []

    @hydra.main(config_path=CONF, config_name="config", version_base="1.3")
    def run_job(config: DictConfig) -> None:
        codes.append(start(list(HydraConfig.get().overrides.task)))

    register_resolvers()
    sys.argv[1:] = force_values(arguments)
    run_job()
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
