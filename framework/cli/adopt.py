"""`steadfast adopt MODULE:MODEL`: write the file that makes a class a model of the project, and test each strategy with it."""

import inspect
import math
import os
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from framework.cli.run import checked_line
from framework.config.compose import compose_line
from framework.config.folders import option_node, options, own_folder
from framework.config.targets import locate, signature_of
from framework.config.validation import validate
from framework.distributed.mesh import MESH_AXES
from framework.launch.claim import print_problems
from framework.runtime.exits import Exit
from framework.runtime.files import write_atomically
from framework.runtime.log import start_console
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem

_USAGE = "needs a model (steadfast adopt MODULE:MODEL [group=option ...] [key=value ...])"
_NOT_TRIED = ("auto", "single")


def adopt(arguments: list[str]) -> int:
    """Write the option of a model, and print for each strategy whether it supports the model, or why not.

    Return the exit code. An existing file is not changed. The other arguments are for the runs that are tried (`dataset=...`).
    """
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        return print_problems([Problem("adopt", _USAGE)])
    start_console(rank=0)
    PREEMPTION.watch()
    target = _dotted(arguments[0])
    try:
        text = _option(target, facts=_facts(arguments[1:]))
    except ValueError as error:
        return print_problems([Problem("adopt", str(error), "MODULE:MODEL, as in mynet:Net or mypackage/net.py:Net")])
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z]{2})", "_", target.rpartition(".")[2]).lower()
    file = Path(os.path.relpath(own_folder() or "conf"), "model", f"{name}.yaml")
    if file.exists():
        print(f"{file} exists already, and is not changed")
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
        print(f"{file}:\n{text}")
    line = [f"model={name}", *arguments[1:]]
    if problems := _problems([*line, "parallel=single", "launch.nproc_per_node=1"]):
        print("before any strategy:", flush=True)
        return print_problems(problems)
    print(f"`steadfast {shlex.join(line)}` trains it. Each strategy, on a batch of the data and on two processes:", flush=True)
    for strategy in [name for name in options("parallel") if name not in _NOT_TRIED]:
        fitting = _fitting(strategy)
        problems = _problems([*fitting, *line, f"parallel={strategy}", f"launch.nproc_per_node={_num_processes(strategy)}"])
        yes = f"yes, with {' '.join(fitting)}" if fitting else "yes"
        print(f"  {strategy:18}{'not yet:' if problems else yes}", flush=True)
        for problem in problems:
            print(f"      {problem}", flush=True)
    return Exit.FINISHED


def _dotted(text: str) -> str:
    """Return the dotted path of `module:Name`, `folder/file.py:Name` or `module.Name`."""
    module, colon, name = text.partition(":")
    if module.endswith(".py"):
        module = ".".join(Path(os.path.relpath(module.removesuffix(".py"))).parts)  # the project's folder is on Python's path
    return f"{module}.{name}" if colon else text


def _facts(overrides: list[str]) -> set[str]:
    """Return the arguments that the dataset of the tried runs provides, under every name. Return none if the dataset fails."""
    from framework.build.components import ALIASES, dataset

    config = validate(compose_line(overrides)).config
    try:
        info = {} if config is None else dataset(config.dataset).info
    except Exception:  # a tried run reports the error
        return set()
    return {name for fact in info for name in (fact, *ALIASES.get(fact, ()))}


def _option(target: str, *, facts: set[str]) -> str:
    """Return the text of the option's file: every argument that plain data can give, with its default. Raise ValueError."""
    from torch import nn

    found, signature = locate(target), signature_of(target, group="model")
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ValueError(f"{target} is a class, but not a torch.nn.Module")
    summary = (found.__doc__ or "").strip().partition("\n")[0]
    lines = [*([f"# {summary}"] if summary else []), f"_target_: {target}"]
    lines += [line for name, argument in signature.arguments.items() for line in _line(name, argument, facts)]
    return "\n".join(lines) + "\n"


def _line(name: str, argument: inspect.Parameter, facts: set[str]) -> Iterator[str]:
    kind = "" if argument.annotation is argument.empty else f": {inspect.formatannotation(argument.annotation)}"
    key = _in_yaml(name)  # YAML reads some names, such as `yes`, as another value
    if name in facts:
        yield f"{key}: null # from the data"
    elif argument.default is argument.empty:
        yield f"{key}: ??? # it has no default{kind}"
    elif _is_plain(argument.default):
        yield f"{key}: {_in_yaml(_escaped(argument.default))}"


def _escaped(value: Any) -> Any:
    """Return plain data whose texts are no interpolations: a text with `${` stays this text."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _in_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or (type(value) in (bool, int, float, str) and value != "???")  # in YAML, ??? is a missing value


def _fitting(strategy: str) -> list[str]:
    """Return other defaults for a strategy with processes that agree only from time to time."""
    every = option_node("parallel", strategy).get("sync_every")
    steps = every * math.ceil(100 / every) if isinstance(every, int) else 100
    return [] if steps == 100 else [f"trainer.eval_every={steps}", f"checkpoint.every={steps}"]


def _num_processes(strategy: str) -> int:
    """Return the fewest processes, at least two, for the mesh sizes in the strategy's option. Return one without a mesh."""
    node = option_node("parallel", strategy)
    sizes = [node[name] or 1 for name in MESH_AXES if name in node]
    return max(2, math.prod(sizes)) if sizes else 1


def _problems(line: list[str]) -> list[Problem]:
    """Return the problems of a command, found by a rehearsal."""
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.preflight.child import problems_in_child
    from framework.preflight.dry_build import dry_build
    from framework.preflight.rehearsal import perform

    draft = checked_line(line)
    if draft.config is None:
        return draft.problems
    if problems := problems_in_child(partial(dry_build, draft.config)):
        return problems
    findings, fate = perform(Builder(draft.config, world=World.alone()))
    problems = [Problem(finding.key, finding.what, finding.cure) for finding in findings if finding.refuses]
    return problems or ([Problem("rehearse", f"the rehearsal was not finished: {fate}")] if fate else [])
