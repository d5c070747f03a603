"""Code is part of a run: a record of each start, and no run goes on, or counts as finished, with other code unless it is accepted."""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import framework.runs.provenance
from extras.loggers.tests.records import OFFLINE, wandb_files, wandb_records
from framework.api import ConfigurationError, compose
from framework.cli.run import checked_line
from framework.config.code import changed, code_of, functions_of
from framework.config.folders import ROOT
from framework.runs.provenance import Provenance, git_state
from framework.runtime.log import LOGGER
from tests.harness import Ended, Says, typed
from tests.test_resume import after_step, preempt

NET = '''"""A model."""

import torch
from torch import nn

from helpers import width


class Net(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.first, self.last = nn.Linear(192, width()), nn.Linear(width(), num_classes)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))
'''
LINE = ["model=net", "dataset=synthetic", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8",
        "global_batch_size=8", "trainer.max_epochs=null", "trainer.max_steps=6", "checkpoint.every=2", "rehearse=false"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "net.yaml").write_text("_target_: net.Net\n")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "helpers.py").write_text("def width():\n    return 12\n")
    return tmp_path


def run(folder: Path, *words: str, **options: Any) -> Ended:
    return typed(*LINE, *words, directory=folder, **options)


def edit(folder: Path, old: str, new: str, *, file: str = "net.py") -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


stop_after_3 = after_step(3, preempt)


def assert_refused(ended: Ended, said: str) -> None:
    assert ended.code == 78 and ended.output == Says(said), ended.output


def record(ended: Ended) -> dict[str, Any]:
    return json.loads((ended.directory / "provenance.json").read_text())


@pytest.mark.slow
def test_a_finished_run_with_other_code_is_not_finished(folder: Path) -> None:
    assert run(folder).code == 0
    edit(folder, "torch.tanh", "torch.relu")
    assert_refused(run(folder), "run.code: ... net.py: Net.forward ... run.resume=never ... run.code=accept ...")
    accepted = run(folder, "run.code=accept")
    assert accepted.code == 0 and "finished already" in accepted.output
    assert record(accepted)["starts"][-1]["accepted"] == ["net.py: Net.forward"]
    assert run(folder).code == 0, "it is not asked for again"
    anew = run(folder, "run.resume=never")
    assert anew.code == 0 and "finished already" not in anew.output
    edit(folder, "torch.relu", "torch.tanh")
    assert run(folder).code == 78, "the run that was started over is the other code's"


def test_a_run_does_not_go_on_with_other_code_unless_it_is_accepted_and_recorded(folder: Path) -> None:
    begun = run(folder, "trainer.max_steps=6", before=stop_after_3)
    assert begun.code == 75, begun.output
    edit(folder, "return 12", "return 6 * 2", file="helpers.py")
    assert_refused(run(folder), "run.code: ... helpers.py: width ...")
    ended = run(folder, "run.code=accept")
    assert ended.code == 0 and "continuing from" in ended.output
    starts = record(ended)["starts"]
    assert [start.get("accepted") for start in starts] == [None, ["helpers.py: width"]]
    assert run(folder).code == 0, "what was accepted is the run's code now"


def test_code_is_followed_through_texts_that_name_modules(folder: Path) -> None:
    (folder / "acts").mkdir()
    for name in ("first", "second"):
        (folder / "acts" / f"{name}.py").write_text("def act(x):\n    return x.tanh()\n")
    edit(folder, "return self.last(", 'x = importlib.import_module("acts.first").act(x)\n        return self.last(')
    edit(folder, "import torch\n", "import importlib\n\nimport torch\n")
    edit(folder, "num_classes: int = 10", 'num_classes: int = 10, act="none"')
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: net.Net\nact: acts.second.act\n")
    assert run(folder).code == 0
    for name in ("first", "second"):
        edit(folder, "tanh", "sigmoid", file=f"acts/{name}.py")
        assert run(folder).output == Says(f"run.code: ... acts/{name}.py: act ...")
        edit(folder, "sigmoid", "tanh", file=f"acts/{name}.py")


@pytest.mark.slow
def test_evaluations_with_other_code_are_warned_of(folder: Path) -> None:
    ended = run(folder)
    edit(folder, "torch.tanh", "torch.relu")
    evaluated = typed("mode=eval", f"run.dir={ended.directory}", directory=folder)
    assert evaluated.code == 0
    assert "the code has changed since the run's last start: net.py: Net.forward" in evaluated.output


@pytest.mark.slow
def test_a_sweep_shows_the_runs_that_other_code_began_and_starts_none(folder: Path) -> None:
    sweep = ["-m", "seed=0,1"]
    assert run(folder, "seed=0").code == 0
    edit(folder, "torch.tanh", "torch.relu")
    before = sorted(folder.glob("runs/*/*"))
    plan = run(folder, "mode=plan", *sweep)
    assert [line.split()[1] for line in plan.output.splitlines()[:2]] == ["stale", "missing"]
    assert_refused(run(folder, *sweep), "run.code: 1 of 2 runs ... net.py: Net.forward ... run.code=accept ...")
    assert sorted(folder.glob("runs/*/*")) == before
    assert run(folder, *sweep, "run.code=accept").code == 0
    states = [line.split()[1] for line in run(folder, "mode=plan", *sweep).output.splitlines()[:2]]
    assert states == ["finished", "finished"]


@pytest.mark.slow
def test_a_job_s_code_does_not_have_the_modules_of_other_jobs(folder: Path) -> None:
    (folder / "other.py").write_text(NET)
    (folder / "conf" / "model" / "other.yaml").write_text("_target_: other.Net\n")
    assert run(folder, "-m", "model=net,other", "trainer.max_steps=1").code == 0
    starts = [json.loads(path.read_text()) for path in folder.glob("runs/*/*/provenance.json")]
    modules = sorted(sorted(content["code"][content["starts"][-1]["code"]]) for content in starts)
    assert modules == [["helpers", "net"], ["helpers", "other"]]
    edit(folder, "torch.tanh", "torch.relu", file="other.py")
    alone = run(folder, "model=net", "trainer.max_steps=1")
    assert alone.code == 0 and "finished already" in alone.output


@pytest.mark.slow
def test_code_that_was_edited_after_its_import_is_not_run_under_the_new_code_s_name(folder: Path) -> None:
    """A notebook's second run, and the later jobs of a sweep: this process has the old code."""

    def import_and_edit(file: str, new: str) -> Callable[[], None]:
        def act() -> None:
            assert checked_line([*LINE, "seed=1"]).problems == []
            edit(folder, *new.split("|"), file=file)

        return act

    assert run(folder, before=import_and_edit("net.py", '"""A model."""|"""A comment."""')).code == 0
    for file, new, named in (("net.py", "tanh|relu", "net.py: Net.forward"), ("helpers.py", "12|16", "helpers.py: width")):
        assert_refused(
            run(folder, "seed=1", before=import_and_edit(file, new)),
            f"run.code: {named} ... imported ... new process ... reload",
        )


@pytest.mark.slow
def test_a_sweep_whose_files_are_edited_while_it_runs_starts_no_job_with_the_old_code(folder: Path) -> None:
    edits = 'Path(__file__).with_name("helpers.py").write_text("def width():\\n    return 16\\n")'
    edit(folder, "        return self.last(", f"        {edits}\n        return self.last(")  # the first job does it
    edit(folder, "import torch\n", "from pathlib import Path\n\nimport torch\n")
    swept = run(folder, "-m", "seed=0,1")
    assert swept.code == 78, swept.output
    assert "run.code: helpers.py: width: the file has changed since this process imported it" in swept.output
    assert "2 jobs: 1 finished, 1 " in swept.output


def test_a_program_that_lives_on_has_the_files_as_they_are(folder: Path) -> None:
    def notebook() -> None:
        compose(*LINE)
        before = code_of(["net.Net"])
        edit(folder, "num_classes: int = 10", "num_classes: int = 10, depth: int = 1")
        (folder / "conf/model/net.yaml").write_text("_target_: net.Net\ndepth: 2\n")
        with pytest.raises(ConfigurationError, match="net.py: Net.__init__"):
            compose(*LINE)
        assert code_of(["net.Net"]).digest == before.digest, "what is imported is recorded"
        importlib.reload(sys.modules["net"])
        assert compose(*LINE).model["depth"] == 2
        assert code_of(["net.Net"]).digest != before.digest

    assert typed("--version", directory=folder, before=notebook).code == 0


def test_a_record_says_by_what_and_on_what_a_run_began(folder: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    edit(folder, "torch.tanh", "torch.relu")
    ended = run(folder, before=with_git)
    (start,) = record(ended)["starts"]
    assert start["git"]["commit"] == git(folder, "rev-parse", "HEAD").strip()
    assert "-        return self.last(torch.tanh" in start["git"]["diff"] and "runs/" in start["git"]["untracked"]
    assert start["packages"].keys() >= {"torch"} and start["python"] and start["framework"] and start["command"]
    assert [workers["devices"] for workers in start["workers"]] == [["cpu"]]


def test_another_installed_package_than_at_the_last_start_is_warned_of_also_of_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "site-packages"
    (place / "installed_net").mkdir(parents=True)
    (place / "installed_net" / "__init__.py").write_text("def net(): ...")
    (place / "installed_net-0.1.dist-info").mkdir()
    (place / "installed_net-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: installed_net\nVersion: 0.1\n"
    )
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(LOGGER, "propagate", True)
    versions = []
    for content in ("before", "before", "after"):
        (place / "installed_net-0.1.dist-info" / "RECORD").write_text(f"installed_net/__init__.py,sha256={content},14\n")
        caplog.clear()
        Provenance(tmp_path).add_start(["installed_net.net"])
        versions.append(Provenance(tmp_path).read().starts[-1].packages["installed_net"])
        changed = f"other packages than at the last start ... installed_net {versions[0]}, now {versions[-1]}"
        assert [Says(changed) == message for message in caplog.messages] == [True] * (content == "after")
    assert versions[0] == versions[1] != versions[2] and versions[2].startswith("0.1 (")


def with_git() -> None:
    framework.runs.provenance.git_state = git_state  # for which the harness has put nothing


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.quick(1)
@pytest.mark.parametrize("damage", ['{"starts": [1], "code": []}', ""])
def test_a_damaged_record_stops_nobody(folder: Path, damage: str) -> None:
    first = run(folder)
    (first.directory / "provenance.json").write_text(damage)
    again = run(folder)
    assert again.code == 0 and "it is not known whether the code has changed" in again.output


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_continued_from(folder: Path) -> None:
    other = run(folder, "seed=1", "run.root=other")
    mine = run(folder, before=stop_after_3)
    for path in (mine.directory / "checkpoints").iterdir():
        subprocess.run(["rm", "-r", str(path)], check=True)
    theirs = next((folder / "other").rglob("checkpoints"))
    newest = max(theirs.iterdir())
    os.rename(newest, mine.directory / "checkpoints" / newest.name)
    refused = run(folder)
    assert refused.code == 65, refused.output
    assert "was written by another run" in refused.output and other.code == 0


# --- the fingerprint


def parts(text: str) -> dict[str, str]:
    return functions_of(ast.parse(text))


SAME = {
    "a comment": ("def f():\n    return 1\n", "def f():\n    # one\n    return 1\n"),
    "a docstring": ("def f():\n    return 1\n", 'def f():\n    "one"\n    return 1\n'),
    "spaces and quotes": ("x = {'a':1}\n", 'x = { "a": 1 }\n'),
    "the order of imports": ("import a\nfrom b import c, d\n", "from b import d\nimport a\nfrom b import c\n"),
    "the docstring of a class": ("class A:\n    x = 1\n", 'class A:\n    """A."""\n\n    x = 1\n'),
}


@pytest.mark.parametrize("what", SAME)
def test_what_does_not_count(what: str) -> None:
    one, other = SAME[what]
    assert parts(one) == parts(other)


OTHER = {
    "a default": ("def f(a=1):\n    return a\n", "def f(a=2):\n    return a\n", "f"),
    "a method": ("class A:\n    def f(self):\n        return 1\n", "class A:\n    def f(self):\n        return 2\n", "A.f"),
    "a class attribute": ("class A:\n    x = 1\n", "class A:\n    x = 2\n", "A"),
    "a base class": ("class A(B):\n    x = 1\n", "class A(C):\n    x = 1\n", "A"),
    "a constant": ("X = 1\n", "X = 2\n", "the top level"),
    "what an import means": ("import a as x\n", "import b as x\n", "the top level"),
    "a decorator": ("@one\ndef f():\n    pass\n", "@two\ndef f():\n    pass\n", "f"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_counts(what: str) -> None:
    one, other, name = OTHER[what]
    assert changed({"pkg.net": parts(one)}, {"pkg.net": parts(other)}) == [f"pkg/net.py: {name}"]


@pytest.mark.slow
def test_folders_that_the_code_adds_to_the_path_are_followed_at_the_next_start_too(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "inner.py").write_text("SCALE = 1.0\n")
    (folder / "dunder.py").write_text("LIMIT = 1\n")
    head = "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent / 'src'))\nimport inner\n"
    edit(folder, "import torch", f"{head}__import__('dunder')\nimport torch")
    assert run(folder).code == 0
    again = run(folder)
    assert again.code == 0 and "finished already" in again.output
    edit(folder, "1.0", "2.0", file="src/inner.py")
    assert "inner.py: the top level" in run(folder).output
    edit(folder, "2.0", "1.0", file="src/inner.py")
    edit(folder, "LIMIT = 1", "LIMIT = 2", file="dunder.py")
    assert "dunder.py: the top level" in run(folder).output


def registry(folder: Path) -> None:
    """A model whose activations are plug-ins: looked for in a folder, imported by a computed name, or run as a file."""
    (folder / "acts").mkdir()
    (folder / "acts" / "__init__.py").write_text("")
    (folder / "acts" / "soft.py").write_text("def act(x):\n    return x.tanh()\n")
    (folder / "acts" / "late.py").write_text("def act(x):\n    return x * 1\n")
    (folder / "plain.py").write_text("def act(x):\n    return x * 1\n")
    head = """import importlib
import importlib.util
import pkgutil
from pathlib import Path

HERE = Path(__file__).parent
FOUND = [m.name for m in pkgutil.iter_modules([str(HERE / "acts")]) if m.name != "la" + "te"]
ACTS = {name: importlib.import_module("ac" + "ts." + name).act for name in FOUND}
PLAIN = importlib.util.spec_from_file_location("of_a_file", HERE / ("pla" + "in.py"))
MODULE = importlib.util.module_from_spec(PLAIN)
__import__("sys").modules["of_a_file"] = MODULE
PLAIN.loader.exec_module(MODULE)

import torch
"""
    edit(folder, "import torch\n", head)
    late = "importlib.import_module('ac' + 'ts.la' + 'te').act(x)"
    edit(folder, "        return self.last(", f"        x = {late}\n        return self.last(")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "named"), [("acts/soft.py", "acts/soft.py: act"), ("acts/late.py", "acts/late.py: act"), ("plain.py", "of_a_file.py: act")])  # fmt: skip
def test_modules_to_which_no_import_leads_are_the_runs_code_too(folder: Path, file: str, named: str) -> None:
    registry(folder)
    begun = run(folder, before=stop_after_3)
    assert begun.code == 75, begun.output
    assert sorted(record(begun)["starts"][-1]["loaded"]) == ["acts", "acts.late", "acts.soft", "of_a_file"]
    old, new = ("tanh", "sigmoid") if "soft" in file else ("x * 1", "x * 2")
    edit(folder, old, new, file=file)
    assert run(folder).output == Says(f"run.code: ... {named} ...")
    edit(folder, new, old, file=file)
    ended = run(folder)
    assert ended.code == 0 and "continuing from" in ended.output
    edit(folder, old, new, file=file)
    assert run(folder).code == 78, "a finished run has its code too"


SCRIPT = """import sys
import torch
from framework import run
class Net(torch.nn.Linear):
    def forward(self, x): return super().forward(x.flatten(1)) * 2
print(run("model._target_=__main__.Net", "model.in_features=64", "model.out_features=10", "trainer.max_steps=2", "rehearse=false").directory)
"""


@pytest.mark.slow
def test_the_script_that_starts_a_run_is_its_code(folder: Path) -> None:
    def script(*words: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return subprocess.run([sys.executable, *words], cwd=folder, input=text, capture_output=True, text=True, env=environment)

    (folder / "mine.py").write_text(SCRIPT)
    begun = script("mine.py")
    assert begun.returncode == 0, begun.stderr
    edit(folder, "* 2", "* 3", file="mine.py")
    assert "__main__.py: Net.forward" in script("mine.py").stderr
    assert "__main__.Net is in no Python file" in script("-", text=SCRIPT.replace("max_steps=2", "max_steps=3")).stderr


def test_what_a_program_imports_between_its_commands_is_not_a_runs_code(folder: Path) -> None:
    registry(folder)
    (folder / "of_the_program.py").write_text("x = 1\n")

    def notebook() -> None:
        compose(*LINE)  # loads the plug-ins
        importlib.import_module("of_the_program")

    ended = run(folder, before=notebook)
    assert sorted(record(ended)["starts"][-1]["loaded"]) == ["acts", "acts.late", "acts.soft", "of_a_file"]


@pytest.mark.slow
def test_a_plug_in_that_is_new_is_other_code(folder: Path) -> None:
    registry(folder)
    assert run(folder, before=stop_after_3).code == 75
    (folder / "acts" / "extra.py").write_text("def act(x):\n    return x\n")
    assert_refused(run(folder), "[rank 0] ERROR: run.code: ... acts/extra.py is new ... run.code=accept ...")
    ended = run(folder, "run.code=accept")
    assert ended.code == 0 and "continuing from" in ended.output
    (accepted,) = record(ended)["starts"][-1]["accepted"]
    assert accepted.endswith("acts/extra.py is new")


@pytest.mark.slow
def test_wandb_is_sent_the_code_that_the_run_reaches(folder: Path) -> None:
    (folder / "unused.py").write_text("TOKEN = 1\n")
    ended = run(folder, *OFFLINE, "logger.wandb.log_code=true")
    (file,) = wandb_files(ended.directory)
    (sent,) = (record.artifact for record in wandb_records(file) if record.WhichOneof("record_type") == "artifact")
    assert sent.type == "code"
    contents = {item.path: Path(item.local_path).read_bytes() for item in sent.manifest.contents}
    assert contents == {name: (folder / name).read_bytes() for name in ("net.py", "helpers.py")}
    for item in sent.manifest.contents:
        Path(item.local_path).unlink()  # wandb's copy, in the home directory


def test_a_package_without_an_init_file_that_nobody_has_imported_is_found(folder: Path) -> None:
    (folder / "plain" / "inner").mkdir(parents=True)
    (folder / "plain" / "inner" / "sizes.py").write_text("def width() -> int:\n    return 12\n")
    edit(folder, "import torch\n", "import torch\nfrom plain.inner import sizes\n")

    def look() -> None:
        assert "plain.inner.sizes" in code_of(["net.Net"]).modules

    assert typed("--version", directory=folder, before=look).code == 0
