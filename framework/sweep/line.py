"""The content of a `-m` line: the values of its jobs or a space to search, `hydra.launcher`, and `hydra.sweeper`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper as HydraSweeper
from omegaconf import DictConfig, OmegaConf

from framework.config.folders import groups, options
from framework.config.hydra_compose import LAUNCHER, compose_files, composes, prepare_hydra
from framework.config.hydra_settings import TO_HYDRA, hydra_problem, is_hydras
from framework.config.identity import flat
from framework.config.overrides import is_choice, key_of, one_line, parse, sort_overrides
from framework.config.schema import Node, keys_of
from framework.config.spelling import did_you_mean, done_here
from framework.config.targets import locate
from framework.config.validation import component_problems, section_problems, unknown_key
from framework.runtime.problem import Problem, missing_extra, shown
from framework.sweep.space import EXAMPLE, Space, Values, distribution, named_values, swept_values
from framework.sweep.sweeper import Sweeper


@dataclass(frozen=True)
class Multirun:
    """The parsed command line of a sweep."""

    arguments: list[str]  # the overrides of the jobs, as they are written
    fixed: list[str]  # those that all jobs share
    space: Space
    launcher: Node
    sweeper: Sweeper | Node | None  # a node: another package's; None: all combinations of the values

    def line(self, values: Values) -> list[str]:
        """Return a job's command line. If strategies are swept, `single` gets one process."""
        line = [*self.fixed, *(f"{key}={value}" for key, value in values.items())]
        if values.get("parallel") == "single":
            line += [f"{key}=1" for key in _SIZES if key in map(_key_of, line) and key not in self.space]
        return line


_SIZES = ("launch.nnodes", "launch.nproc_per_node", "launch.slurm.gpus_per_node")


def _key_of(text: str) -> str:
    return text.partition("=")[0]


def read(overrides: list[str]) -> tuple[Multirun, list[Problem]]:
    """Parse a sweep's command line. This does not check its single values."""
    hydras = [text for text in overrides if _is_setting(text)]
    line = [text for text in overrides if text not in hydras]
    (launcher, sweeper, params), problems = read_settings(hydras, line)
    given = {_key_of(text).lstrip("+") for text in line}
    fixed, swept = _sorted([*line, *(f"{key}={values}" for key, values in params.items() if key not in given)])
    for key in [key for key in swept if is_hydras(key) or key == "mode"]:
        problems.append(Problem(key, "cannot be swept", "one value for all jobs"))
        del swept[key]
    draws, is_others = isinstance(sweeper, Sweeper), isinstance(sweeper, dict)
    if (draws or "hydra/sweeper=optuna" in hydras) and not swept:
        problems.append(Problem("hydra/sweeper", "optuna, but there is nothing to search", "as in " + EXAMPLE))
    space: dict[str, Any] = {}
    for key, override in swept.items():
        if sweeper is None and problems and override.is_interval_sweep():
            continue  # the search has problems
        try:
            space[key] = distribution(override) if draws else swept_values(override, ends=is_others)
        except ValueError as error:
            problems.append(Problem(key, str(error), "as in " + EXAMPLE))
    for key, values in space.items():
        for value in named_values(values) if key in groups() else []:
            if read_settings(hydras, [*fixed, f"{key}={value}"])[0].params != params:
                problems.append(Problem(key, f"{value} defines its own sweep", "one such option, not swept"))
    return Multirun(line, fixed, space, launcher, sweeper), problems


def _is_setting(text: str) -> bool:
    """Return whether an override concerns the sweep, and not its jobs."""
    override = parse(text)
    if override is None or (override.is_sweep_override() and not text.startswith(PARAMS)):
        return False
    return is_hydras(override.key_or_group) and not override.key_or_group.startswith(TO_HYDRA)


def _sorted(line: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a line into the overrides that all jobs share and the swept keys. If a key is swept twice, the last one counts."""
    fixed: list[str] = []
    swept: dict[str, Any] = {}
    for text in line:
        override = parse(text)
        is_value = override is not None and override.package is None and not is_choice(override)
        key = key_of(override) if override is not None and is_value else _key_of(text)
        swept.pop(key, None)
        if override is not None and override.is_sweep_override():
            swept[key] = override
        else:
            fixed.append(text)
    return fixed, swept


# --- hydra.launcher and hydra.sweeper

_NODES = ("hydra.launcher", "hydra.sweeper", "hydra.sweeper.sampler", "hydra.sweeper.pruner")
PARAMS = "hydra.sweeper.params."
_PLUGINS = ("joblib", "submitit_local", "submitit_slurm", "ray", "rq")  # launchers of packages that may not be installed
_GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"  # its keys, for an older Optuna


class Settings(NamedTuple):
    """The settings of a sweep."""

    launcher: Node = LAUNCHER
    sweeper: Sweeper | Node | None = None  # as of Multirun
    params: dict[str, str] = {}  # the swept keys of the files, and their values


def read_settings(hydras: list[str], line: list[str]) -> tuple[Settings, list[Problem]]:
    """Read the files that a line chooses. `hydras` are overrides of Hydra's own keys, such as `hydra.sweeper.n_trials=9`."""
    prepare_hydra()  # the options of installed plug-ins
    given = {override.key_or_group: override for override in map(parse, hydras) if override is not None}
    if problems := [problem for key, override in given.items() for problem in _key_problems(key, override)]:
        return Settings(), problems
    choices, _, _ = sort_overrides(line)
    values = {key.removeprefix("hydra."): override.value() for key, override in given.items() if "/" not in key}
    try:
        files = compose_files([*choices, *(text for text in hydras if "/" in text.partition("=")[0])])
        hydra = OmegaConf.masked_copy(files.settings.hydra, ["launcher", "sweeper"])
        keys = [f"hydra.{key}" for key in flat(_plain(hydra)) if key.startswith("launcher.")]
        for key, value in values.items():
            is_another = key in ("launcher", "sweeper") and isinstance(value, dict) and "_target_" in value
            OmegaConf.update(hydra, key, value, merge=not is_another, force_add=True)
    except Exception as error:  # a faulty file; if it is another file, the check of the jobs reports it
        return Settings(), [Problem(" ".join(hydras), one_line(error))] if composes(choices) else []
    launcher, sweeper = (_plain(hydra)[name] for name in ("launcher", "sweeper"))
    if not isinstance(sweeper, dict) or not isinstance(sweeper.get("params") or {}, dict):
        return Settings(), [Problem("hydra/sweeper", "has no keys, or params without keys", "KEY: VALUES")]
    is_others = sweeper.get("_target_", _GRID) not in (_GRID, _OPTUNA)  # what its keys mean is its own
    params = {} if is_others else {key: str(value) for key, value in flat(sweeper.pop("params", None) or {}).items()}
    found, problems = _sweeper(sweeper)
    for key in [] if "launcher._target_" in values else given:  # as in Hydra: many launchers take any key, and ignore it
        if key.startswith("hydra.launcher.") and key not in keys:
            problems += unknown_key(key, None, known=keys)
    return Settings(launcher, found, params), problems or _plugin_problems("launcher", launcher, Launcher)


def _plain(hydra: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(hydra)  # type: ignore[return-value]  # keys are strings


def _key_problems(key: str, override: Override) -> list[Problem]:
    """Return why a sweep cannot follow an override of Hydra's own keys."""
    value = override.value()
    if "/" in key and key.startswith(("hydra/launcher", "hydra/sweeper")):
        return _option_problems(key, str(value))
    if key.startswith(PARAMS):
        return [Problem(key, "is a key of a file", "KEY=VALUES, which counts before the file's")]
    if key in _NODES and not isinstance(value, dict):
        return [Problem(key, f"{shown(value)} is not valid", f"{key.replace('.', '/')}={value}, or {key}.KEY=VALUE")]
    is_read = key.startswith((*_NODES, "hydra.verbose"))  # main() reads the last
    return [] if is_read else [hydra_problem(key)]


def _option_problems(group: str, name: str) -> list[Problem]:
    known = [option for option in options(group) if "/" not in option]
    if name in known:
        return []
    if group == "hydra/launcher" and name in _PLUGINS:
        package = f"hydra-{name.partition('_')[0]}-launcher"
        instead = f"hydra.launcher.n_jobs=N, or launch=slurm; or pip install {package}"
        return [Problem(group, f"{name} is not installed", instead)]
    expected = f"one of {', '.join(known)}; {did_you_mean(name, known)}".rstrip("; ")
    return [Problem(group, f"no option {shown(name)}", expected)]


def _plugin_problems(name: str, node: Node, kind: type) -> list[Problem]:
    """Return the problems of the node of a launcher or a sweeper. This imports its class."""
    if problems := component_problems(f"hydra.{name}", node, known=[]):
        return problems
    found, what = locate(node["_target_"]), f"{node['_target_']} is not a {name}"
    is_one = isinstance(found, type) and issubclass(found, kind)
    return [] if is_one else [Problem(f"hydra.{name}._target_", what, f"a class with {kind.__module__}.{kind.__name__}")]


def _sweeper(node: Node) -> tuple[Sweeper | Node | None, list[Problem]]:
    """Return the settings of a search, another package's sweeper, or None for a grid; and their problems."""
    target = node.pop("_target_", _GRID)
    if target == _GRID:
        return None, [Problem(f"hydra.sweeper.{name}", "unknown key", done_here(name) or "only with hydra/sweeper=optuna")
                      for name, value in node.items() if value is not None]  # fmt: skip
    if target != _OPTUNA:
        other = {"_target_": target, **node}
        return other, _plugin_problems("sweeper", other, HydraSweeper)
    if missing := missing_extra("hydra/sweeper", "search"):
        return None, missing
    node = {name: value for name, value in node.items() if value is not None or name in Sweeper.model_fields}
    problems = section_problems(Sweeper, node, "hydra.sweeper", keys_of(Sweeper, "hydra.sweeper."))
    return (None if problems else Sweeper(**node)), problems
