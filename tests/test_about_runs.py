"""`show`, `diff` and `why`: what is printed about real runs, and about damaged ones."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import Run, load
from framework.cli.about_runs import command_of
from framework.runs.compare import config_differences, rows_difference, weights_difference
from framework.runs.lineage import lineage
from framework.runs.provenance import Provenance, git_state
from tests.harness import Ended, finished, typed
from tests.test_loop import TINY
from tests.test_resume import preempted

SHORT = [*TINY, "trainer.max_epochs=2", "trainer.eval_every=3"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with four runs: `one`, `two` processes, another `lr`, and `longer`, which goes on from `one`."""
    folder = tmp_path_factory.mktemp("about") / "runs"
    one = finished(*SHORT, "name=one", root=folder).directory
    finished(*SHORT, "name=two", "parallel=ddp", "launch.nproc_per_node=2", root=folder)
    finished(*SHORT, "name=lr", "optimizer.lr=0.03", root=folder)
    finished(*SHORT, "name=longer", "trainer.max_epochs=4", f"run.resume={one}", root=folder)
    finished(*SHORT, "name=warm", f"model.init_from={one / 'model.safetensors'}", root=folder)
    return folder


def run_called(root: Path, name: str) -> Path:
    (path,) = (root / name).iterdir()
    return path


def asked(root: Path, *words: str) -> Ended:
    return typed(*words, f"run.root={root}", directory=root.parent)


def test_a_run_is_shown_with_what_it_was_asked_and_what_it_found(root: Path) -> None:
    ended = asked(root, "show", run_called(root, "lr").name[:6])
    assert ended.code == 0, ended.output
    summary = json.loads((run_called(root, "lr") / "summary.json").read_text())
    accuracy = summary["metrics"]["test"]["last"]["accuracy"]
    assert re.search(r"optimizer\.lr +0\.03\n", ended.output)
    assert re.search(rf"test  +loss .* accuracy {accuracy:.4f}", ended.output)
    assert re.search(rf"step +{summary['step']} of {summary['total_steps']}\n", ended.output)
    assert "optimizer.weight_decay" not in ended.output  # a default


def test_two_processes_differ_by_rounding_alone_and_diff_says_so(root: Path) -> None:
    first, second = run_called(root, "one"), run_called(root, "two")
    ended = asked(root, "diff", str(first), str(second))
    assert ended.code == 0, ended.output
    assert re.search(r"other keys\n(  .*\n)*  launch\.nproc_per_node +1  \|  2\n", ended.output)
    assert "they differ by at most" in ended.output and rows_difference(first, second).largest < 1e-4
    assert "code\n  the same" in ended.output


def test_the_first_step_that_differs_is_found(root: Path) -> None:
    first, second = run_called(root, "one"), run_called(root, "lr")
    difference = rows_difference(first, second)
    assert difference.last_same == 0 and difference.first == (1, "train")  # the rate is in the row of the first step
    assert "lr" in difference.values
    ended = asked(root, "diff", str(first), second.name)
    assert "first difference: step 1, train" in ended.output and re.search(r"optimizer\.lr +\S+  \|  0\.03", ended.output)
    assert "tensors differ, the most in" in ended.output


def test_a_run_is_the_same_as_itself_to_the_last_bit(root: Path) -> None:
    one = run_called(root, "one")
    assert rows_difference(one, one).first is None and rows_difference(one, one).largest == 0
    assert weights_difference(one, one).startswith("the same, to the last bit")
    assert config_differences(one, one) == ({}, {})


def test_one_bit_of_one_weight_is_seen(root: Path, tmp_path: Path) -> None:
    one, other = run_called(root, "one"), tmp_path / "other"
    other.mkdir()
    weights = load_file(one / "model.safetensors")
    name = sorted(weights)[0]
    weights[name].view(-1)[0] = torch.nextafter(weights[name].view(-1)[0], torch.tensor(math.inf))
    save_file(weights, other / "model.safetensors")
    assert re.match(rf"1 of {len(weights)} tensors differ, the most in {re.escape(name)}: by ", weights_difference(one, other))


def test_a_row_s_value_that_is_changed_is_named(root: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (run_called(root, "one") / "metrics.jsonl").read_text().splitlines()]
    changed = next(row for row in rows if row["split"] == "train" and row["step"] == 3)
    changed["loss"] *= 1 + 1e-12
    changed["step_s"] = 77.0  # a clock's
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    difference = rows_difference(run_called(root, "one"), tmp_path)
    assert difference.first == (3, "train") and [*difference.values] == ["loss"]
    assert difference.last_same == 2 and 0 < difference.largest < 1e-11


def test_ancestors_come_first_and_a_resumed_run_says_up_to_where_it_is_the_other(root: Path) -> None:
    one, longer = run_called(root, "one"), run_called(root, "longer")
    assert [ancestor.run for ancestor in lineage(longer)] == [one, longer]
    ended = asked(root, "why", longer.name)
    step = json.loads((one / "summary.json").read_text())["step"]
    assert ended.code == 0, ended.output
    assert re.search(rf"took run\.resume=\S+ from one/{one.name}; both have the same rows up to step {step}\b", ended.output)


@pytest.mark.slow
def test_a_parent_is_remembered_whatever_becomes_of_it(root: Path, tmp_path: Path) -> None:
    line = [*SHORT, f"run.dir={tmp_path / 'parent'}"]
    parent = finished(*line, "seed=3", root=tmp_path).root / "parent"
    longer = [*SHORT, "seed=3", "trainer.max_epochs=4", f"run.dir={tmp_path / 'child'}", f"run.resume={parent}"]
    preempted(*longer, at=8, root=tmp_path)
    finished(*longer, root=tmp_path)
    child = tmp_path / "child"
    assert [ancestor.run.name for ancestor in lineage(child)] == ["parent", "child"]
    parent.rename(tmp_path / "elsewhere")
    ended = asked(root, "why", str(child))
    assert re.search(r"took run\.resume=\S+ from \S+/parent \(.* no longer exists: its origin is not known\)", ended.output)
    finished(*line, "seed=4", root=tmp_path)
    ended = asked(root, "why", str(child))
    assert f"{parent} now holds another run" in ended.output
    assert [ancestor.run.name for ancestor in lineage(child)] == ["child"]


@pytest.mark.parametrize(
    "option, prefix", [([], "STEADFAST_CONF='/my options' "), (["--config-dir", "other"], ""), (["-cd=other"], "")]
)
def test_a_folder_that_a_variable_selected_is_part_of_the_command(
    option: list[str], prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADFAST_CONF", "/my options")  # `--config-dir` sets it too
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "train.py", *option, "seed=1"])
    record = Provenance(tmp_path)
    record.add_start([])
    assert command_of(record.read().starts[0]) == f"{prefix}python train.py {' '.join([*option, 'seed=1'])}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with one commit of a text in latin-1 and of a binary file, and with a user's odd configuration."""
    folder = tmp_path / "repository"
    (folder / "below").mkdir(parents=True)
    (folder / "latin.py").write_bytes("# coding: latin-1\nname = 'é'\n".encode("latin-1"))
    (folder / "table.bin").write_bytes(bytes(range(256)))
    for words in (["init", "-q"], ["config", "color.ui", "always"], ["config", "diff.noprefix", "true"],
                  ["config", "diff.relative", "true"], ["add", "."],
                  ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]):  # fmt: skip
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_a_recorded_difference_restores_every_byte(repository: Path) -> None:
    changes = {"latin.py": "# coding: latin-1\nname = 'éè'\r\n".encode("latin-1"), "table.bin": bytes(range(255, -1, -1))}
    for name, content in changes.items():
        (repository / name).write_bytes(content)
    recorded = git_state(repository / "below")
    assert recorded is not None
    patch = recorded.diff.encode(errors="surrogateescape")
    subprocess.run(["git", "checkout", "-q", "."], cwd=repository, check=True)
    subprocess.run(["git", "apply"], input=patch, cwd=repository, check=True)
    assert {name: (repository / name).read_bytes() for name in changes} == changes


@pytest.mark.parametrize(
    "text, reason",
    [("x = 1\n" * 50_000, "characters, and the record holds at most"), ("token = 'hunter2-hunter2'\n", "a secret")],
)
def test_differences_that_a_record_cannot_hold_are_said_to_be_incomplete(
    repository: Path, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-hunter2")
    (repository / "latin.py").write_text(text)
    recorded = git_state(repository)
    assert recorded is not None and reason in recorded.incomplete and "hunter2" not in recorded.diff


def test_a_model_of_a_project_that_is_not_on_the_path_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: Any) -> None:
        raise ValueError("_target_=net.Net cannot be imported") from ModuleNotFoundError("No module named 'net'")

    monkeypatch.setattr("framework.modes.load_run.load_run", absent)
    with pytest.raises(ValueError, match=r"net\.Net cannot be imported; the folder .* sys\.path"):
        load(run_called(root, "one"))


def test_a_loaded_model_has_the_accuracy_that_the_run_measured_on_the_data_it_gives(root: Path) -> None:
    run = Run(run_called(root, "one"))
    data, model = run.dataset(), load(run.directory)
    inputs, targets = data.load("test").gather(np.arange(17))
    inputs, targets = data.transform(torch.as_tensor(inputs), torch.as_tensor(targets), keys=None)
    with torch.no_grad():
        right = (model(inputs).argmax(dim=-1) == targets).double().mean().item()
    assert len(targets) == 17 and right == pytest.approx(run.metrics["test"]["last"]["accuracy"])
    assert data.info["num_classes"] == 10


@pytest.fixture
def damaged(root: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for name in ("metrics.jsonl", "summary.json", "lock"):
        (copy / name).write_bytes((run_called(root, "one") / name).read_bytes())
    (copy / "config.yaml").write_text("name: [\x1b[31m")
    (copy / "provenance.json").write_text('{"starts": [7]}')
    return copy


def test_what_is_damaged_is_said_and_the_rest_is_shown(root: Path, damaged: Path) -> None:
    for words in (["show", str(damaged)], ["diff", str(damaged), str(run_called(root, "one"))], ["why", str(damaged)]):
        ended = asked(root, *words)
        assert ended.code == 0 and "Traceback" not in ended.output, ended.output
        assert "\x1b" not in ended.output
    assert "has changed since the run wrote it" in asked(root, "show", str(damaged)).output
    assert "code\n  not compared: A has no record" in asked(root, "diff", str(damaged), str(run_called(root, "one"))).output
    assert "no record of its starts" in asked(root, "why", str(damaged)).output


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["show"], 78, "show: needs 1 run (steadfast show RUN"),
        (["diff", "a"], 78, "diff: needs 2 runs"),
        (["why", "--all", "x"], 78, "why: needs 1 run"),
        (["show", "zzz"], 65, "zzz is neither a run nor the beginning of the id of a run"),
        (["show", ""], 65, "is neither a run"),
        (["show", "*"], 65, "is neither a run"),
        (["why", "x", "patch=y"], 78, "needs 1 run"),
    ],
)
def test_a_mistake_is_one_line(root: Path, words: list[str], code: int, answer: str) -> None:
    ended = asked(root, *words)
    assert ended.code == code and answer in ended.output, ended.output


def test_the_same_is_told_as_json_for_programs(root: Path) -> None:
    one, other = (str(run_called(root, name)) for name in ("one", "lr"))
    shown = json.loads(asked(root, "show", other, "--json").output)
    assert shown["run"][0].endswith(": finished") and shown["computes"]["optimizer.lr"] == "0.03"
    assert "\n" in shown["result"]["next"]  # a text of several lines
    assert "optimizer.lr" in json.loads(asked(root, "diff", one, other, "--json").output)["computed"]
    assert json.loads(asked(root, "why", one, "--json").output)["result"]["best"]
    rows = json.loads(asked(root, "status", "--json").output)
    assert {row["state"] for row in rows} == {"finished"} and len(rows) == 5
    wrong = asked(root, *SHORT, "--json")
    assert wrong.code == 78 and wrong.output.startswith("--json: is for status, show, diff and why")
