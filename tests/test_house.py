"""The numbers that keep the house in order, printed and held: `python tests/test_house.py` prints them."""

import ast
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SOURCES = sorted([*(ROOT / "framework").rglob("*.py"), *(ROOT / "models").rglob("*.py"), ROOT / "train.py"])


def functions() -> Iterator[ast.FunctionDef]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node


def longest_file() -> int:
    return max(len(path.read_text().splitlines()) for path in SOURCES)


def num_lines() -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / "framework").rglob("*.py"))


def trainer_parameters() -> int:
    from framework.training.loop import Trainer

    return len(inspect.signature(Trainer).parameters)


def looked_up_by_name() -> list[str]:
    """Where a field of the configuration is looked up by its name: `config["run"]`, `.get("run")`, whatever holds it."""
    from framework.config.schema import RunConfig

    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript):
                key: ast.expr | None = node.slice
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "setdefault", "pop")
            ):
                key = node.args[0] if node.args else None
            else:
                continue
            if isinstance(key, ast.Constant) and key.value in RunConfig.model_fields:
                found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
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


def way_to_backward(folder: Path) -> list[tuple[str, str, int]]:
    """Run the command, and return rank 0's stack at its first `loss.backward()`: of each of our functions file, name, lines."""
    import torch

    from tests.harness import typed

    def plant() -> None:
        original = torch.Tensor.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
            ours = [frame.f_code for frame in frames if frame.f_code.co_filename.startswith(f"{ROOT}/framework/")]
            way = [(code.co_filename, code.co_name, len(inspect.getsourcelines(code)[0])) for code in ours]
            (folder / f"way_{os.environ['RANK']}.json").write_text(json.dumps(way))
            original(*args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]

    words = ["parallel=fsdp", "launch.nproc_per_node=2", "trainer.max_steps=1", "rehearse=false"]
    ended = typed(*words, directory=folder, before=plant)
    assert ended.code == 0, ended.output
    entry = (str(ROOT / "train.py"), "train.py", len((ROOT / "train.py").read_text().splitlines()))
    return [entry, *map(tuple, json.loads((folder / "way_0.json").read_text()))]


def test_no_file_is_long() -> None:
    assert longest_file() <= 300


def test_the_trainer_takes_few_parts() -> None:
    assert trainer_parameters() <= 10


def test_the_configuration_is_typed() -> None:
    assert len(looked_up_by_name()) <= 10, looked_up_by_name()
    assert len(takers_of_the_whole()) <= 5


def test_one_word_has_one_meaning() -> None:
    assert homonyms() == {}


def test_the_way_from_the_command_to_backward_is_short(tmp_path: Path) -> None:
    way = way_to_backward(tmp_path)
    assert len({file for file, _, _ in way}) <= 7, way
    assert sum(lines for _, _, lines in set(way)) <= 650


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        way = way_to_backward(Path(name))
    print(f"from the command to backward    {len({file for file, _, _ in way})} files, {sum(n for *_, n in set(way))} lines")
    print(f"longest file                    {longest_file()} lines")
    print(f"parameters of Trainer           {trainer_parameters()}")
    print(f'config["..."]                   {looked_up_by_name()}')
    print(f"functions that take the whole   {len(takers_of_the_whole())}: {', '.join(takers_of_the_whole())}")
    print(f"words with several meanings     {len(homonyms())}")
    print(f"lines of framework/             {num_lines()}")
