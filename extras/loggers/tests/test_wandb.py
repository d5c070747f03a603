"""Weights & Biases, offline, online and with a server that is of no use: each row is there once, also after interruptions."""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from extras.loggers.tests.records import (
    OFFLINE,
    assert_equal,
    scalars_of,
    wandb_files,
    wandb_records,
    wandb_rows,
    wandb_run,
    wandb_summary,
    when,
    written,
)
from extras.loggers.tests.wandb_server import WandbServer, wandb_server
from extras.loggers.wandb import Wandb
from framework.loggers import background
from framework.runs.metrics_file import MACHINE
from framework.training.loop import Trainer
from tests.harness import Ended, after_each, assert_same_bits, before_each, command, finished, together
from tests.test_loggers import DDP, RUN, base
from tests.test_resume import after_step, crash, preempt


def note_processes(folder: Path) -> Callable[[], None]:
    """Return what makes each rank of a command leave a file when it opens wandb."""

    def note(sink: Wandb, run: Any) -> None:
        (folder / f"opened_by_rank_{os.environ.get('RANK', '0')}").touch()

    return lambda: before_each(Wandb, "open", note)


@pytest.mark.slow
def test_wandb_is_one_run_equal_to_metrics_jsonl_after_resumes(tmp_path: Path) -> None:
    line, root = [*RUN, *DDP, *OFFLINE], tmp_path / "runs"
    killed = after_step(9, when(lambda: written(root, "*.wandb"), crash))
    assert command(*line, "launch.max_restarts=0", root=root, before=together(note_processes(tmp_path), killed)).code != 0
    run = finished(*line, root=root)
    assert run.summary["restarts"] == 1
    assert [path.name for path in tmp_path.glob("opened_by_rank_*")] == ["opened_by_rank_0"]
    files = wandb_files(run.directory)
    assert [file.name for file in files] == [f"run-{run.summary['record_id']}.wandb"] * 2  # a file for each start, one id
    assert_equal(wandb_rows(files[-1]), scalars_of(run.rows))  # the last holds what the others may have lost


@pytest.mark.slow
def test_wandb_has_the_configuration_as_a_tree_the_last_and_best_metrics_and_on_demand_the_checkpoints(tmp_path: Path) -> None:
    more = ["logger.wandb.tags=[a,b]", "run.group=those", "logger.wandb.log_checkpoints=true"]
    auto = ["logger=wandb", "logger.wandb.mode=auto"]
    run = finished(*RUN, *auto, *more, root=tmp_path / "runs", before=partial(use_wandb_key, None, tmp_path))
    assert "WARNING" not in run.output
    (file,) = wandb_files(run.directory)  # offline, without a key
    config = {item.key: json.loads(item.value_json) for item in wandb_run(file).config.update}
    frozen = yaml.safe_load((run.directory / "config.yaml").read_text())
    assert {name: config[name] for name in frozen if name != "hash"} == {k: v for k, v in frozen.items() if k != "hash"}
    assert (wandb_run(file).run_group, list(wandb_run(file).tags)) == ("those", ["a", "b"])
    summary = wandb_summary(file)
    for split, rows in run.summary["metrics"].items():
        for which, row in rows.items():
            for name in row.keys() - {"split"}:
                assert summary[f"{which}/{split}/{name}"] == row[name]
    assert summary["best/val/loss"] == min(row["loss"] for row in run.rows if row["split"] == "val")
    assert_holds_the_kept_checkpoints(file, run)


def assert_holds_the_kept_checkpoints(file: Path, run: Ended) -> None:
    requests = [record.request.log_artifact.artifact for record in wandb_records(file)]
    artifacts = [record.artifact for record in wandb_records(file) if record.WhichOneof("record_type") == "artifact"]
    artifacts = artifacts or [artifact for artifact in requests if artifact.name]
    kept = sorted(path for path in (run.directory / "checkpoints").glob("step_*"))
    assert [artifact.type for artifact in artifacts] == ["checkpoint"] * len(kept)
    for artifact, path in zip(artifacts, kept):
        assert artifact.name == f"checkpoint-{run.summary['record_id']}"
        assert path.name in artifact.aliases
        assert ("best" in artifact.aliases) == (path.name == f"step_{run.summary['metrics']['val']['best']['step']:08d}")
        assert {entry.local_path for entry in artifact.manifest.contents} == {str(file) for file in path.iterdir()}
    assert len(kept) == 2


def use_wandb_key(key: str | None, home: Path) -> None:
    os.environ.pop("WANDB_MODE", None)
    os.environ |= {"NETRC": str(home / "none"), "HOME": str(home)} | ({"WANDB_API_KEY": key} if key else {})


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "count"), [("disabled", 0), ("offline", 1)])
def test_a_mode_of_wandb_counts_more_than_an_api_key(mode: str, count: int, tmp_path: Path) -> None:
    with_key = partial(use_wandb_key, "k" * 40, tmp_path)
    run = finished(*RUN, "logger=wandb", f"logger.wandb.mode={mode}", root=tmp_path / "runs", before=with_key)
    found = [path for path in run.directory.glob("wandb/*run-*") if path.name != "latest-run"]
    assert len(found) == count and all(path.match("offline-run-*") for path in found) and "WARNING" not in run.output


# --- Weights & Biases, and a server that is of no use


@contextmanager
def useless_server(kind: str) -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers, or of a port where there is none."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if kind == "refuses":
            server.close()
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuses", pytest.param("is silent", marks=pytest.mark.slow)])
def test_a_run_neither_waits_for_a_dead_server_nor_loses_its_rows(kind: str, tmp_path: Path) -> None:
    def plant() -> None:
        os.environ.pop("WANDB_MODE", None)
        os.environ |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": url}
        before_each(Trainer, "fit", lambda _: begun.append(time.monotonic()))
        after_each(Trainer, "fit", lambda _: (tmp_path / "seconds").write_text(str(time.monotonic() - begun[0])))
        background._MARGIN_S = 60  # for a machine that is busy with other things

    begun = list[float]()
    with useless_server(kind) as url:
        line = [*RUN, "logger=wandb", "logger.wandb.mode=online", "logger.wandb.timeout_s=6"]
        run = finished(*line, root=tmp_path / "runs", before=plant)
    assert float((tmp_path / "seconds").read_text()) < 6  # which is how long wandb tries
    (warning,) = [line for line in run.output.splitlines() if "WARNING" in line]
    (file,) = wandb_files(run.directory)
    assert f"wandb cannot be reached, so this run is recorded offline (`wandb sync {file.parent}` sends it)" in warning
    assert_equal(wandb_rows(file), scalars_of(run.rows))
    assert_same_bits(run, base())


# --- Weights & Biases, online


ONLINE = ["logger=wandb", "logger.wandb.mode=auto"]


def with_key_for(server: WandbServer) -> Callable[[], None]:
    def plant() -> None:
        os.environ.pop("WANDB_MODE", None)
        os.environ |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": server.url}
        background._MARGIN_S = 60  # for a machine that is busy with other things

    return plant


@pytest.mark.slow
def test_online_steps_never_go_backwards_and_none_is_lost(tmp_path: Path) -> None:
    line, root = [*RUN, *ONLINE, "logger.wandb.timeout_s=60"], tmp_path / "runs"
    with wandb_server() as server:
        stop = [lambda step=step: (with_key_for(server)(), after_step(step, preempt)()) for step in (6, 11, 13)]
        first = command(*line, root=root, before=stop[0])
        assert first.code == 75 and "WARNING" not in first.output, first.output
        shutil.rmtree(first.directory / "checkpoints" / "step_00000006")  # the server has more than the checkpoint of step 4
        assert command(*line, root=root, before=stop[1]).code == 75
        for number in (9, 10):  # the server has less than the checkpoint of step 11
            del server.history[number]
        assert command(*line, root=root, before=stop[2]).code == 75
        run = finished(*line, root=root, before=with_key_for(server))
    assert set(server.ids) == {run.summary["record_id"]} and run.summary["restarts"] == 3
    assert [row["_step"] for row in server.rows] == list(range(1, 17))
    sent = {(name, row["_step"]): value for row in server.rows for name, value in row.items() if name[0] != "_"}
    expected = scalars_of(run.rows)
    assert sent.keys() == expected.keys()
    for key in sent.keys() - {(f"train/{name}", step) for name in MACHINE for step in (5, 6)}:  # measured twice
        assert sent[key] == expected[key]
