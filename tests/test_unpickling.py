"""Nothing on disk is ever unpickled, or run as a program: read from the sources themselves."""

import ast
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.runtime.torch_compiler import compile_into, has_compiler
from tests.harness import finished
from tests.test_layout import FRAMEWORK, MODELS, ROOT, name
from tests.test_loggers import RUN
from tests.test_resume import preempted

NEEDS_COMPILER = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
END = "\n--- end ---\n"
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {  # whoever's: torch.load, yaml.load, yaml.unsafe_load, pandas.read_pickle, ...
    "load", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "load_all", "read_pickle", "load_state_dict_from_url",
}  # fmt: skip
CONVERT = "extras/convert/__main__.py"  # a program of its own, and no part of a run
CLASSES = {"CIFAR10", "CIFAR100", "FileSystemReader"}  # torchvision's, DCP's: their files are pickles


def faults(source: str) -> list[str]:
    """Return what in a module could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
            found += [module] if module.split(".")[0] in MODULES else []
            found += sorted(names & CALLS) if module in ("torch", "yaml", "numpy") else sorted(names & CLASSES)
        elif isinstance(node, ast.Call):
            found += _faults_of_call(node)
    return found


def _faults_of_call(node: ast.Call) -> list[str]:
    called = ast.unparse(node.func)
    values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and called in BUILTINS:
        return [called]
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in CALLS:
        return []
    if called.split(".")[-1] == "load" and called.split(".")[0] in ("np", "numpy"):
        return [] if values.get("allow_pickle") == "False" else [called]  # it is the default, but let it be seen
    ours = ("dataset.load", "self.load", "self.dataset.load", "build.dataset.load")  # a dataset's own
    ours += (
        "torch.export.load",
    )  # of what framework/modes/export.py has just saved to memory: see the test of what it unpickles
    return [] if called in ours else [called]


def test_no_module_unpickles_or_evaluates() -> None:
    found = {name(path): faults(path.read_text()) for path in [*FRAMEWORK, *MODELS, ROOT / "train.py"]}
    assert {path: faults for path, faults in found.items() if faults} == {}


def test_the_program_that_unpickles_reads_weights_only() -> None:
    calls = [node for node in ast.walk(ast.parse((ROOT / CONVERT).read_text())) if isinstance(node, ast.Call)]
    (load,) = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}["weights_only"] == "True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch; torch.load(p, weights_only=True)", "import dill as d",
        "from torch import load", "import numpy as np; np.load(p)", "np.load(p, allow_pickle=True)", "yaml.load(text, Loader)",
        "eval(text)", "exec(text)", "from torchvision.datasets import CIFAR10", "yaml.unsafe_load(text)", "import joblib",
        "from torch.distributed.checkpoint import FileSystemReader",
    ],
)  # fmt: skip
def test_the_test_finds(source: str) -> None:
    assert faults(source)


def note_unpickling(file: Path) -> Callable[[], None]:
    """Return what makes a command write down every class that is unpickled, in C or in Python, whoever does it."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            with open(file, "a") as found:
                found.write(f"{arguments}\n{''.join(traceback.format_stack())}{END}")

    return lambda: sys.addaudithook(note)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], pytest.param(["trainer.compile=true"], marks=[NEEDS_COMPILER, pytest.mark.slow])], ids=["plain", "compiled"]
)
def test_a_run_its_rehearsal_and_its_continuation_unpickle_nothing(more: list[str], tmp_path: Path) -> None:
    preempted(*RUN, *more, at=6, root=tmp_path / "runs")
    sinks = ["logger=[tensorboard,wandb]", "logger.wandb.mode=offline", "rehearse=true"]
    run = finished(*RUN, *more, *sinks, root=tmp_path / "runs", before=note_unpickling(tmp_path / "found"), with_curves=True)
    assert "continuing from" in run.output
    found = [text for text in (tmp_path / "found").read_text().split(END) if text] if (tmp_path / "found").exists() else []
    # what runs have compiled, in their own folder, is torch's pickles
    strange = [text for text in found if not more or "torch/_inductor" not in text and "torch/_functorch" not in text]
    assert not strange, strange[0]


def test_compiled_programs_in_a_folder_that_others_can_write_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")

    def used() -> str:
        compile_into(tmp_path, num_versions=8)
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    own = used()
    assert Path(own).parent == tmp_path and used() == own
    Path(own).chmod(0o777)
    assert used() != own
