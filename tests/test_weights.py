"""The lines of each package stay within its budget in tests/weights.toml, and a budget is no more than its package needs."""

from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = tomllib.loads((Path(__file__).parent / "weights.toml").read_text())
_SLACK = 60  # lines


def lines_in(folder: Path, *, inner: bool = True) -> int:
    """Return the number of lines of the Python files in a folder, with docstrings and blank lines."""
    paths = folder.rglob("*.py") if inner else folder.glob("*.py")
    return sum(len(path.read_text().splitlines()) for path in paths if "/tests/" not in str(path.relative_to(ROOT)))


@pytest.mark.parametrize("package", BUDGETS["framework"])
def test_a_package_is_within_its_budget(package: str) -> None:
    budget = BUDGETS["framework"][package]
    found = lines_in(ROOT / "framework" / package) if package != "itself" else lines_in(ROOT / "framework", inner=False)
    assert budget - _SLACK <= found <= budget


def test_each_package_has_a_budget() -> None:
    packages = {path.name for path in (ROOT / "framework").iterdir() if (path / "__init__.py").exists()}
    assert packages | {"itself"} == BUDGETS["framework"].keys()


@pytest.mark.parametrize("folder", BUDGETS["others"])
def test_what_is_beside_the_framework_is_within_its_budget(folder: str) -> None:
    lines = (
        sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
        if folder == "tests"
        else lines_in(ROOT / folder)
    )
    assert lines <= BUDGETS["others"][folder]
