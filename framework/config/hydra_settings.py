"""Hydra's own settings, on the command line and in files: a run follows them, or refuses them with what to use instead."""

from functools import cache
from pathlib import Path
from typing import Any

from hydra import conf
from omegaconf import DictConfig, OmegaConf

from framework.config.folders import CONF, parse_yaml
from framework.config.identity import flat
from framework.runtime.problem import Problem, shown

_WHERE = "run.root and run.dir choose the run's directory"
# Hydra's own keys, and what to use instead. The first matching prefix counts.
_INSTEAD: tuple[tuple[str | tuple[str, ...], str, str], ...] = (
    ("hydra.run", "is a key of Hydra that does nothing here", _WHERE),
    ("hydra.sweep.", "is a key of Hydra that does nothing here", _WHERE),
    ("hydra.output_subdir", "does nothing here", "run.dir/config.yaml is the configuration of a run"),
    ("hydra.job.chdir", "a run does not change its working directory", "run.dir is where a run's files go"),
    ("hydra.job.env", "does not reach the processes of a run", "set the variables in the shell, or in launch.slurm.setup"),
    ("hydra.searchpath", "does not work here", "--config-dir DIR or STEADFAST_CONF names your folder, which is searched first"),
    (("hydra/job_logging", "hydra/hydra_logging", "hydra.job_logging", "hydra.hydra_logging"),
     "does nothing here: a run logs to the console and to its train.log", "hydra.verbose=true for more"),
    ("hydra.verbose", "is read from the command line only", "hydra.verbose=true there"),
    ("hydra/launcher", "is about the jobs of a sweep", "add -m; a single run has launch=local or launch=slurm"),
    ("hydra.launcher", "is about the jobs of a sweep", "add -m; a single run has launch.*"),
    (("hydra/sweeper", "hydra.sweeper"), "is about the jobs of a sweep", "add -m"),
    ("hydra", "is a key of Hydra that does nothing here", _WHERE),
)  # fmt: skip
# What Hydra itself fills in, and what a run or a sweep follows.
_FOLLOWED = ("runtime", "overrides", "launcher", "sweeper", "callbacks", "mode", "job.name", "job.override_dirname", "job.id",
             "job.num", "job.config_name", "job.config", "help", "hydra_help")  # fmt: skip

TO_HYDRA = ("hydra.callbacks", "hydra/callbacks", "hydra.job.name")  # settings that Hydra applies itself

_FILES = Path(conf.__file__).parent / "hydra"  # Hydra's own settings
_LOGGING = ("job_logging", "hydra_logging")


def is_hydras(key: str) -> bool:
    """Return whether a key or group belongs to Hydra: `hydra.x` or `hydra/x`."""
    return key.split("/")[0].split(".")[0] == "hydra"


def hydra_problem(key: str, *, value: object = None) -> Problem:
    """Return why a run cannot follow a key or group of Hydra, and what to use instead. `value`: that of a file."""
    _, what, expected = next(entry for entry in _INSTEAD if key.startswith(entry[0]))
    return Problem(key, what if value is None else f"{shown(value)} in a file of your conf/ {what}", expected)


def setting_problems(hydra: DictConfig) -> list[Problem]:
    """Refuse settings in files that a run would ignore. `hydra` is the composed node."""
    ours, theirs = _defaults()
    found = {key: value for key, value in flat(_plain(hydra)).items() if value not in (ours.get(key), theirs.get(key), {}, [])}
    logging = {group: hydra.runtime.choices.get(f"hydra/{group}") for group in _LOGGING}
    unused = [hydra_problem(f"hydra/{group}", value=name) for group, name in logging.items()
              if name not in ("none", "default", "disabled")]  # fmt: skip
    chosen = [group for group, name in logging.items() if name != "default"]  # with all that it sets
    return unused + [
        hydra_problem(f"hydra.{key}", value=value)
        for key, value in found.items()
        if not any(key == name or key.startswith(f"{name}.") for name in (*_FOLLOWED, *chosen))
    ]


@cache  # it takes 8 ms, and each job of a sweep asks
def _defaults() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in our conf/, and Hydra's own, by dotted key."""
    ours = flat(parse_yaml((CONF / "config.yaml").read_text())["hydra"])
    files = {group: parse_yaml((_FILES / group / "default.yaml").read_text()) for group in (*_LOGGING, "output")}
    return ours, flat(_plain(OmegaConf.structured(conf.HydraConf))) | flat(files.pop("output") | files)


def _plain(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
