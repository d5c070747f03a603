"""What the documentation says works: every file it shows is written and used, every command it shows is checked."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework import mpi
from framework.launch.start import check
from framework.multirun import read

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "slurm" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every `python train.py ...` of the pages' bash blocks, with the launcher before it if there is one."""
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line.removeprefix("python ") for line in lines if "train.py" in line})


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_documentation_is_a_valid_configuration(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "default" / "ID" / "checkpoints" / "step_00000001").mkdir(parents=True)
    launcher, _, rest = line.partition("train.py")
    overrides = [word for word in shlex.split(rest) if "=" in word]
    if launcher.startswith("mpirun"):
        if "backend=mpi" in overrides and not mpi.is_installed():
            pytest.skip(f"no MPI here: {mpi.INSTALL}")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    lines, problems = [overrides], []
    if "-m" in rest:
        sweep, problems = read(overrides)
        lines = [sweep.line(values) for values in sweep.samples()]
    world_size = 2 if "parallel" in line and "launch" not in line else None
    problems += [problem for overrides in lines for problem in check(overrides, world_size=world_size)[1]]
    problems = [problem for problem in problems if "not found" not in problem.what and problem.key != "dataset.root"]
    assert not problems, problems


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the README's files written into it."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("conf", "framework", "models"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", copy)
    files = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    assert len(files) == 6, "a model, a dataset and a strategy, two files each"
    for name, text in files:
        path = copy / name
        assert not path.exists(), f"{name}: no edit anywhere"
        path.write_text(text)
    return copy


@pytest.mark.parametrize(
    "choice",
    ["model=linear", "dataset=rings model=mlp", "parallel=zero2 launch.nproc_per_node=2"],
)
def test_two_files_add_a_model_a_dataset_or_a_strategy(choice: str, extended: Path, tmp_path: Path) -> None:
    line = [*choice.split(), "trainer.max_epochs=2", f"run.root={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "train.py", *line], cwd=extended, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    assert "test  loss" in done.stdout
