"""The sinks say what metrics.jsonl says, once, also after interruptions; one that fails does not end the run."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.loggers.tensorboard import TensorBoard
from framework.loggers.wandb import Wandb
from tests.harness import Ended, assert_same_bits, begin, command, end, finished
from tests.test_resume import after_step, crash, preempt

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=20", "dataset.num_test=20", "dataset.image_size=8",
    "model=mlp", "model.dim=8", "global_batch_size=16", "trainer.max_epochs=4", "trainer.log_every=1",
    "trainer.eval_every=5", "checkpoint.every=4",
]  # fmt: skip
DDP = ["parallel=ddp", "launch.nproc_per_node=2"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return finished(*RUN, root=tmp_path_factory.mktemp("silent") / "runs")


Scalars = dict[tuple[str, int], float]  # (SPLIT/METRIC, step) -> value


def scalars_of(rows: list[dict[str, Any]]) -> Scalars:
    return {
        (f"{row['split']}/{name}", row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in ("step", "split")
    }


def tensorboard_scalars(directory: Path) -> Scalars:
    """Read the event files as TensorBoard does; a step that is there twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    reader.Reload()
    found: Scalars = {}
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            assert (tag, event.step) not in found, f"{tag} has step {event.step} twice"
            found[tag, event.step] = event.value
    return found


def wandb_rows(file: Path) -> Scalars:
    """Read a `.wandb` file: records in LevelDB's log format, after a header of 7 bytes; each a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record, found = file.read_bytes(), 7, b"", {}
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no room for a header in this block
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            parsed, record = Record.FromString(record), b""
            if parsed.WhichOneof("record_type") == "history":
                items = parsed.history.item
                row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                found |= {(name, row["_step"]): value for name, value in row.items() if name[0] != "_"}
    return found


def assert_equal(actual: Scalars, expected: Scalars) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key  # event files hold float32


# --- TensorBoard


def test_tensorboard_holds_the_rows_of_metrics_jsonl(base: Ended, tmp_path: Path) -> None:
    run = finished(*RUN, "logger=tensorboard", root=tmp_path / "runs")
    assert_equal(tensorboard_scalars(run.directory), scalars_of(run.rows))
    assert_same_bits(run, base)


@pytest.mark.parametrize("strategy", [[], DDP], ids=["single", "ddp 2"])
@pytest.mark.parametrize("act", [preempt, crash])
def test_tensorboard_holds_each_step_once_after_interruptions(
    strategy: list[str], act: Callable[[], None], tmp_path: Path
) -> None:
    line = [*RUN, *strategy, "logger=tensorboard"]
    for step in (6, 11):  # the checkpoints before a crash are those of steps 4 and 8
        command(*line, root=tmp_path / "runs", before=after_step(step, act))
    run = finished(*line, root=tmp_path / "runs")
    assert run.summary["restarts"] == 2
    assert_equal(tensorboard_scalars(run.directory), scalars_of(run.rows))


# --- Weights & Biases, offline


def wandb_files(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def note_processes(folder: Path) -> Callable[[], None]:
    """Return what makes each rank of a command leave a file when it opens wandb."""

    def plant() -> None:
        original = Wandb.open

        def open_(self: Wandb, run: Any) -> None:
            (folder / f"opened_by_rank_{os.environ.get('RANK', '0')}").touch()
            original(self, run)

        Wandb.open = open_  # type: ignore[method-assign]

    return plant


def test_wandb_is_one_run_for_all_ranks_and_resumes(tmp_path: Path) -> None:
    line = [*RUN, *DDP, "logger=wandb", "logger.wandb.mode=offline"]

    def plant() -> None:
        note_processes(tmp_path)()
        after_step(6, preempt)()

    assert command(*line, root=tmp_path / "runs", before=plant).code == 75
    run = finished(*line, root=tmp_path / "runs", before=note_processes(tmp_path))
    assert [path.name for path in tmp_path.glob("opened_by_rank_*")] == ["opened_by_rank_0"]
    files = wandb_files(run.directory)
    identity = (run.directory / "wandb_id").read_text()
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2  # a file for each start, one id
    assert_equal(wandb_rows(files[1]), scalars_of(run.rows))  # the later holds what the earlier may have lost


def test_wandb_loses_nothing_in_a_crash(tmp_path: Path) -> None:
    line = [*RUN, "logger=wandb", "logger.wandb.mode=offline"]
    command(*line, root=tmp_path / "runs", before=after_step(7, crash))
    run = finished(*line, root=tmp_path / "runs")
    files = wandb_files(run.directory)
    assert len(files) == 2 and files[0].name == files[1].name
    assert_equal(wandb_rows(files[1]), scalars_of(run.rows))


def test_tensorboard_and_wandb_at_once(base: Ended, tmp_path: Path) -> None:
    run = finished(*RUN, "logger=[tensorboard,wandb]", "logger.wandb.mode=offline", root=tmp_path / "runs")
    assert_equal(tensorboard_scalars(run.directory), scalars_of(run.rows))
    (file,) = wandb_files(run.directory)
    assert_equal(wandb_rows(file), scalars_of(run.rows))
    assert_same_bits(run, base)


def test_no_sink_leaves_a_file_without_its_option(base: Ended) -> None:
    assert not (base.directory / "wandb").exists() and not (base.directory / "tensorboard").exists()


# --- a sink that fails


@pytest.mark.parametrize("method", ["open", "log", "close"])
@pytest.mark.parametrize("strategy", [[], DDP], ids=["single", "ddp 2"])
def test_a_sink_that_raises_is_a_warning_and_the_run_finishes(method: str, strategy: list[str], tmp_path: Path) -> None:
    def plant() -> None:
        def fail(self: TensorBoard, *args: object) -> None:
            raise ConnectionError("the planted failure")

        setattr(TensorBoard, method, fail)

    run = finished(*RUN, *strategy, "logger=tensorboard", root=tmp_path / "runs", before=plant)
    warning = "WARNING: logger TensorBoard is off for the rest of this run: the planted failure"
    assert run.output.count(warning) == 1
    assert run.summary["status"] == "finished" and len(run.rows) == 16 + 4 + 1


# --- the console


class Screen:
    """What a terminal shows: enough of one for a progress line."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0
        self.column = 0

    def write(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
            if token == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif token == "\r":
                self.column = 0
            elif token.endswith("A") and len(token) > 1:
                self.row -= int(token[2:-1] or 1)
            elif token == "\x1b[2K":
                self.lines[self.row] = ""
            elif len(token) == 1:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + token + line[self.column + 1 :]
                self.column += 1


def on_terminal(
    *overrides: str, root: Path, columns: int, before: Callable[[], None] = lambda: None
) -> tuple[Ended, str]:
    """Run a command whose stderr is a terminal; return how it ended and all that the terminal got."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def use_terminal() -> None:
        os.close(master)
        os.dup2(slave, 0)  # rich asks stdin's size first, and COLUMNS before that
        os.dup2(slave, 2)
        os.environ.update(TERM="xterm-256color")
        os.environ.pop("COLUMNS", None)
        before()

    process = begin(*overrides, root=root, before=use_terminal)
    os.close(slave)
    received = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # EIO: the last process that had it open has ended
            break
        if not block:
            break
        received += block
    os.close(master)
    return end(process, root=root), received.decode()


@pytest.mark.parametrize("strategy", [[], DDP], ids=["single", "ddp 2"])
@pytest.mark.parametrize("columns", [80, 140])
def test_a_terminal_shows_one_progress_line_below_the_evaluations(
    columns: int, strategy: list[str], tmp_path: Path
) -> None:
    run, text = on_terminal(*RUN, *strategy, root=tmp_path / "runs", columns=columns)
    assert run.code == 0, text
    screen = Screen()
    screen.write(text)
    lines = [line.rstrip() for line in screen.lines if line.strip()]
    progress = [line for line in lines if "eta" in line]
    assert len(progress) == 1 and lines[-1] == progress[0], lines
    row = [row for row in run.rows if row["split"] == "train"][-1]
    start = "━{20} " if columns > 100 else ""
    assert re.match(rf"{start}step 16/16  eta \d:\d\d:\d\d  loss {row['loss']:.4f}  ", progress[0]), progress
    if columns > 100:
        assert f"lr {row['lr']:.2e}" in progress[0] and progress[0].endswith(" samples/s")
    evaluations = [line for line in lines if re.match(r"step \d+/16  (val|test)  loss", line)]
    assert len(evaluations) == 5 and text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_a_terminal_gets_its_cursor_back_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError("the planted fault")

    run, text = on_terminal(*RUN, root=tmp_path / "runs", columns=140, before=after_step(6, fail))
    assert run.code == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.rindex("ERROR: rank 0 failed: LookupError: the planted fault") > text.rindex("\x1b[?25h")


def test_without_a_terminal_the_console_is_plain_lines(base: Ended) -> None:
    assert "\x1b" not in base.output and "\r" not in base.output
    number = r"[\d.]+"
    pattern = rf"step (\d+)/16  loss {number}  accuracy {number}  lr {number}e-\d\d  [\d,]+ samples/s  eta \d:\d\d:\d\d"
    steps = [int(found[1]) for line in base.output.splitlines() if (found := re.fullmatch(pattern, line))]
    assert steps == list(range(1, 17))
    (step_7,) = [row for row in base.rows if row["split"] == "train" and row["step"] == 7]
    assert f"step 7/16  loss {step_7['loss']:.4f}  accuracy {step_7['accuracy']:.4f}" in base.output


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
    assert sum("  loss " in text for text in said["0"]) == len(run.rows)
    assert not any("  loss " in text for text in said["1"])


def test_the_log_of_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    stopped = command(*RUN, root=tmp_path / "runs", before=after_step(6, preempt))
    before = (stopped.directory / "train.log").read_text()
    run = finished(*RUN, root=tmp_path / "runs")
    after = (run.directory / "train.log").read_text()
    assert after.startswith(before)
    assert f"[rank 0] INFO continuing from {run.directory / 'checkpoints' / 'step_00000006'}" in after[len(before) :]
