"""Which answers the framework's questions about a tensor's device have had: of each `device.type == "cuda"` and `is_cuda`.

`install()` rewrites the framework's modules as they are imported, so that each such question notes its answer; a line of
coverage could not tell which part of a conditional expression was taken.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType
from typing import Any

FRAMEWORK = Path(__file__).resolve().parent.parent / "framework"
ANSWERS: defaultdict[str, set[bool]] = defaultdict(set)


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        words = [side.value for side in (node.left, *node.comparators) if isinstance(side, ast.Constant)]
        kinds = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Attribute) and side.attr == "type"]
        return bool(kinds) and bool({"cuda", "cpu"} & set(words))
    return isinstance(node, ast.Attribute) and node.attr == "is_cuda"


def _name(path: Path, node: Any) -> str:
    return f"{path.relative_to(FRAMEWORK.parent).as_posix()}: {ast.unparse(node)} (line {node.lineno})"


def questions() -> set[str]:
    """Return all of them, by file and expression."""
    files = {path: ast.parse(path.read_text()) for path in FRAMEWORK.rglob("*.py")}
    return {_name(path, node) for path, tree in files.items() for node in ast.walk(tree) if _asks(node)}


class _Noting(ast.NodeTransformer):
    def __init__(self, path: Path) -> None:
        self._path = path

    def visit(self, node: ast.AST) -> Any:
        if not _asks(node):
            return self.generic_visit(node)
        call = ast.Call(ast.Name("_note_answer", ast.Load()), [ast.Constant(_name(self._path, node)), node], [])  # type: ignore[arg-type,list-item]
        return ast.copy_location(call, node)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname)).resolve()
        tree = ast.fix_missing_locations(_Noting(path).visit(ast.parse(path.read_text())))
        code: CodeType = compile(tree, str(path), "exec")
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "framework":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _note(name: str, answer: Any) -> Any:
    ANSWERS[name].add(bool(answer))
    return answer


def install() -> None:
    """Before anything imports the framework."""
    assert not any(name.partition(".")[0] == "framework" for name in sys.modules)
    builtins._note_answer = _note  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())
