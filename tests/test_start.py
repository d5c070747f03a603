"""What a command costs before its first step, counted: the modules that it imports, the functions that it calls."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import typed
from tests.test_malformed import REPOSITORY

SHORT = ["trainer.max_epochs=null", "trainer.max_steps=1", "trainer.eval_every=null", "model=mlp", "rehearse=false"]
COUNTED = f"""
import json, runpy, sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.argv = ["train.py", *sys.argv[1:]]
sys.setprofile(count)
try:
    runpy.run_path({str(REPOSITORY / "train.py")!r}, run_name="__main__")
finally:
    sys.setprofile(None)
    print(json.dumps([calls, *sys.modules]), file=sys.stderr)
"""
HEAVY = {
    *["torch", "matplotlib", "pandas", "optuna", "sqlalchemy", "submitit", "rich", "fsspec", "s3fs", "datasets", "tokenizers"]
}


def counted(*line: str, directory: Path, program: str = COUNTED) -> tuple[int, set[str]]:
    """Return how many functions of Python a successful command calls, and the modules that it imports."""
    done = subprocess.run([sys.executable, "-c", program, *line], cwd=directory, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    calls, *modules = json.loads(done.stderr.splitlines()[-1])
    return calls, {*modules}


def test_the_package_itself_imports_almost_nothing() -> None:
    program = "import sys; before = {*sys.modules}; import framework; print(*sys.modules.keys() - before)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, text=True, capture_output=True, check=True)
    assert len(done.stdout.split()) < 30


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_imports_neither_torch_nor_hydra(flag: str, tmp_path: Path) -> None:
    calls, modules = counted(flag, directory=tmp_path)
    assert not modules & (HEAVY | {"numpy", "hydra", "omegaconf", "pydantic"})
    assert len(modules) < 280 and calls < 200_000


def test_a_finished_run_imports_no_torch(tmp_path: Path) -> None:
    """The data of the run are compared with its record all the same."""
    assert typed(*SHORT, directory=tmp_path).code == 0
    calls, modules = counted(*SHORT, directory=tmp_path)
    assert not modules & HEAVY and "framework.data.fingerprint" in modules
    assert len(modules) < 700 and calls < 1_100_000


@pytest.mark.slow
def test_a_finished_sweep_imports_no_torch_and_each_further_job_costs_little(tmp_path: Path) -> None:
    of_sweep = dict[int, int]()
    for count in (2, 4):
        line = ["-m", f"seed=range({count})", *SHORT]
        assert typed(*line, directory=tmp_path).code == 0
        of_sweep[count], modules = counted(*line, directory=tmp_path)
        assert not modules & HEAVY
    assert (of_sweep[4] - of_sweep[2]) / 2 < 55_000


USERS = """
import numpy as np
from framework.data.source import Arrays

class Drawn:
    num_workers, task, info = 0, "classification", {"num_features": 3, "num_classes": 2}
    def problems(self): return []
    def load(self, split):
        import torch  # not at the top, as a dataset should
        return Arrays(torch.rand(64, 3).numpy(), torch.randint(2, (64,)).numpy())
    def transform(self, inputs, targets, *, keys): return inputs, targets
"""


@pytest.mark.slow
def test_the_draws_of_a_users_dataset_are_seeded_when_its_finished_run_is_compared(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(USERS)
    (tmp_path / "net.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(3, 2)\n")
    line = ["dataset={_target_: drawn.Drawn}", "model={_target_: net.net}", *SHORT[:3], "rehearse=false"]
    assert typed(*line, directory=tmp_path).code == 0
    uncounted = COUNTED.replace("sys.setprofile(count)", "")  # to count the calls of torch's import takes long
    _, modules = counted(*line, directory=tmp_path, program=uncounted)
    assert "torch" in modules
