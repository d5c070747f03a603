"""What the user's code reads and draws: the files that components read are part of a run's code, and imports draw alike."""

import importlib
import json
import os
import random
import re
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.build.user_code import noting_files, seed_imports
from framework.config.code import loading
from framework.config.files_read import files_read, forget, note
from framework.runtime.environment import Environment
from tests.harness import together
from tests.test_provenance import assert_refused, edit, folder, record, run, stop_after_3  # noqa: F401
from tests.test_resume import after_step


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    return tmp_path


def by_spec(path: Path) -> None:
    spec = spec_from_file_location("of_this_file", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))


WAYS: dict[str, Callable[[Path], object]] = {  # the ways to read a file
    "a.json": lambda path: json.loads(path.read_text()),
    "a.npy": np.load,
    "a.bin": np.fromfile,
    "a.pt": torch.load,
    "a.safetensors": load_file,
    "b.pt": lambda path: torch.load(path, mmap=True),
    "a.py": lambda path: runpy.run_path(str(path)),
    "b.py": by_spec,
}


@pytest.mark.parametrize("name", WAYS)
def test_a_file_that_is_read_is_noted(name: str, here: Path) -> None:
    seed_imports()
    (here / "a.json").write_text("1")
    np.save("a.npy", np.ones(3))
    np.ones(3).tofile("a.bin")
    torch.save(torch.ones(3), "a.pt")
    torch.save(torch.ones(3), "b.pt")
    save_file({"a": torch.ones(3)}, "a.safetensors")
    (here / "a.py").write_text("")
    (here / "b.py").write_text("")
    (here / "inner").mkdir()
    with noting_files():
        WAYS[name](here / "inner" / ".." / name)
    assert files_read() == {f"./{name}": str(here / name)}
    forget()
    if name != "b.py":
        WAYS[name](here / name)
    assert not files_read(), "only what components read"


def test_a_file_that_is_written_too_hidden_or_of_the_machine_is_not_noted(here: Path) -> None:
    (here / ".git" / "refs").mkdir(parents=True)
    for path in (here / ".git" / "refs" / "main", here / "counter", here / "log", here / "lock"):
        path.write_text("1")
    with noting_files():
        assert (here / "counter").read_text() == "1"
        (here / "counter").write_text("2")
        (here / "counter").read_text()
        with open("log", "a+") as file:
            file.read()
        (here / ".git" / "refs" / "main").read_text()
        Path("/etc/hostname").read_text()
        Path(np.__file__).read_text()
        Path(__file__).read_text()  # a module's source, as inspect reads it
        with pytest.raises(FileNotFoundError):
            open("missing")
        of_another_thread = threading.Thread(target=(here / "lock").read_text)
        of_another_thread.start()
        of_another_thread.join()
    assert not files_read()
    note("./of_an_earlier_run", __file__, is_written=False)
    with loading():
        assert not files_read()


def test_an_import_draws_the_same_each_time_and_moves_no_generator(here: Path) -> None:
    seed_imports()
    (here / "inner.py").write_text("import random\nX = random.random()\n")
    (here / "outer.py").write_text(
        "import numpy, torch\nimport inner\nX = [float(numpy.random.rand()), float(torch.rand(()))]\n"
    )
    found, states = list[object](), [random.getstate(), torch.get_rng_state().tolist()]
    for first in ("inner", "outer", "inner"):
        importlib.import_module(first)
        found.append((importlib.import_module("inner").X, *importlib.import_module("outer").X))
        assert states == [random.getstate(), torch.get_rng_state().tolist()]
        torch.manual_seed(len(found))
        random.seed(len(found))
        states = [random.getstate(), torch.get_rng_state().tolist()]
        for name in ("inner", "outer"):
            del sys.modules[name]
    assert len({*found}) == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", [["parallel=ddp", "launch.nproc_per_node=2"], []], ids=["ddp", "single"])
def test_a_run_does_not_go_on_if_a_file_that_its_model_has_read_is_another(strategy: list[str], folder: Path) -> None:  # noqa: F811
    (folder / "width.json").write_text("12")
    edit(folder, "    return 12\n", "    return json.load(open('width.json'))\n", file="helpers.py")
    edit(folder, "def width", "import json\n\n\ndef width", file="helpers.py")
    assert run(folder, *strategy, before=stop_after_3).code == 75
    (folder / "width.json").write_text("12\n")
    assert_refused(run(folder, *strategy), "run.code: ... ./width.json has other content ... run.code=accept ...")
    (folder / "width.json").write_text("12")
    (folder / "moved.json").write_text("12")
    edit(folder, "json.load(open('width.json'))", "json.load(open('moved.json'))", file="helpers.py")
    ended = run(folder, *strategy, "run.code=accept")
    assert ended.code == 0 and "continuing from" in ended.output
    (folder / "width.json").unlink()
    assert run(folder, *strategy).code == 0, "a file that is gone is no other file"
    (folder / "moved.json").write_text("12 ")
    assert_refused(run(folder, *strategy), "run.code: ... ./moved.json has other content ...")
    assert "./moved.json" in record(ended)["starts"][-1]["loaded"]


def reading_late(folder: Path) -> None:  # noqa: F811
    """Let the model read a file when it is built, and import a module in its first forward, by a name that no source has."""
    (folder / "width.json").write_text("12")
    (folder / "late.py").write_text("def act(x):\n    return x.tanh()\n")
    edit(folder, "    return 12\n", "    return json.load(open('width.json'))\n", file="helpers.py")
    edit(folder, "def width", "import json\n\n\ndef width", file="helpers.py")
    edit(folder, "import torch\n", "import importlib\n\nimport torch\n")
    edit(folder, "torch.tanh(", "importlib.import_module('la' + 'te').act(")


EDITS = {"width.json": ("12", "12 "), "late.py": ("tanh", "relu")}


@pytest.mark.quick(1)
@pytest.mark.parametrize("file", EDITS)
def test_what_is_edited_while_a_run_runs_counts_as_it_was_read(file: str, folder: Path) -> None:  # noqa: F811
    reading_late(folder)
    edited = after_step(2, lambda: edit(folder, *EDITS[file], file=file))
    assert run(folder, "checkpoint.every=null", before=together(edited, stop_after_3)).code == 75
    assert_refused(run(folder), f"run.code: ... {file} ...")
    edit(folder, *reversed(EDITS[file]), file=file)
    assert run(folder).code == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("file", EDITS)
def test_a_worker_that_is_started_again_does_not_go_on_with_another_file(file: str, folder: Path) -> None:  # noqa: F811
    reading_late(folder)

    def edit_and_die() -> None:
        if Environment.read().rank == 0 and not (folder / "killed").exists():
            (folder / "killed").touch()
            edit(folder, *EDITS[file], file=file)
            os.kill(os.getpid(), signal.SIGKILL)

    ended = run(folder, "parallel=ddp", "launch.nproc_per_node=2", before=after_step(3, edit_and_die))
    assert ended.code == 78 and "restart 1 of 3" in ended.output, ended.output
    assert re.search(rf"run.code: .*{file}", ended.output)


def test_a_schedule_an_optimizer_and_a_sampler_read_files_that_are_code_too(folder: Path) -> None:  # noqa: F811
    for name in ("lr", "momentum", "first"):
        (folder / f"{name}.json").write_text("0.5")
    (folder / "reading.py").write_text(READING)
    words = ["scheduler._target_=reading.Half", "scheduler.every=step", "optimizer._target_=reading.Momentum", "optimizer.lr=0.01",
             "sampler._target_=reading.Backwards"]  # fmt: skip
    assert run(folder, *words, before=stop_after_3).code == 75
    for name in ("lr", "momentum", "first"):
        (folder / f"{name}.json").write_text("0.25")
        assert_refused(run(folder, *words), f"run.code: ... ./{name}.json has other content ...")
        (folder / f"{name}.json").write_text("0.5")
    assert run(folder, *words).code == 0


READING = """
import json
import numpy as np
import torch


class Half(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer):
        share = json.load(open("lr.json"))
        super().__init__(optimizer, lambda step: share)


class Momentum(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=json.load(open("momentum.json")))


class Backwards:
    def __init__(self):
        self.first = json.load(open("first.json"))

    def epoch(self, epoch, source, seed):
        return np.arange(len(source))[::-1].copy()
"""
