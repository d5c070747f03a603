"""What the user's code reads and draws: the files that components read are part of a run's code, and imports draw alike."""

import importlib
import json
import random
import runpy
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
from framework.config.code import FILES_READ, loading
from tests.test_provenance import assert_refused, edit, folder, record, run, stop_after_3  # noqa: F401


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    FILES_READ.clear()
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
    save_file({"a": torch.ones(3)}, "a.safetensors")
    (here / "a.py").write_text("")
    (here / "b.py").write_text("")
    (here / "inner").mkdir()
    with noting_files():
        WAYS[name](here / "inner" / ".." / name)
    found = {**FILES_READ}
    assert found == {f"./{name}": str(here / name)}
    FILES_READ.clear()
    if name != "b.py":
        WAYS[name](here / name)
    assert not FILES_READ, "only what components read"


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
    assert not any(FILES_READ.values())
    FILES_READ["./of_an_earlier_run"] = "of_an_earlier_run"
    with loading():
        assert not FILES_READ


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
