"""The numbers that keep the house in order."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "framework").rglob("*.py"), *(ROOT / "models").rglob("*.py"), ROOT / "train.py"])


def functions() -> Iterator[ast.FunctionDef]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node


def looked_up_by_name(source: str) -> list[str]:
    """Return where a module asks a checked configuration for a field by its name: `config["run"]`, `self.config.get("run")`."""
    from framework.config.schema import RunConfig

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript):
            holder, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder, key = node.func.value, node.args[0]
        else:
            continue
        if (
            isinstance(key, ast.Constant)
            and key.value in RunConfig.model_fields
            and ast.unparse(holder).split(".")[-1] == "config"
        ):
            found.append(ast.unparse(node))
    return found


def takers_of_the_whole() -> list[str]:
    """The functions that take a whole RunConfig, but for its own methods."""
    from framework.config.schema import RunConfig

    found = []
    for node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if any(one.annotation is not None and "RunConfig" in ast.unparse(one.annotation) for one in arguments):
            found.append(node.name)
    return [name for name in found if name == "__init__" or not hasattr(RunConfig, name)]


def homonyms() -> dict[str, list[str]]:
    """The public names that are defined at the top of several modules, but for what every strategy may have."""
    questions = ("problems", "exact_options", "REMEDIES")
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = (
                [node.name]
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                else [getattr(one, "id", "_") for one in targets]
            )
            for name in names if path.is_relative_to(ROOT / "framework") else ():
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: found for name, found in places.items() if len(found) > 1 and name[0] != "_" and name not in questions}


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_the_trainer_takes_few_parts() -> None:
    from framework.training.loop import Trainer

    assert len(inspect.signature(Trainer).parameters) <= 10


def test_the_configuration_is_typed() -> None:
    assert len(looked_up_by_name('seed = run.config["seed"]; mode = config.get("mode")')) == 2
    paths = [path for path in SOURCES if path.parent.name != "config"]  # where it is checked
    assert {
        str(path.relative_to(ROOT)): looked_up_by_name(path.read_text())
        for path in paths
        if looked_up_by_name(path.read_text())
    } == {}
    assert len(takers_of_the_whole()) <= 5


def test_one_word_has_one_meaning() -> None:
    assert homonyms() == {}
