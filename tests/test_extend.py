"""docs/extend.md works as it stands: its files, written into an empty folder, are a project that its commands use."""

import csv
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import typed
from tests.pages import MACHINE, ROOT, Command, blocks, commands, files

PAGE = "docs/extend.md"
KINDS = {"model": "linear", "dataset": "rings", "task": "focal", "parallel": "zero2", "logger": "csv_file"}


def steadfast(folder: Path) -> dict[str, str]:
    """Return an environment in which `steadfast` is this checkout's train.py."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "steadfast"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/train.py "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return os.environ | {
        "PYTHONPATH": str(MACHINE),
        "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extended")
    for name, text in files(PAGE).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_two_files_of_each_kind() -> None:
    named = {f"{name}.py" for name in KINDS.values()} | {f"conf/{kind}/{name}.yaml" for kind, name in KINDS.items()}
    assert set(files(PAGE)) == named | {
        "conf/model/pretrained_style.yaml",
        "conf/model/gpt2.yaml",
        "simclr.py",
        "own_loss.py",
        "conf/task/simclr.yaml",
    }
    used = {word.partition("=")[0] for command in commands(PAGE) for word in command.line.split()}
    assert used >= KINDS.keys(), "a command for each"


# Hugging Face's takes a minute, three beside others; a task has another command
QUICK = [command for command in commands(PAGE) if not re.search("gpt2|simclr", command.line)]


@pytest.mark.quick(2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "command", sorted(commands(PAGE), key=lambda command: command not in QUICK), ids=lambda command: command.line
)
def test_two_files_are_enough(command: Command, extended: Path, tmp_path: Path) -> None:
    program, *words = shlex.split(command.line)
    few = ["trainer.max_steps=3", "trainer.log_every=1", f"rehearse={str(command not in QUICK).lower()}"]
    ended = typed(*words, *few, f"run.root={tmp_path}/runs", directory=extended, timeout_s=380)
    assert program == "steadfast" and ended.code == 0, ended.output
    assert "test  loss" in ended.output
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    if "csv_file" in command.line:
        rows = [json.loads(row) for row in metrics.read_text().splitlines()]
        with open(metrics.with_name("losses.csv")) as file:
            written = list(csv.reader(file, delimiter="|"))
        assert written == [[str(row[name]) for name in ("step", "split", "loss")] for row in rows]


@pytest.mark.slow
def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    scripts = [text for language, text in blocks(PAGE) if language == "python" and "from framework import" in text]
    assert len(scripts) == 2  # a command's run, and a draft of objects
    script = "\n".join(scripts)
    environment = steadfast(tmp_path / "bin") | {"PYTHONPATH": f"{ROOT}:{MACHINE}"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    (directory,) = tmp_path.glob("runs/default/*")
    assert str(directory.relative_to(tmp_path)) in done.stdout
