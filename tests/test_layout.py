"""The rules of the layout, read from the imports and the sources."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HYDRA = {
    "train.py",
    "framework/cli/callbacks.py",
    "extras/adopt/program.py",  # composes another program
    *(f"framework/sweep/{part}.py" for part in ("line", "launchers", "other_sweeper")),
    *(
        f"framework/config/{part}.py"
        for part in ("compose", "hydra_compose", "hydra_settings", "folders", "overrides", "targets")
    ),
}

FRAMEWORK = sorted((ROOT / "framework").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))
EXTRAS = sorted(
    path
    for path in (ROOT / "extras").rglob("*.py")
    if "tests" not in path.relative_to(ROOT).parts and path.name != "conftest.py"
)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands, also for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if is_module(f"{node.module}.{alias.name}")}
    return found


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_packages_import_what_the_street_plan_allows() -> None:
    """The plan is import-linter's contracts in pyproject.toml."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def importing(roots: set[str], paths: list[Path]) -> list[str]:
    return [name(path) for path in paths if {imported.split(".")[0] for imported in imports(path)} & roots]


def test_no_module_is_asked_for_parameters_by_a_method_that_its_class_may_replace() -> None:
    paths = [path for path in FRAMEWORK if "preflight" not in path.parts]
    assert [name(path) for path in paths if re.search(r"(?<!nn\.Module)\.parameters\(", path.read_text())] == []


def test_an_extra_imports_of_the_framework_what_the_page_about_your_own_code_names() -> None:
    page = (ROOT / "docs" / "extend.md").read_text()
    rows = re.findall(r"^\| `(framework[\w.]*)` \| (.*?) \|", page, re.MULTILINE)
    public = {(module, imported) for module, names in rows for imported in re.findall(r"`(\w+)`", names)}
    used = {
        (node.module, alias.name)
        for path in EXTRAS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "framework"
        for alias in node.names
    }
    assert used == public


def test_a_model_imports_torch_and_itself() -> None:
    others = {imported.split(".")[0] for path in MODELS for imported in imports(path)}
    assert others - {"torch", "torchvision", "models", *STANDARD_LIBRARY} == set()


STANDARD_LIBRARY = {"math", "typing", "collections", "dataclasses", "functools", "itertools", "difflib", "re", "__future__"}


def test_hydra_is_in_few_files() -> None:
    found = importing({"hydra", "omegaconf"}, [*FRAMEWORK, *MODELS, *EXTRAS, ROOT / "train.py"])
    assert set(found) - HYDRA == set()


def test_environment_variables_are_read_in_one_file() -> None:
    found = [name(path) for path in [*FRAMEWORK, *MODELS, ROOT / "train.py"] if uses_environment(path)]
    assert found == ["framework/runtime/environment.py"]


def uses_environment(path: Path) -> set[str]:
    attributes: Iterator[ast.AST] = ast.walk(ast.parse(path.read_text()))
    return {node.attr for node in attributes if isinstance(node, ast.Attribute)} & {"environ", "getenv", "putenv"}


def test_a_file_opens_with_what_it_holds() -> None:
    paths = [*FRAMEWORK, *MODELS, *EXTRAS, ROOT / "train.py"]
    assert [name(path) for path in paths if not ast.get_docstring(ast.parse(path.read_text()))] == []
