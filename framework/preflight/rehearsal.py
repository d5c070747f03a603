"""The rehearsal: before the start, a real batch goes through the whole run, on the CPU and in a separate process."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from framework.build.training import Builder
from framework.config.frozen_file import digest_of
from framework.config.identity import mapped
from framework.preflight.child import ChildFailure, in_child
from framework.preflight.comparison import compare
from framework.preflight.continuation import Continuation
from framework.preflight.refused import Refused
from framework.preflight.trial import Trial
from framework.runtime.log import LOGGER
from framework.runtime.memory import available_memory, cpus
from framework.runtime.problem import Problem

_LIMIT_S = 120.0
_FEWEST, _FEW, _MANY = 4, 8, 512  # samples in a micro-batch
_FOR_ONE_THREAD = 2_000_000  # parameters: on a busy machine, the threads of a small operation wait for each other
_SMALL = {"compile": False, "profile": False, "max_steps": 100, "max_epochs": None, "log_every": 1}
_SWITCH = "rehearse=false starts without a rehearsal"


def rehearse(build: Builder, *, unfinished: Literal["warning", "problem"] = "warning") -> list[Problem]:
    """Try a checked configuration with a batch of its own data; return the problems that break the run's promises.

    Print a warning for possible problems. If the rehearsal itself fails, this is only a warning.
    """
    findings, unchecked = perform(build)
    problems = [replace(one, expected=f"{one.expected}; {_SWITCH}") for one in findings if not one.is_warning]
    for finding in findings:
        if finding.is_warning:
            LOGGER.warning("%s", finding)
    if unchecked and unfinished == "problem":
        problems.append(Problem("rehearse", f"the rehearsal was not finished: {unchecked}", "a run would start without it"))
    elif unchecked and not problems:
        LOGGER.warning("the rehearsal was not finished: %s; the run starts (%s)", unchecked, _SWITCH)
    return problems


_NOT_REHEARSED = ("seed", "name", "run", "logger", "launch", "report", "hydra", "extra")


def subject(build: Builder) -> str:
    """Return a hash of what a rehearsal depends on. For an optimizer's and a schedule's numbers, this is whether they are 0."""
    config = build.config
    kept = {name: value for name, value in config.plain().items() if name not in _NOT_REHEARSED}
    kept |= {name: mapped(kept[name], _sign) for name in ("optimizer", "scheduler")}
    return digest_of(kept | {"processes": config.launch.most_processes})


def _sign(value: Any, _: str) -> Any:
    return math.copysign(1.0, value) if isinstance(value, float) and value else value


_Answer = tuple[list[Problem], Any]  # the findings of a run, and as plain data what the next run needs
_RESUMES, _SCALES = "a continued run computes the same", "several processes compute the same as one process"


def perform(build: Builder) -> tuple[list[Problem], str]:
    """Return the findings of three short runs of the trainer: one process, which saves; another, which continues from there;
    and several with the run's strategy, which take the same steps as one.

    Also return why the rehearsal was not finished, and what it has not checked: "" if it was finished. Each runs in a separate
    process without earlier computations, because code may keep results that it has computed once.
    """
    config, found = build.config, list[Problem]()
    unchecked = _lack_of_memory(build)
    num_threads = 1 if _num_parameters(build) < _FOR_ONE_THREAD else len(cpus())
    announce = cache(
        partial(LOGGER.info, "this run is rehearsed; each part takes at most %.0f s (%s)", _LIMIT_S, _SWITCH)
    )  # once
    works: list[tuple[Callable[[Builder, Any], _Answer], str]] = [
        (lambda small, _: Trial(small).run(), _RESUMES),
        (lambda small, left: (Continuation(small).compare(left), None), _RESUMES),
    ]
    if config.launch.most_processes > 1:
        works.append((lambda small, _: (compare(small), None), _SCALES))
    if unchecked:
        return found, _with_rest(unchecked, works)
    own = config.known_micro_batch_size or -(-config.global_batch_size // config.launch.most_processes)
    few = _FEW if config.micro_batch_size != "auto" else _FEWEST  # there may not be memory for more
    for size in sorted({min(own, few), min(own, _MANY)}):  # as many as in the run, for a model that needs them
        found, left = [], None
        with TemporaryDirectory(prefix="steadfast-") as folder:
            for number, (work, _) in enumerate(works):
                small = _small(build, size=size, folder=folder)
                (more, left), unchecked = _tried(partial(work, small, left), announce, num_threads=num_threads)
                found += more
                if unchecked:
                    return found, _with_rest(unchecked, works[number:])
                if not all(finding.is_warning for finding in found):
                    break
        if all(finding.is_warning for finding in found) or found[-1].key == "rehearse":
            break
    return found, unchecked


def _small(build: Builder, *, size: int, folder: str) -> Builder:
    """Return a builder for a rehearsal in a folder: steps of two micro-batches with `size` samples each."""
    config, turns = build.config, build.config.optimizer.get("turns") or {}
    precision, divergence = config.precision, config.trainer.divergence.model_copy(update={"action": "raise"})
    return build.altered(
        global_batch_size=2 * size,
        micro_batch_size=size,
        drop_last=False,
        rehearse=False,
        trainer=config.trainer.model_copy(update=_SMALL | {"divergence": divergence}),
        checkpoint=config.checkpoint.model_copy(update={"async_save": False, "max_failures": 0, "keep_last": 2}),
        logger={},
        model=config.model | {"init_from": None},
        # a rehearsal has too few steps for a turn that is not in each
        optimizer=config.optimizer | {"turns": {name: turn | {"every": 1} for name, turn in turns.items()}},
        run=config.run.model_copy(update={"dir": folder}),
        # not every CPU supports fp16, and no CPU float8
        precision=precision.model_copy(update={"name": "fp32"}) if precision.name in ("fp16", "float8") else precision,
    )


def _with_rest(why: str, works: Sequence[tuple[object, str]]) -> str:
    return f"{why}; it is not checked whether {' and '.join(dict.fromkeys(checked for _, checked in works))}"


def _num_parameters(build: Builder) -> int:
    return build.summary[0]["parameters"] if build.summary else 0


def _lack_of_memory(build: Builder) -> str:
    """Return why a rehearsal's models would not fit into half of the free memory, or ""."""
    # two models, each with gradients and an optimizer's two numbers for a weight; twice as wide in float64
    needed = 2 * 4 * 4 * (1 if build.config.launch.most_processes == 1 else 2) * _num_parameters(build)
    free = available_memory()
    return f"it would take {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free" if needed > free / 2 else ""


def _tried(work: Callable[[], _Answer], announce: Callable[[], None], *, num_threads: int) -> tuple[_Answer, str]:
    """Return the answer of `work` in a separate process, and why it was not finished, or ""."""

    def answer() -> _Answer:
        torch.set_num_threads(num_threads)
        try:
            return work()
        except Refused as refused:
            return [refused.problem], None

    found = in_child(answer, limit_s=_LIMIT_S, announce=announce)
    if not isinstance(found, ChildFailure):
        return found, ""
    if found.is_unfinished:
        return ([], None), str(found)
    cure = "does a script that trains, saves and restores run? then please report it"
    if found.hangs:
        cure = "a lock or a pool that a fork has copied never answers: make it when a process first uses it"
    return ([Problem("rehearse", f"the rehearsal fails: {found}", cure)], None), ""
