"""The architecture, read from the imports: a module imports lower floors only (rules 1 and 2 of the design)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up. A name with a slash at its end is a package; a package's modules may import each other.
FLOORS = [
    ["environment", "log", "keys", "splitmix", "files", "frozen", "outcome", "problems", "secrets", "mesh", "ranges", "signatures", "schema", "validation", "syntax", "streams",
     "config", "sweep_settings", "multirun", "help", "preemption", "parent", "board", "stacks", "verdict", "hang", "mpi", "mpi_buffers", "mpi_work", "mpi_group", "world", "run_directory", "torchvision_import"],
    ["tree", "tree_sum", "shards", "engine", "modules", "optim", "muon", "loss_scale", "gradients", "freezing", "averaging", "divergence", "warm_start", "schedules", "precision", "metrics", "speed", "flops", "progress", "sync_batchnorm", "checkpoint/", "tasks/"],
    ["parallel/", "data/", "loggers/"],
    ["recorder", "evaluation", "trainer", "recovery", "profile", "curves", "sweep_table", "report", "report_page"],
    ["build", "run", "revisit", "restored", "evaluate", "export", "preflight", "processes", "tryout", "slurm", "slurm_preflight", "status"],
    ["launch/"],
]  # fmt: skip
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
PACKAGES_APART = FLOORS[2]  # these never import each other
HYDRA = {"train.py", "framework/config.py"}

FRAMEWORK = sorted((ROOT / "framework").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))


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


def place(dotted: str) -> str | None:
    """Return the name in FLOORS that holds `framework.x.y`; None for what is not the framework's."""
    package, _, rest = dotted.partition(".")
    if package != "framework" or not rest:
        return None
    first = rest.partition(".")[0]
    return f"{first}/" if (ROOT / "framework" / first).is_dir() else first


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "path", [p for p in FRAMEWORK if p.parent != ROOT / "framework" or p.stem != "__init__"], ids=name
)
def test_a_module_imports_lower_floors_only(path: Path) -> None:
    own = place(dotted(path))
    assert own in LEVEL, f"{name(path)} has no floor: give it one in FLOORS"
    for imported in imports(path):
        other = place(imported)
        if other is None or other == own:
            continue
        assert LEVEL[other] <= LEVEL[own], f"{name(path)} imports {imported}, from a floor above it"
        assert not {own, other} <= set(PACKAGES_APART), f"{name(path)} imports {imported}: they are to stay apart"


@pytest.mark.parametrize("level", range(len(FLOORS)))
def test_the_readme_draws_every_module_on_its_floor(level: int) -> None:
    drawing = (ROOT / "README.md").read_text().partition("## Architecture")[2]
    drawn = re.search(rf"^F{level} .*(?:\n .*)*", drawing, flags=re.MULTILINE)
    assert drawn and set(FLOORS[level]) <= set(drawn[0].split())


@pytest.mark.parametrize("path", [*FRAMEWORK, ROOT / "train.py"], ids=name)
def test_nothing_imports_models(path: Path) -> None:
    assert not [imported for imported in imports(path) if imported.split(".")[0] == "models"]


@pytest.mark.parametrize("path", MODELS, ids=name)
def test_a_model_imports_torch_and_itself(path: Path) -> None:
    allowed = {"torch", "torchvision", "models", *STANDARD_LIBRARY}
    assert {imported.split(".")[0] for imported in imports(path)} <= allowed


STANDARD_LIBRARY = {
    "math",
    "typing",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "difflib",
    "re",
    "__future__",
}


@pytest.mark.parametrize("path", [*FRAMEWORK, *MODELS, ROOT / "train.py"], ids=name)
def test_hydra_is_in_three_files(path: Path) -> None:
    uses = {imported for imported in imports(path) if imported.split(".")[0] in ("hydra", "omegaconf")}
    assert not uses or name(path) in HYDRA


@pytest.mark.parametrize("path", [*FRAMEWORK, *MODELS, ROOT / "train.py"], ids=name)
def test_environment_variables_are_read_in_one_file(path: Path) -> None:
    assert uses_environment(path) == set() or name(path) == "framework/environment.py"


def uses_environment(path: Path) -> set[str]:
    attributes: Iterator[ast.AST] = ast.walk(ast.parse(path.read_text()))
    return {node.attr for node in attributes if isinstance(node, ast.Attribute)} & {"environ", "getenv", "putenv"}


@pytest.mark.parametrize("path", [*FRAMEWORK, *MODELS, ROOT / "train.py"], ids=name)
def test_a_file_opens_with_what_it_holds(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
