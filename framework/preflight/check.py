"""Preflight: every problem of a configuration, found before any process or directory exists."""

from pathlib import Path
from typing import Any, NamedTuple

from framework.build import components
from framework.config.components import locate
from framework.config.compose import Composed
from framework.config.modes import MODES
from framework.config.schema import COMPONENTS, Node, RunConfig, Section
from framework.config.validation import component_problems, validate
from framework.data.source import Dataset
from framework.preflight.place import place_problems, writing_problems
from framework.preflight.processes import backend_problems, with_processes
from framework.preflight.rules import broken_rules, metric_names, monitor_problems
from framework.runs.directory import RunDirectory
from framework.runtime.problem import Problem, missing_extra, shown
from framework.runtime.secrets import REMEDY, is_secret_key, secrets_in


class Checked(NamedTuple):
    """A configuration with all its problems; if there are none, `config` is complete."""

    config: RunConfig | None
    problems: list[Problem]
    valid: dict[str, Any]  # the valid fields of the root, completed from the data and the machine


def check(composed: Composed, *, world_size: int | None) -> Checked:
    """Complete a configuration from the data and the machine, and return it with every problem.

    `world_size` is the launcher's; None: this process chooses it. Our own sections are validated first. Components, and torch
    with them, are imported only if those sections are valid or the command line sets a component's key: a mistake in
    them is reported at once.
    """
    valid, found = validate(composed.config, known=composed.known)
    problems = composed.problems + found
    keys = [key.split(".") for key in composed.given]
    imports = not problems or any(len(parts) > 1 and parts[0] in (*COMPONENTS, "logger") for parts in keys)
    imports &= not _has_run(valid)
    if imports:
        problems += _check_data(valid, known=composed.known) + _check_components(valid, known=composed.known)
    else:
        problems += _dataset(valid.get("dataset", {}))[1]
    problems = _check_secrets(composed.config, problems)
    is_wrong = {problem.key.split(".")[0] for problem in problems}
    if {"launch", "parallel", "backend"} <= valid.keys() and "parallel" not in is_wrong:
        backend = valid["backend"].name
        valid["launch"], found = with_processes(valid["launch"], valid["parallel"], backend=backend, world_size=world_size)
        problems += found + backend_problems(backend, num_processes=valid["launch"].most_processes)
    mode = MODES.get(valid.get("mode", ""))
    if mode is not None and mode.about == "existing run":
        problems += writing_problems(Path(valid["run"].dir)) if "run" in valid else []
    else:
        problems += broken_rules(valid)
        problems += _check_monitors(valid) if imports else []
        is_placed = {"run", "name"} <= valid.keys() and not any(problem.key in ("name", "run.dir") for problem in problems)
        problems += place_problems(valid["run"]) if is_placed else []
    seen: dict[str, Problem] = {}
    for problem in problems:
        seen.setdefault(problem.key.partition("[")[0], problem)  # the first problem of a key causes the others
    config = None
    if not seen:
        valid["model"] = components.with_init_digest(valid["model"])
        plain = {name: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
                 for name, value in valid.items()}  # fmt: skip
        config = RunConfig.model_validate(plain)
    return Checked(config, list(seen.values()), valid)


def _has_run(valid: dict[str, Any]) -> bool:
    """Return whether this configuration has finished already, so that its components are known to be valid."""
    run = valid.get("run")
    if run is None or valid.get("mode") not in ("train", "plan") or run.resume == "never":
        return False
    return Path(run.dir).name == run.id and RunDirectory(Path(run.dir)).is_finished


def _check_secrets(config: dict[str, Any], problems: list[Problem]) -> list[Problem]:
    """Return the problems, secrets first, without problems that would print a secret."""
    found = secrets_in(config)
    found |= {problem.key: "has the name of a secret" for problem in problems if is_secret_key(problem.key)}
    others = [problem for problem in problems if problem.key not in found]
    return [Problem(key, what, REMEDY) for key, what in found.items()] + others


# --- components


def _dataset(node: Node) -> tuple[Dataset | None, list[Problem]]:
    """Return the dataset, if it can be built, and its problems. This imports no torch."""
    try:
        dataset = components.dataset(node)
    except (Exception, SystemExit) as error:  # the constructor refuses the arguments
        return None, [Problem.of_error("dataset", error)]
    if missing := ", ".join(name for name in ("info", "problems", "load", "transform") if name not in dir(dataset)):
        return None, [Problem("dataset", f"{node['_target_']} has no {missing}", "a dataset, as in framework/data/source.py")]
    return dataset, [Problem.of_line(line) for line in dataset.problems()]


def _check_data(valid: dict[str, Any], *, known: list[str]) -> list[Problem]:
    """Check the dataset, and fill in what the components take from it."""
    if "dataset" not in valid:
        return []
    if problems := component_problems("dataset", valid["dataset"], known=known):
        return problems
    dataset, problems = _dataset(valid["dataset"])
    if dataset is None:
        return problems
    info = dict(dataset.info)
    for group in valid.keys() & {*COMPONENTS} - {"dataset"}:
        valid[group], unknown = components.with_facts(valid[group], info, key=group)
        problems += unknown
    unfilled: list[Problem] = []
    try:
        valid["model"], unfilled = components.complete_model(valid["model"], info)
        valid["task"] = components.complete_task(valid["task"], dataset)
    except (KeyError, ValueError):  # component_problems reports a faulty component
        pass
    # without the data, the facts are unknown too
    return (problems or unfilled) + _check_task(valid.get("task", {}), getattr(dataset, "task", None))


_OWN_TASKS = ("classification", "language_modeling", "regression")


def _check_task(node: Node, made_for: str | None) -> list[Problem]:
    """Refuse a task of ours that does not fit the data's targets; the user's own tasks are not checked."""
    chosen = str(node.get("_target_")).split(".")[-2:][0]
    if made_for is None or chosen == made_for or chosen not in _OWN_TASKS:
        return []
    return [Problem("task", f"{chosen} does not go with this dataset", f"task={made_for}")]


def _check_components(valid: dict[str, Any], *, known: list[str]) -> list[Problem]:
    problems: list[Problem] = []
    own = {"model": ("init_from",), "optimizer": ("groups",)}
    for group in (group for group in COMPONENTS if group in valid and group != "dataset"):
        problems += component_problems(group, valid[group], known=known, own=own.get(group, ()))
    for name, node in valid.get("logger", {}).items():
        problems += _logger_problems(name, node, known=known)
    return problems


def _logger_problems(name: str, node: Any, *, known: list[str]) -> list[Problem]:
    if not isinstance(node, dict):
        return [Problem(f"logger.{name}", f"{shown(node)} is not valid", f"keys, as logger={name} has them")]
    if "_target_" not in node:
        return [Problem(f"logger.{name}.{key}", "unknown key", f"only with logger={name}") for key in node]
    if problems := component_problems(f"logger.{name}", node, known=known):
        return problems
    extra = getattr(locate(node["_target_"]), "extra", None)
    return missing_extra(f"logger.{name}", extra) if extra else []


def _check_monitors(valid: dict[str, Any]) -> list[Problem]:
    if not {"task", "trainer", "checkpoint"} <= valid.keys():
        return []
    stopping = valid["trainer"].early_stopping
    monitors = {"checkpoint.monitor": valid["checkpoint"].monitor, "trainer.early_stopping.monitor": stopping.monitor}
    return monitor_problems(monitors, metric_names(valid["task"]))
