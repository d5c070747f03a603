"""docs/extend.md works as it stands: its files, written into a copy of the project, add what its commands use."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import Command, commands, files, project

PAGE = "docs/extend.md"
KINDS = ("model", "dataset", "task", "parallel", "logger")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("extended") / "project", page=PAGE)


def test_two_files_of_each_kind() -> None:
    assert sorted(files(PAGE)) == sorted(
        [
            "models/linear.py",
            "framework/data/rings.py",
            "framework/tasks/focal.py",
            "framework/parallel/zero2.py",
            "framework/loggers/csv_file.py",
        ]
        + [f"conf/{kind}/{name}.yaml" for kind, name in zip(KINDS, ("linear", "rings", "focal", "zero2", "csv_file"))]
    )
    used = {word.partition("=")[0] for command in commands(PAGE) for word in command.line.split()}
    assert used >= set(KINDS), "a command for each"


@pytest.mark.parametrize("command", commands(PAGE), ids=lambda command: command.line)
def test_two_files_are_enough(command: Command, extended: Path, tmp_path: Path) -> None:
    line = f"{command.line} trainer.max_steps=3 trainer.log_every=1 run.root={tmp_path}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=extended,
        env=os.environ | {"PATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert "test  loss" in done.stdout
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    if "csv_file" in line:
        rows = [json.loads(row) for row in metrics.read_text().splitlines()]
        with open(metrics.with_name("losses.csv")) as file:
            assert list(csv.reader(file, delimiter="|")) == [
                [str(row[name]) for name in ("step", "split", "loss")] for row in rows
            ]
