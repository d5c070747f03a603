"""Preflight: find every problem of a configuration before any process or directory exists."""

import dataclasses
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from framework.build import components, splits
from framework.build.stored_data import with_urls
from framework.build.user_code import seed_imports
from framework.config.code import code_of, find_module
from framework.config.compose import Composed
from framework.config.draft import Draft
from framework.config.folders import groups, sets
from framework.config.identity import execution_keys, is_below
from framework.config.model_keys import parts_problems
from framework.config.modes import MODES
from framework.config.schema import (
    COMPONENTS,
    OF_DATA,
    OF_SCHEDULER,
    OWN,
    SEVERAL,
    CheckpointSection,
    Node,
    RunSection,
    TrainerSection,
    targets_in,
)
from framework.config.targets import locate
from framework.config.validation import component_problems, problems_of_build, validate
from framework.data.source import Dataset
from framework.preflight.monitors import mode_of_monitor
from framework.preflight.origin import resume_problems
from framework.preflight.processes import backend_problems, device_problems, open_files_problems, with_processes
from framework.preflight.rules import RULES, folder_holds_samples, mps_computes_alone
from framework.runs.directory import RunDirectory
from framework.runs.provenance import CHANGED, WAYS, Provenance
from framework.runs.settings import read_config
from framework.runtime.exits import Exit, Interrupted
from framework.runtime.log import LOGGER
from framework.runtime.objects import StoreFailed
from framework.runtime.problem import Problem, missing_extra, shown
from framework.runtime.secrets import REMEDY, is_secret_key, secrets_in
from framework.runtime.torch_compiler import import_dynamo


def check(composed: Composed, *, world_size: int | None) -> Draft:
    """Complete a configuration from the data and the machine, and find every problem.

    `world_size` is the launcher's number of processes; None: this process chooses it. Our own sections are validated first.
    Components, and torch with them, are imported only if those sections are valid, or if the command line sets a component's
    key or chooses an experiment: a mistake in those sections is reported immediately.
    """
    draft = validate(composed)
    keys = [key.split(".") for key in composed.given]
    sets_component = any(parts == ["experiment"] or len(parts) > 1 and parts[0] in (*COMPONENTS, *SEVERAL) for parts in keys)
    imports = not draft.problems or sets_component
    outside = [key for key in execution_keys(composed.config) if key.partition(".")[0] in COMPONENTS]
    is_known = draft.call(_is_finished, otherwise=False) and not any(is_below(key, outside) for key in composed.given)
    imports &= not is_known
    if imports:
        seed_imports()
        import_dynamo()  # most components import torch
        reads_folder = draft.call(lambda mode, predict: mode == "predict" and predict.files is not None, otherwise=False)
        found = _check_data(draft, known=composed.known, needs_splits=not reads_folder)
        others = _check_components(draft, known=composed.known)
        if found:  # without the data, a model lacks the values that come from the data
            others = [problem for problem in others if problem.what != "is missing" or not problem.key.startswith("model.")]
        draft.add(found + others)
    else:
        draft.check(lambda dataset: _build_dataset(dataset)[1])
        draft.add(_problems_of_several(draft, ("logger",), known=composed.known))
    draft.add(draft.change("launch", partial(with_processes, world_size=world_size)))
    draft.check(backend_problems, device_problems, open_files_problems)
    if draft.call(lambda mode: MODES[mode].about == "existing run"):
        draft.check(writing_problems, folder_holds_samples, mps_computes_alone)
    else:
        draft.check(*RULES)
        if imports:
            draft.add(draft.change("checkpoint", _directed_checkpoint) + draft.change("trainer", _directed_trainer))
        draft.check(lambda name, draft, mode, run: place_problems(run, is_draft=draft) if mode != "cancel" else ())
    if imports and not draft.problems:
        for group in ("optimizer", "scheduler"):
            try:
                draft.fields[group] = components.completed(draft.fields[group])
            except Exception as error:  # it may build the user's objects
                draft.add(problems_of_build(group, draft.fields[group], error, own=OWN.get(group, ())))
    first: dict[str, Problem] = {}
    for problem in _with_secrets(composed.config, draft.problems):
        if not any(other.startswith(f"{problem.key}[") for other in first):  # an item's problem causes the list's
            first.setdefault(problem.key, problem)
    draft.problems = [_with_file(problem, composed) for problem in first.values()]
    if not draft.problems:
        draft.change("model", components.with_init_digest)
    if imports or is_known:
        # in a sweep or a notebook, the modules must not count as the modules of another run, and may be older than their files
        draft.add(edited_problems(targets_in(draft.fields)))
    return draft


def _with_file(problem: Problem, composed: Composed) -> Problem:
    """Let a problem name the user's file that sets its key, unless the command line sets it."""
    given = [key for key in composed.given if key not in groups()]
    paths = [] if is_below(problem.key, given) else [path for path in composed.files if sets(path, problem.key)]
    return dataclasses.replace(problem, what=f"{problem.what}, in {os.path.relpath(paths[0])}") if paths else problem


def _directed_checkpoint(
    checkpoint: CheckpointSection, task: Node, metric: Node, dataset: Node
) -> tuple[CheckpointSection, list[Problem]]:
    mode, problems = mode_of_monitor(checkpoint, "checkpoint", task=task, metric=metric, dataset=dataset)
    return checkpoint.model_copy(update={"mode": mode}), problems


def _directed_trainer(trainer: TrainerSection, task: Node, metric: Node, dataset: Node) -> tuple[TrainerSection, list[Problem]]:
    stopping = trainer.early_stopping
    mode, problems = mode_of_monitor(stopping, "trainer.early_stopping", task=task, metric=metric, dataset=dataset)
    return trainer.model_copy(update={"early_stopping": stopping.model_copy(update={"mode": mode})}), problems


def _is_finished(mode: str, run: RunSection) -> bool:
    """Return whether this configuration has already finished, so that everything in its identity is known to be valid."""
    if MODES[mode].about != "run" or run.resume == "never":
        return False
    return Path(run.dir).name == run.id and RunDirectory(Path(run.dir)).is_finished


def _with_secrets(config: dict[str, Any], problems: list[Problem]) -> list[Problem]:
    """Return the problems, secrets first, without problems that would print a secret."""
    found = secrets_in(config)
    found |= {problem.key: "has the name of a secret" for problem in problems if is_secret_key(problem.key)}
    others = [problem for problem in problems if problem.key not in found]
    return [Problem(key, what, REMEDY) for key, what in found.items()] + others


# --- components


def _build_dataset(dataset: Node) -> tuple[Dataset | None, list[Problem]]:
    """Return the dataset, if it can be built, and its problems. This does not import torch."""
    try:
        built, _ = components.dataset(dataset), components.fold_of(dataset)
    except Interrupted as end:
        return None, [Problem("dataset", str(end), code=end.code)]
    except StoreFailed as failure:
        return None, [Problem("dataset", str(failure), "the same command, later", code=Exit.DISK)]
    except (Exception, SystemExit) as error:  # the constructor refuses the arguments
        return None, problems_of_build("dataset", dataset, error, own=OF_DATA)
    if missing := ", ".join(
        name for name in ("info", "problems()", "load()", "transform()") if name.rstrip("()") not in dir(built)
    ):
        return None, [Problem("dataset", f"{dataset['_target_']} lacks {missing}", "a dataset as in framework/data/source.py")]
    return built, [Problem.of_line(with_urls(line, dataset)) for line in built.problems()]


def _check_data(draft: Draft, *, known: list[str], needs_splits: bool) -> list[Problem]:
    if problems := draft.call(partial(splits.dataset_problems, known=known)):
        return problems
    dataset, problems = draft.call(_build_dataset, otherwise=(None, []))
    if dataset is None:
        return problems
    problems = problems if needs_splits else []
    info = dict(dataset.info)
    for group in draft.fields.keys() & {*COMPONENTS, *SEVERAL} - {"dataset"}:
        draft.fields[group], unknown = components.with_facts(draft.fields[group], info, key=group)
        problems += unknown
    unfilled: list[Problem] = []
    with suppress(ValueError):  # component_problems reports a faulty component
        unfilled = draft.change("model", partial(components.complete_model, info=info))
    draft.change("task", partial(components.complete_task, dataset=dataset))
    # without the data, the facts are unknown too
    return (problems or unfilled) + draft.call(lambda task: _check_task(task, getattr(dataset, "task", None)), otherwise=[])


_OWN_TASKS = ("classification", "language_modeling", "regression")


def _check_task(node: Node, made_for: str | None) -> list[Problem]:
    """Refuse a task of this project that does not fit the data's targets; a user's own task is not checked."""
    chosen = str(node.get("_target_")).split(".")[-2:][0]
    if made_for is None or chosen == made_for or chosen not in _OWN_TASKS:
        return []
    return [Problem("task", f"{chosen} does not go with this dataset", f"task={made_for}")]


def _check_components(draft: Draft, *, known: list[str]) -> list[Problem]:
    problems = parts_problems(draft.fields.get("model", {}).get("parts"))
    for group in (group for group in COMPONENTS if draft.fields.get(group) and group != "dataset"):
        problems += component_problems(
            group, draft.fields[group], known=known, own=OWN.get(group, ()), may_hide=group in ("model", "task")
        )
    problems += draft.call(lambda optimizer: _problems_of_turns(optimizer, known=known), otherwise=[])
    return problems + _problems_of_several(draft, SEVERAL, known=known)


def _problems_of_turns(optimizer: Node, *, known: list[str]) -> list[Problem]:
    """Check the optimizer and the schedule of each turn in the same way as the run's own."""
    if not optimizer.get("turns"):
        return []
    from framework.optim.turns import turns_of  # this imports torch

    try:
        turns = turns_of(optimizer)
    except ValueError as error:
        return [Problem.of_line(f"optimizer.{error}")]
    problems: list[Problem] = []
    for turn in turns:
        key = f"optimizer.turns.{turn.name}"
        found = component_problems("optimizer", turn.optimizer, known=known, own=("groups",))
        problems += [dataclasses.replace(problem, key=problem.key.replace("optimizer", key, 1)) for problem in found]
        if turn.scheduler is not None:
            found = component_problems("scheduler", turn.scheduler, known=known, own=OF_SCHEDULER)
            problems += [dataclasses.replace(problem, key=f"{key}.{problem.key}") for problem in found]
    return problems


def _problems_of_several(draft: Draft, groups: Iterable[str], *, known: list[str]) -> list[Problem]:
    problems: list[Problem] = []
    named = [(group, name, node) for group in groups for name, node in draft.fields.get(group, {}).items()]
    for group, name, node in named:
        key = f"{group}.{name}"
        if not isinstance(node, dict):
            problems.append(Problem(key, f"{shown(node)} is not valid", f"keys, as in {group}={name}"))
        elif "_target_" not in node:
            problems += [Problem(f"{key}.{other}", "unknown key", f"only with {group}={name}") for other in node]
        elif found := component_problems(key, node, known=known):
            problems += found
        elif extra := getattr(locate(node["_target_"]), "extra", None):
            problems += missing_extra(key, extra)
    return problems


# --- the run's directory: it is writable, has no other run, and has a checkpoint if the run must continue


def place_problems(run: RunSection, *, is_draft: bool = False) -> list[Problem]:
    """Return why a run cannot start or continue in its directory. A draft replaces another run there."""
    directory = RunDirectory(Path(run.dir))
    if problems := writing_problems(run) or _odd_files(directory):
        return problems
    frozen = (read_config(directory.path) or {}).get("run")
    there = frozen.get("id") if isinstance(frozen, dict) else None
    if there is None and (strangers := directory.strangers()):
        what = f"{directory.path} is not a run's directory: it holds {shown(strangers[0])}"
        return [Problem("run.dir", what, "a new directory, which the run makes")]
    if there not in (None, run.id) and not is_draft:
        what = f"{directory.path} holds another run ({there}, this is {run.id})"
        problems = [Problem("run.dir", what, "another directory, or the command of the other run")]
    may_be_fetched = run.mirror is not None and run.resume == "must"  # the claim finds out whether it can be fetched
    return problems if may_be_fetched else problems + resume_problems(run.resume, directory, is_draft=is_draft)


def code_problems(run: RunSection, targets: list[str]) -> list[Problem]:
    """Refuse to continue with other code than at the start of the run, unless the user accepts it or starts over."""
    lines = changed_code(run, targets)
    if (record := Provenance(Path(run.dir))).is_damaged:
        LOGGER.warning("%s cannot be read: it is not known whether the code has changed", record.path)
    return [Problem("run.code", f"{CHANGED.format(run.dir)}: {'; '.join(lines)}", WAYS)] if lines else []


def edited_problems(targets: list[str]) -> list[Problem]:
    """Refuse to start a run with the code that this process has imported, if the files have changed since."""
    if no_file := [target for target in targets if target.startswith("__main__.") and find_module("__main__", ()) is None]:
        what = f"{no_file[0]} is in no Python file, so that a change of its code would not be found"
        return [Problem("run.code", what, "a module of your own; or a draft: run(model=...), with objects")]
    what, expected = "{}: the file has changed since this process imported it", "a new process, or a reload"
    return [Problem("run.code", what.format(line), expected) for line in code_of(targets).edited]


def changed_code(run: RunSection, targets: list[str]) -> list[str]:
    """Return the changes of the code since the run's last start, one line for each file; nothing if they are accepted."""
    is_free = run.resume == "never" or run.code == "accept"
    return [] if is_free else Provenance(Path(run.dir)).changes(targets)


def writing_problems(run: RunSection) -> list[Problem]:
    """Return why a run's directory cannot be created or written."""
    path = Path(run.dir)
    if max(map(len, map(os.fsencode, path.absolute().parts))) > 255 or len(os.fsencode(path.absolute())) > 3000:
        return [Problem("run.dir", "is too long for a path", "255 bytes between slashes, 3000 in all")]
    # os.path, because Path raises if a parent directory must not be entered
    nearest = next(str(parent) for parent in [path, *path.absolute().parents] if os.path.lexists(parent))
    key = "run.dir" if os.path.exists(path) else "run.root"
    if not os.path.isdir(nearest):
        return [Problem(key, f"{nearest} is not a directory", "a directory, or a path where one can be made")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [Problem(key, f"{nearest} cannot be written", "a writable directory")]
    if shutil.disk_usage(nearest).total == 0:
        return [Problem(key, f"{nearest} cannot hold files", "a directory on a disk")]
    return []


def _odd_files(directory: RunDirectory) -> list[Problem]:
    what, expected = "{} is not a plain file", "a run does not write to links or pipes"
    return [Problem("run.dir", what.format(directory.path / name), expected) for name in directory.odd_files()[:1]]
