"""A logger that fails does not end the run; the console, train.log, and the ids under which loggers record a run."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from extras.loggers.tensorboard import TensorBoard
from extras.loggers.tests.records import OFFLINE, assert_equal, scalars_of, wandb_files, wandb_rows, when
from framework.loggers import background
from tests.harness import Ended, assert_same_bits, before_each, command, finished, once, wait_for
from tests.test_resume import after_step, crash

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=20", "dataset.num_test=20", "dataset.image_size=8",
    "model=mlp", "model.dim=8", "global_batch_size=16", "trainer.max_epochs=4", "trainer.log_every=1",
    "trainer.eval_every=5", "checkpoint.every=4",
]  # fmt: skip
DDP = ["parallel=ddp", "launch.nproc_per_node=2"]


def base() -> Ended:
    return once(*RUN)


# --- the ids of a run for loggers


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_keeps_its_record_s_id_and_when_it_began(tmp_path: Path) -> None:
    killed = command(*RUN, root=tmp_path / "runs", before=after_step(2, crash))
    assert not (killed.directory / "checkpoints").exists()
    again, before = finished(*RUN, root=tmp_path / "runs").summary, killed.summary
    assert (again["record_id"], again["began"]) == (before["record_id"], before["began"])


@pytest.mark.slow
def test_another_run_and_one_that_starts_over_have_ids_of_their_own(tmp_path: Path) -> None:
    first = finished(*RUN, root=tmp_path / "first")
    longer = finished(*RUN, "trainer.max_epochs=5", f"run.resume={first.directory}", root=tmp_path / "second")
    directory, known = first.directory, {first.summary["record_id"], longer.summary["record_id"]}
    finished(*RUN, "run.resume=never", root=tmp_path / "first")
    again = json.loads((directory / "summary.json").read_text())
    assert len(known | {again["record_id"]}) == 3


# --- a sink that fails


def fail() -> None:
    raise ConnectionError("the planted failure")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {  # a method of a sink, what it does, settings of its process, and what is said
    "raises": ("log", fail, {}, "the planted failure"),
    "dies": ("log", die, {}, "its process died"),
    "takes nothing": ("__init__", signal.pause, {"_MOST_BYTES": -1}, "it reads nothing"),
    "raises when it is opened": ("open", fail, {}, "the planted failure"),
    "raises when it is closed": ("close", fail, {}, "the planted failure"),
    "hangs": ("__init__", signal.pause, {"TIMEOUT_S": 0.2, "_MARGIN_S": 0.2}, "it did not end within 0 s"),
    "hangs when it is closed": ("close", signal.pause, {"TIMEOUT_S": 2.0, "_MARGIN_S": 0.2}, "it did not end within 2 s"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sink_that_fails_is_a_warning_and_the_run_and_other_sinks_go_on(fault: str, tmp_path: Path) -> None:
    method, act, settings, words = FAULTS[fault]

    def note_and_act(*_: object) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        act()

    def plant() -> None:
        for name, value in settings.items():
            setattr(background, name, value)
        setattr(TensorBoard, method, note_and_act)

    others = [*OFFLINE, "logger=[tensorboard,wandb]"] if fault.startswith("hangs") else ["logger=tensorboard"]
    run = finished(*RUN, *others, root=tmp_path / "runs", before=plant)
    warning = f"WARNING: logger tensorboard is off for the rest of this run: {words}"
    assert run.output.count(warning) == run.output.count("WARNING") == 1, run.output
    assert run.summary["unlogged"] == ["tensorboard"]
    assert_same_bits(run, base())
    wait_for(lambda: not Path("/proc", (tmp_path / "pid").read_text()).exists(), what="its process's end")
    for file in wandb_files(run.directory):
        assert_equal(wandb_rows(file), scalars_of(run.rows))


@pytest.mark.slow
def test_a_sink_has_no_longer_than_is_left_before_the_signal_that_kills(tmp_path: Path) -> None:
    def plant() -> None:
        TensorBoard.close = lambda self, summary: signal.pause()
        after_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))()

    stopped = command(*RUN, "logger=tensorboard", "launch.grace_s=2", root=tmp_path / "runs", before=plant)
    assert stopped.code == 75
    assert re.search(r"logger tensorboard is off for the rest of this run: it did not end within [012] s", stopped.output)


def test_no_sink_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    def plant() -> None:
        before_each(TensorBoard, "open", lambda *_: (tmp_path / "pid").write_text(str(os.getpid())))
        after_step(6, when((tmp_path / "pid").exists, crash))()

    assert command(*RUN, "logger=tensorboard", root=tmp_path / "runs", before=plant).code == -signal.SIGKILL
    wait_for(lambda: not Path("/proc", (tmp_path / "pid").read_text()).exists(), what="its end")


@pytest.mark.slow
def test_a_sink_hears_nothing_of_the_signals_that_stop_a_run(tmp_path: Path) -> None:
    """Sent to all processes of the run, as a terminal and schedulers do, they reach the run alone."""

    def stop() -> None:
        os.killpg(0, signal.SIGINT)

    stopped = command(*RUN, *OFFLINE, root=tmp_path / "runs", before=after_step(6, stop))
    assert stopped.code == 75 and "WARNING" not in stopped.output
    assert_equal(wandb_rows(wandb_files(stopped.directory)[0]), scalars_of(stopped.rows))


# --- the console


def test_without_a_terminal_the_console_is_plain_lines() -> None:
    assert "\x1b" not in base().output and "\r" not in base().output
    number = r"[\d.]+"
    pattern = rf"step (\d+)/16  loss {number}  accuracy {number}  top5 {number}  lr {number}e-\d\d  [\d,]+ samples/s  eta \d:\d\d:\d\d"
    steps = [int(found[1]) for line in base().output.splitlines() if (found := re.fullmatch(pattern, line))]
    assert steps[0] == 1 and steps[-1] == 16 and len(steps) <= 2 + base().summary["wall_s"] / 5, "by the clock, and the last"
    row = [row for row in base().rows if row["split"] == "train"][-1]
    assert f"step 16/16  loss {row['loss']:.4f}  accuracy {row['accuracy']:.4f}" in base().output


# --- train.log


def test_train_log_holds_lines_of_every_rank_with_the_rank(tmp_path: Path) -> None:
    run = finished(*RUN, *DDP, root=tmp_path / "runs")
    lines = (run.directory / "train.log").read_text().splitlines()
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[rank ([01])\] (?:INFO|DEBUG) (.*)"
    parsed = [re.fullmatch(pattern, line) for line in lines]
    assert all(parsed), lines
    said = {rank: [found[2] for found in parsed if found and found[1] == rank] for rank in "01"}
    for rank in "01":
        assert any(re.match(r"process \d+ on \S+, cpu", text) for text in said[rank]), said
    of_evaluations = [row for row in run.rows if row["split"] != "train"]
    assert sum(re.match(r"step \d+/16  (val|test)  loss ", text) is not None for text in said["0"]) == len(of_evaluations)
    assert sum("step 16/16  loss " in text for text in said["0"]) == 1
    assert not any("  loss " in text for text in said["1"])
