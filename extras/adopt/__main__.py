"""`steadfast adopt MODULE:MODEL`: write the option of a model, and let `mode=check` try each strategy with it.

`steadfast adopt configs/train.yaml` writes an experiment instead, from a program like lightning-hydra-template.
"""

import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

STRATEGIES = ["ddp", "zero", "fsdp", "tensor", "pipeline", "context", "expert"]
GROUPS = {"LightningModule": "task", "LightningDataModule": "dataset", "Module": "model"}  # by the name of a base class
OF_DATA = {"num_classes", "in_channels", "image_size", "vocab_size", "seq_len", "num_labels", "in_chans", "img_size"}


def main(arguments: list[str]) -> int:
    """Write an option for each class, unless its file exists, and print what each strategy says. Return the exit code.

    The other arguments are those of the checked runs, or those of the adopted program: `dataset=... parallel=ddp,fsdp`.
    """
    classes = list(itertools.takewhile(lambda word: word[0] not in "-~+" and "=" not in word, arguments))
    if not classes:
        _refuse("adopt: needs a model (steadfast adopt MODULE:MODEL [group=option ...] [key=value ...])")
    words = arguments[len(classes) :]
    chosen = [word.removeprefix("parallel=").split(",") for word in words if word.startswith("parallel=")]
    words = [word for word in words if not word.startswith("parallel=")]
    if classes[0].endswith((".yaml", ".yml")):
        line = [_adopt_program(Path(classes[0]), words)]
    else:
        line = [*map(_adopt, classes), *words]
    if problems := _check([*line, "parallel=single", "launch.nproc_per_node=1", "launch.nnodes=1"]):
        _refuse(f"before any strategy:\n{problems}")
    print(f"`steadfast {shlex.join(line)}` trains it. Each strategy, on a batch of the data and on two processes:", flush=True)
    for strategy in chosen[-1] if chosen else STRATEGIES:
        problems = _check([*line, f"parallel={strategy}", "launch.nproc_per_node=2"])
        print(f"  {strategy:18}{'not yet:' if problems else 'yes'}", *problems.splitlines(), sep="\n      ", flush=True)
    return 0


def _refuse(why: str) -> NoReturn:
    """End as every command does whose words are wrong."""
    print(why, file=sys.stderr)
    sys.exit(78)


def _adopt(word: str) -> str:
    """Write the option of a class, `MODULE:NAME`. Return the choice of this option."""
    module, _, name = word.partition(":")
    module = module.removesuffix(".py").replace(os.sep, ".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module's own code runs
        _refuse(f"adopt: {type(error).__name__}: {error} (MODULE:MODEL, as in mynet:Net or mypackage/net.py:Net)")
    group = next((group for base in getattr(found, "__mro__", ()) if (group := GROUPS.get(base.__name__))), "")
    if not group:
        _refuse(f"adopt: {module}.{name} is not a class of torch.nn.Module, LightningModule or LightningDataModule")
    option = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z]{2})", "_", name).lower()
    return _written(group, option, _option(found, group))


def _adopt_program(file: Path, overrides: list[str]) -> str:
    """Write the experiment of a Hydra program for Lightning. Return the choice of this experiment."""
    from extras.adopt.program import experiment_of

    try:
        name, text, search = experiment_of(file, overrides)
    except Exception as error:  # Hydra's, or of a resolver of the program
        causes = [error, error.__cause__] if error.__cause__ is not None else [error]
        _refuse(f"adopt: {file}: {'; '.join(' '.join(str(cause).split()) for cause in causes)}")
    choice = _written("experiment", name, text)
    if search:
        print(f"its search is: steadfast {choice} {shlex.join(search)}\n")
    return choice


def _written(group: str, option: str, text: str) -> str:
    """Write the file of an option, unless it exists. Return the choice of this option."""
    file = Path(os.environ.get("STEADFAST_CONF", "conf"), group, f"{option}.yaml")
    if file.exists():
        print(f"{file} exists already, and is not changed")
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        print(f"{file}:\n{text}")
    return f"{group}={option}"


def _check(line: list[str]) -> str:
    """Return the problems of a run, as `mode=check` prints them."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))  # also in a checkout
    command = [sys.executable, "-m", "framework", "mode=check", *line]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    return done.stderr if done.returncode else ""


def _option(found: type, group: str) -> str:
    """Return the text of the option's file: every argument that plain data can give, with its default."""
    summary = (found.__doc__ or "").strip().partition("\n")[0] if "__doc__" in vars(found) else ""
    arguments = (line for argument in inspect.signature(found).parameters.values() for line in _line(argument))
    lines = [f"_target_: {found.__module__}.{found.__qualname__}", *arguments]
    if group != "model":
        lines = ["defaults: [lightning, _self_]", "module:", *(f"  {line}" for line in lines)]
    return "\n".join([*([f"# {summary}"] if summary else []), *lines]) + "\n"


def _line(argument: inspect.Parameter) -> Iterator[str]:
    key = _in_yaml(argument.name)  # YAML reads some names, such as `yes`, as another value
    if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
        return
    if argument.default is argument.empty or argument.name in OF_DATA:
        yield f"# {key}: from the data, or write a value"
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
