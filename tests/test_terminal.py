"""What a terminal shows of a run, at any width, and what a file gets of it instead; mode=status and --help in a terminal."""

import io
import os
import re
import shlex
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from framework.config.help import help_text
from framework.loggers import console
from framework.loggers.sink import RunInfo
from framework.loggers.terminal import Terminal
from framework.runs.metrics_file import in_digits
from framework.runtime import numerics
from framework.sweep.sweep import sweep
from tests.harness import Ended, command, finished, typed
from tests.terminal import TRAIN, Shown, on_terminal, show
from tests.test_loggers import DDP, RUN
from tests.test_resume import after_step, preempt

WIDTHS = [60, 80, 120]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_info(
    *, total_steps: int = 800, monitor: str = "val/loss", direction: str = "min", best: float | None = None
) -> RunInfo:
    return RunInfo(Path(), "id", "name", 0, total_steps, {}, monitor=monitor, direction=direction, best=best)


def live_lines(shown: Shown) -> list[str]:
    """Return every first row of the live line that the terminal got."""
    parts = re.split(r"\r\n|\r\x1b\[2K|\r|\n", shown.received.decode())
    return [text for part in parts if "━" in (text := ESCAPES.sub("", part)) and "eta" in text]


# --- the live line


@pytest.mark.slow
def test_a_breakpoint_in_a_model_has_the_terminal_to_itself(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(STOPPING)
    said: list[bytes] = []

    def answer(shown: Shown, terminal: int) -> None:
        if shown.received.count(b"(Pdb) ") > len(said):
            said.append([b"p 6 * 7\n", b"c\n"][len(said) % 2])
            os.write(terminal, said[-1])

    words = ["model._target_=net.Net", "trainer.max_steps=4", "trainer.max_epochs=null", "trainer.log_every=1"]
    shown = show([*TRAIN, *words], directory=tmp_path, columns=100, look=answer)
    assert shown.code == 0 and said == [b"p 6 * 7\n", b"c\n"], shown.lines
    asked = next(number for number, line in enumerate(shown.lines) if line == "(Pdb) p 6 * 7")
    assert shown.lines[asked + 1 : asked + 3] == ["42", "(Pdb) c"]
    from_prompt = shown.received[shown.received.index(b"(Pdb) ") : shown.received.index(b"(Pdb) c")]
    assert "━".encode() not in from_prompt  # no live line
    assert any(line.startswith("step 4/4  loss") for line in shown.lines), shown.lines  # plain lines from there on


STOPPING = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        if self.training and not hasattr(Net, "stopped"):
            Net.stopped = True
            breakpoint()
        return super().forward(x)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(("columns", "strategy"), [(60, []), (80, DDP), (120, [])], ids=["60", "80, two processes", "120"])
def test_a_terminal_shows_it_below_the_evaluations_and_then_no_more(columns: int, strategy: list[str], tmp_path: Path) -> None:
    run, shown = on_terminal(*RUN, *strategy, root=tmp_path / "runs", columns=columns)
    assert run.code == 0, shown.lines
    drawn = live_lines(shown)
    assert drawn and max(map(len, drawn)) <= columns
    losses = {in_digits(row["loss"]) for row in run.rows if row["split"] == "train"}
    with_row = [text for text in drawn if "loss" in text]
    assert with_row
    for text in with_row:
        assert re.search(r"[━╺╸]{10} \d+/16 loss ", text) and re.search(r"\d:\d\d:\d\d eta [-\d]", text), text
        assert re.search(r"loss (\S+)", text)[1] in losses, text
    assert not any("━" in text or "eta" in text for text in shown.lines), "it goes without a trace"
    evaluations = [text.split() for text in shown.lines if re.match(r" +\d+  (val|test) ", text)]
    assert [(int(step), split) for step, split, *_ in evaluations] == [
        (row["step"], row["split"]) for row in run.rows if row["split"] != "train"
    ]
    (header,) = [text for text in shown.lines if text.startswith("step  split")]
    assert header.split() == ["step", "split", "loss", "accuracy", "top5"]
    text = shown.received.decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    after = ESCAPES.sub("", text[text.index("finished: ") :]).replace("\r", "")
    assert "━" not in after and all(line.startswith("  ") for line in after.splitlines()[1:]), "nothing stale after it"
    logged = (run.directory / "train.log").read_text()
    assert len(re.findall(r"INFO step \d+/16  (?:val|test)  loss ", logged)) == len(evaluations), "the log has plain lines"


def test_a_terminal_gets_its_cursor_back_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError("the planted fault")

    run, shown = on_terminal(*RUN, root=tmp_path / "runs", columns=140, before=after_step(6, fail))
    text = shown.received.decode()
    assert run.code == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.rindex("ERROR: rank 0 failed: LookupError: the planted fault") > text.rindex("\x1b[?25h")
    assert not any("━" in text for text in shown.lines), shown.received[-3000:]


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", [[], DDP], ids=["alone", "two processes"])
def test_a_signal_is_said_in_its_place(strategy: list[str], tmp_path: Path) -> None:
    def act() -> None:
        if os.environ.get("RANK", "0") == "0":
            speaker = os.getppid() if strategy else os.getpid()
            os.kill(speaker, signal.SIGINT)

    run, shown = on_terminal(*RUN, *strategy, root=tmp_path / "runs", columns=100, before=after_step(8, act))
    assert run.code == 75, shown.lines
    assert "SIGINT: stopping after this step; Ctrl-C again stops at once" in shown.lines, shown.lines
    assert not any("━" in text for text in shown.lines), "nor is the line left above it"


# --- the table of evaluations


def printed(*rows: dict[str, Any], width: int = 80, **info: Any) -> list[str]:
    """Return the lines that the rows of evaluations leave on a terminal."""
    text = io.StringIO()
    shown = Terminal(RichConsole(file=text, width=width), run_info(**info))
    for row in rows:
        shown.add_row(row)
    shown.close()
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip() and "eta" not in line]


def test_a_star_marks_the_best_of_the_monitor_so_far() -> None:
    values = [0.4, 0.7, 0.6, 0.8]
    rows = [{"step": step, "split": "val", "loss": 1.0, "top5": 0.9, "accuracy": value} for step, value in enumerate(values)]
    test = {"step": 9, "split": "test", "loss": 0.1, "top5": 0.9, "accuracy": 0.99}
    header, *lines = printed(*rows, test, monitor="val/accuracy", direction="max", best=0.5)
    assert header.split() == ["step", "split", "loss", "accuracy", "top5"], "the monitored metric comes first after the loss"
    assert [text.split()[3] for text in lines] == ["0.4000", "*0.7000", "0.6000", "*0.8000", "0.9900"]


def test_a_value_that_is_not_finite_is_nan_everywhere() -> None:
    row = {"step": 4, "split": "train", "loss": None, "accuracy": None}
    assert printed(row | {"split": "val"})[1].split() == ["4", "val", "nan", "nan"]
    assert console._numbers(row) == "loss nan  accuracy nan"


def test_columns_are_aligned_and_the_header_comes_again_only_with_others() -> None:
    row = {"step": 100, "split": "val", "loss": 12345.678901, "accuracy": 0.5, "精度のとても長い名前": 1e-7}
    lines = printed(row, row | {"step": 200}, row | {"step": 300, "late": 1.0}, total_steps=12_345_678)
    assert [line.split()[0] for line in lines] == ["step", "100", "200", "step", "300"]
    ends = [[cell_len(text[: match.end()]) for match in re.finditer(r"[^\s*]+", text)] for text in lines[:3]]
    assert ends[0][2:] == ends[1][2:] == ends[2][2:]
    narrow = printed(row, width=40)
    assert narrow[0].split() == ["step", "split", "loss", "accuracy"] and max(map(cell_len, narrow)) <= 40


# --- what a run says at its start and its end


def test_it_says_first_what_runs(tmp_path: Path) -> None:
    line = [*RUN, *DDP, "micro_batch_size=4", "precision=bf16", "trainer.freeze=[layers.0.*]"]
    run = finished(*line, root=tmp_path / "runs")
    found = facts_in(run.output, after="training ")
    assert re.search(r"training [\d,]+ of [\d,]+ parameters for 16 steps on 2 x cpu, in ", run.output)
    assert found["model"] == "MLP in bf16"
    assert re.fullmatch(r"ddp, \w+ 2: 2 x cpu on \S+", found["strategy"], re.IGNORECASE), found
    assert found["data"] == "Synthetic: 64 training samples, 16 a step in micro-batches of 4"
    assert found["steps"] == "1 to 16, 4 an epoch; evaluation every 5, checkpoint every 4"


def test_it_says_where_it_continues_and_then_what_has_come_of_it(tmp_path: Path) -> None:
    command(*RUN, root=tmp_path / "runs", before=after_step(6, preempt))
    run = finished(*RUN, root=tmp_path / "runs")
    assert facts_in(run.output, after="training ")["steps"].startswith("7 to 16, ")
    told, summary = facts_in(run.output, after="finished: "), run.summary
    best = min((row["loss"], row["step"]) for row in run.rows if row["split"] == "val")
    assert told["best"] == f"val/loss {best[0]:.4f} at step {best[1]}"
    (test,) = [row for row in run.rows if row["split"] == "test"]
    assert told["test"].startswith(f"loss {test['loss']:.4f}  accuracy {test['accuracy']:.4f}")
    speed, memory = summary["samples_seen"] / summary["train_s"], summary["memory_gib"][0]
    assert told["took"].endswith(f"; {speed:,.0f} samples/s in training; {memory:.2f} GiB at most"), told["took"]
    again = finished(*RUN, root=tmp_path / "runs")
    assert facts_in(again.output, after="finished already, at step 16: ") == told, "also when there is nothing left to do"


def facts_in(output: str, *, after: str) -> dict[str, str]:
    """Return the facts of the block below a line, by their labels."""
    lines = output.splitlines()
    (start,) = [number for number, text in enumerate(lines) if text.startswith(after)]
    found: dict[str, str] = {}
    for text in lines[start + 1 :]:
        if not text.startswith("  "):
            break
        label = text[2:12].strip()
        if label:
            found[label] = text[12:]
    return found


@pytest.mark.slow
def test_the_next_commands_can_be_pasted(tmp_path: Path) -> None:
    line = [*RUN, "trainer.max_epochs=1", "rehearse=false"]
    done = show([*TRAIN, *line], directory=tmp_path, columns=200)
    assert done.code == 0, done.lines
    start = next(number for number, text in enumerate(done.lines) if text.startswith("  next "))
    commands = [text[12:] for text in done.lines[start:]]
    assert [re.search(r"mode=\w+", text)[0] for text in commands] == ["mode=eval", "mode=export", "mode=report"]
    for text in (commands[0], commands[2]):
        python, program, *words = shlex.split(text)
        assert (python, program) == ("python", TRAIN[-1]) and typed(*words, directory=tmp_path).code == 0, text
    assert (tmp_path / "runs" / "report.html").exists()


def test_a_run_of_a_sweep_is_brief(tmp_path: Path) -> None:
    line = [*RUN, "trainer.max_epochs=1", "seed=1,2"]
    ended, shown = on_terminal(*line, root=tmp_path / "runs", columns=100, run=lambda overrides: sweep(overrides, []))
    assert ended.code == 0, shown.lines
    text = "\n".join(shown.lines)
    assert text.count("training ") == text.count("finished: ") == 2
    assert not re.search(r"^  (model|strategy|best|next) ", text, re.MULTILINE) and "kind" not in text
    assert not any("━" in line for line in shown.lines)


# --- without a terminal


def test_plain_lines_become_rarer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, lines = 0.0, list[float]()
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(console.LOGGER, "info", lambda *_: lines.append(now))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    plain = console.Console()
    plain.open(run_info(total_steps=40_000))
    for step in range(1, 36_001):
        now = step / 10
        plain.log({"step": step, "split": "train", "loss": 1.0})
    pauses = [later - earlier for earlier, later in pairwise(lines)]
    assert min(pauses) >= 5 and pauses[0] == pytest.approx(5.0) and pauses[-1] == pytest.approx(60.0)
    assert all(later > earlier - 0.11 for earlier, later in pairwise(pauses)), "but for the tenth between two steps"
    before = len(lines)
    plain.log({"step": 40_000, "split": "train", "loss": 1.0})
    plain.log({"step": 40_000, "split": "val", "loss": 1.0})
    assert len(lines) == before + 2, "the last row, and each evaluation"


# --- more processes than cores


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_more_processes_than_cores_is_said_once(num_cores: int, tmp_path: Path) -> None:
    def plant() -> None:
        numerics.cpus = lambda: list(range(num_cores))

    run = finished(*RUN, *DDP, "trainer.max_epochs=1", root=tmp_path / "runs", before=plant)
    said = re.findall(r"^2 processes share 1 core of \S+: .*launch\.nproc_per_node.*$", run.output, re.MULTILINE)
    assert len(said) == (1 if num_cores == 1 else 0), run.output


# --- mode=status


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    root = tmp_path_factory.mktemp("several") / "runs"
    for words in (
        ["seed=1"],
        ["seed=2", "optimizer.lr=1e30", "trainer.divergence.limit=1"],
        ["model=cnn", "model.channels=[2]", "name=other"],
    ):
        line = [word for word in RUN if not (word.startswith("model") and "model=cnn" in words)]
        ended = command(*line, *words, root=root)
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_status_shows_whole_ids_and_what_differs(columns: int, runs: Ended) -> None:
    ended, shown = on_terminal("mode=status", root=runs.root, columns=columns)
    assert ended.code == 0
    paths = sorted(path.parent for path in runs.root.glob("*/*/config.yaml"))
    assert len(paths) == 3
    text = "\n".join(shown.lines)
    for path in paths:
        (line,) = [line for line in shown.lines if line.startswith(str(path.relative_to(runs.root)) + " ")]
        assert re.search(r" (finished|failed) ", line)
    assert "seed=1" in text and "seed=2" in text and "…" not in text and "..." not in text
    assert "model=" not in text, "runs of another name are not compared"
    assert max(map(len, shown.lines)) <= columns
    why = re.sub(r"\s+", " ", text)
    assert "is not finite" in why, "the reason is whole, wherever it is"


# --- help


@pytest.mark.quick(1)
@pytest.mark.parametrize("columns", WIDTHS)
def test_help_is_wrapped_in_the_terminals_width_and_has_everything(columns: int, tmp_path: Path) -> None:
    shown = show([*TRAIN, "--help"], directory=tmp_path, columns=columns)
    assert shown.code == 0
    printed = shown.received.decode().replace("\r\n", "\n").rstrip("\n").splitlines()
    assert max(map(len, printed)) <= columns
    words = lambda text: text.replace("\\\n", "").split()  # noqa: E731
    assert sorted(words("\n".join(printed))) == sorted(words(help_text([], width=10_000))), "no word is lost"
