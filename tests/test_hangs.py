"""A rank that hangs is named, with the stacks of all, within the time-out and five seconds; and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from framework.checkpoint.store import CheckpointStore
from framework.data.loader import Loader
from framework.data.synthetic import Synthetic
from framework.distributed.hang.board import Board, OwnBoard, request_stacks
from framework.distributed.hang.diagnose import frames
from framework.engine.engine import Engine
from framework.launch import worker
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests.harness import Ended, assert_same_bits, before_each, begin, end, finished, once, wait_for, wait_for_checkpoint
from tests.launch.test_local import assert_gone, leftovers
from tests.test_preemption import members
from tests.test_resume import RUN, STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 3.0
WITHIN_S = TIMEOUT_S + 5  # from the fault to the end of the command
AT = 6  # steps taken before the fault: after a checkpoint and an evaluation
Act = Callable[[], object]
LINES = {name: [*RUN, *options, f"launch.timeout_s={TIMEOUT_S}"] for name, options in STRATEGIES.items()}
LINES["fsdp 3"] = [*LINES["fsdp 2"], "launch.nproc_per_node=3"]


# --- what a rank can do instead of joining the others


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop() -> None:
    while True:
        pass


def loop_in_c() -> None:
    re.match("(a|a)*b", "a" * 64)  # tries 2**64 ways in one call, in which Python never runs


def sleep() -> None:
    time.sleep(1000)


# --- and where


def in_training(act: Act) -> None:
    before_each(Engine, "train", lambda engine, step, *, index, **_: act() if index == AT else None)


def in_a_fetch(act: Act) -> None:
    def fetch(loader: Loader, samples_seen: int) -> None:
        if samples_seen == AT * loader.order.global_batch_size:
            act()

    before_each(Loader, "train_step", fetch)


def in_evaluation(act: Act) -> None:
    before_each(Engine, "evaluate", lambda *_: act())


def in_a_save(act: Act) -> None:
    before_each(CheckpointStore, "_write", lambda *_: act())


def at_the_start(act: Act) -> None:
    before_each(worker, "thaw", lambda *_: act())


def in_the_data(act: Act) -> None:
    before_each(Synthetic, "load", lambda *_: act())


def hang(
    strategy: str, rank: int, act: Act, where: Callable[[Act], None], *, folder: Path, options: tuple[str, ...] = ()
) -> tuple[Ended, float]:
    """Run a command in which one rank acts, once. Returns how it ended, and how many seconds after the fault."""
    since = folder / "since"

    def once() -> object:
        if Environment.read().rank != rank or since.exists():
            return None
        since.write_text(repr(time.time()))
        return act()

    process = begin(*LINES[strategy], *options, root=folder / "runs", before=lambda: where(once))
    ended = end(process, root=folder / "runs", timeout_s=60)
    elapsed_s = time.time() - float(since.read_text())
    assert not members(process.pid)
    return ended, elapsed_s


def check(ended: Ended, elapsed_s: float, *, rank: int, stacks: dict[int, str]) -> None:
    """The run has ended as a hang of this rank, and its log has each rank's stack, with this function in it."""
    assert ended.code == 71, ended.output
    assert elapsed_s < WITHIN_S
    assert ended.summary["status"] == "failed"
    assert ended.summary["error"].startswith(f"rank {rank} hangs: "), ended.summary["error"]
    assert f"] ERROR: {ended.summary['error']}\n  the stacks of all ranks are in {ended.directory}" in ended.output
    assert "restart" not in ended.output
    log = (ended.directory / "train.log").read_text()
    for one, function in stacks.items():
        found = re.search(rf"\[rank \d\] ERROR rank {one} .*\n((?:  |Traceback|Thread|Current|\S*Error|\n).*\n?)*", log)
        assert found is not None, log
        assert re.search(rf"line \d+,? in {function}\n", found[0]), found[0]
    assert not leftovers(ended)


HANGS = [  # where a rank acts, the phase that is named, and the function in which the others are
    ("ddp 2", 1, stop, in_training, "training", "train", "stop"),
    ("ddp 3", 0, loop, in_training, "training", "train", "computes"),
    ("fsdp 2", 0, loop_in_c, in_training, "training", "train", "computes"),
    ("fsdp 3", 2, stop, in_training, "training", "train", "stop"),
    ("fsdp 3", 1, loop, in_training, "training", "train", "computes"),
    ("ddp 3", 2, loop_in_c, in_training, "training", "train", "computes"),
    ("ddp 2", 0, sleep, in_training, "training", "train", "waits, but not"),
    ("ddp 2", 1, sleep, in_a_fetch, "data", "train", "waits, but not"),
    ("ddp 3", 1, stop, in_evaluation, "evaluation", "evaluate", "stop"),
    ("fsdp 2", 1, stop, in_a_save, "saving", "save", "stop"),
    ("ddp 2", 0, loop, in_evaluation, "evaluation", "evaluate", "computes"),
    ("fsdp 3", 0, stop, in_evaluation, "evaluation", "evaluate", "stop"),
    ("ddp 2", 0, stop, in_a_save, "saving", "save", "stop"),
    ("ddp 3", 2, loop_in_c, in_a_save, "saving", "save", "computes"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank", "act", "where", "phase", "function", "manner"), HANGS)
def test_a_rank_that_hangs_is_named_and_the_same_command_continues(
    strategy: str, rank: int, act: Act, where: Callable[[Act], None], phase: str, function: str, manner: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    ended, elapsed_s = hang(strategy, rank, act, where, folder=tmp_path)
    num_ranks, error = int(strategy[-1]), ended.summary["error"]
    check(ended, elapsed_s, rank=rank, stacks=dict.fromkeys(range(num_ranks), function) | {rank: act.__name__})
    assert f"rank {rank} hangs: it " in error and manner in error and f"({phase}), at {__file__}:" in error
    if where is in_training:  # no rank has gone on
        assert error.count(f"in step {AT + 1} (training), at ") == num_ranks
    assert_same_bits(finished(*LINES[strategy], root=tmp_path / "runs"), once(*LINES[strategy]))


@pytest.mark.slow
@pytest.mark.parametrize("act", [stop, pytest.param(sleep, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_at_its_start_is_named(act: Act, tmp_path: Path) -> None:
    ended, elapsed_s = hang("ddp 2", 1, act, at_the_start, folder=tmp_path)
    assert ended.code == 71, ended.output
    assert elapsed_s < WITHIN_S
    assert ended.summary["error"].startswith("rank 1 hangs: it has not yet reported"), ended.summary["error"]
    assert_same_bits(finished(*LINES["ddp 2"], root=tmp_path / "runs"), once(*LINES["ddp 2"]))


@pytest.mark.slow
@pytest.mark.parametrize("act", [loop, stop])
def test_a_rank_that_hangs_while_it_loads_the_data_is_named(act: Act, tmp_path: Path) -> None:
    ended, elapsed_s = hang("ddp 2", 0, act, in_the_data, folder=tmp_path)  # rank 0 loads for its whole node
    check(ended, elapsed_s, rank=0, stacks={0: act.__name__, 1: "train"})
    assert_same_bits(finished(*LINES["ddp 2"], root=tmp_path / "runs"), once(*LINES["ddp 2"]))


def test_a_stack_is_of_where_a_process_was_stopped(tmp_path: Path) -> None:
    for number in range(20):
        pid = os.fork()
        if not pid:
            OwnBoard(tmp_path / str(number), rank=0, local_rank=0, num_local=2)
            for _ in range(8):
                threading.Thread(target=sleep, daemon=True).start()
            stop()
            time.sleep(10)  # until it is killed
            os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        board = Board(tmp_path / str(number), first_rank=0, num_local=2)
        request_stacks(pid)
        wait_for(lambda board=board: "in <module>" in board.stack(0), timeout_s=10, what="the stack")  # the last of its lines
        stack = board.stack(0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        board.close()
        assert frames(stack)[0].function == "stop", stack


# --- a rank that leaves out one collective, once: where `act` says so


def leave_out() -> bool:
    return True


def the_gradients(act: Act) -> None:
    def leave_out(engine: Engine, step: Any, *, index: int, **_: Any) -> None:
        if index == AT and act():
            engine.set_sync(False)
            engine.set_sync = lambda _: None
            engine.forward._weight = None  # its collectives are of another size: gloo's own check would end the processes
            engine.forward.settle = lambda *_, **__: None

    before_each(Engine, "train", leave_out)


def the_norm(act: Act) -> None:
    def leave_out(trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.progress.step == AT and act():
            trainer.engine.clip_grad_norm = lambda max_norm: torch.tensor(1.0)

    before_each(Trainer, "train_step", leave_out)


def the_agreements(act: Act) -> None:
    """From the metrics of that step on: of one alone, the next, of another size, would end the processes (gloo's own check)."""

    def leave_out(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == AT + 1 and act():
            trainer.world.agreement.sum = lambda values: values
            trainer.world.agreement.any_flags = lambda *flags, now=True: [False] * len(flags)

    before_each(Trainer, "log_step", leave_out)


LEFT_OUT = [
    ("ddp 2", 1, the_gradients, ()),
    ("ddp 3", 0, the_agreements, ()),
    ("fsdp 2", 0, the_norm, ()),
    ("ddp 3", 2, the_gradients, ("trainer.log_every=100",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank", "what", "options"), LEFT_OUT)
def test_a_rank_that_leaves_out_a_collective_is_named_and_the_same_command_continues(
    strategy: str, rank: int, what: Callable[[Act], None], options: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    ended, elapsed_s = hang(strategy, rank, leave_out, what, folder=tmp_path, options=options)
    check(ended, elapsed_s, rank=rank, stacks=dict.fromkeys(range(int(strategy[-1])), "fit"))
    assert ended.summary["error"].startswith(f"rank {rank} hangs: it is ahead of the others, in step ")
    if not options:
        assert_same_bits(finished(*LINES[strategy], root=tmp_path / "runs"), once(*LINES[strategy]))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_a_rank_that_is_stopped_is_named_and_the_same_command_continues(rank: int, tmp_path: Path) -> None:
    line = [*RUN, "parallel=ddp", "trainer.max_epochs=15", f"launch.timeout_s={2 * TIMEOUT_S}"]  # nothing is imported yet
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py", *line]
    output = tmp_path / "output"
    with open(output, "w") as file:
        agent = subprocess.Popen(
            [*command, f"run.root={tmp_path / 'runs'}"], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for_checkpoint(tmp_path / "runs")
        workers = {int(p.environ()["RANK"]): p.pid for p in psutil.Process(agent.pid).children(recursive=True)}
        os.kill(workers[rank], signal.SIGSTOP)
        stopped_at = time.time()
        assert agent.wait(60) == 1
        elapsed_s = time.time() - stopped_at
    finally:
        agent.kill()
    assert_gone(list(workers.values()), timeout_s=5.0)
    # torchrun itself has but one code, and tells those of its processes
    check(Ended(71, output.read_text(), tmp_path / "runs"), elapsed_s - TIMEOUT_S, rank=rank, stacks={0: "fit", 1: "fit"})
    assert re.search(r"exitcode *: 71 ", output.read_text()), output.read_text()
    again = finished(*line, "launch.nproc_per_node=2", root=tmp_path / "runs")
    assert_same_bits(again, once(*line, "launch.nproc_per_node=2"))


# --- nobody waits


@pytest.mark.slow
def test_one_process_alone_that_stands_still_is_ended_and_the_same_command_continues(tmp_path: Path) -> None:
    line = [*RUN, f"launch.timeout_s={TIMEOUT_S}"]
    began = time.monotonic()
    ended = end(begin(*line, root=tmp_path / "runs", before=lambda: in_training(sleep)), root=tmp_path / "runs")
    assert ended.code == 71 and time.monotonic() - began < WITHIN_S + 10, ended.output
    error = ended.summary["error"]
    assert error.startswith("rank 0 hangs: it waits") and f"in step {AT + 1} (training), at {__file__}:" in error
    assert "in sleep" in (ended.directory / "train.log").read_text()
    assert_same_bits(finished(*line, root=tmp_path / "runs"), once(*line))


@pytest.mark.slow
def test_a_loader_process_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    def plant() -> None:
        before_each(Synthetic, "transform", lambda *_, keys, **__: sleep() if keys is not None else None)

    line = [*RUN, f"launch.timeout_s={TIMEOUT_S}", "dataset.num_workers=2", "dataset.augment=true"]
    ended = end(begin(*line, root=tmp_path / "runs", before=plant), root=tmp_path / "runs")
    assert ended.code == 71, ended.output
    assert f"rank 0 hangs: it waits, but not for the other ranks, at its start, at {__file__}:" in ended.summary["error"]
    log = (ended.directory / "train.log").read_text()
    assert len(re.findall(r'File ".+", line \d+ in sleep', log)) == 2, log  # the stacks of both processes
    assert_same_bits(finished(*line, root=tmp_path / "runs"), once(*line))


@pytest.mark.slow
def test_a_loader_that_works_for_long_is_no_hang(tmp_path: Path) -> None:
    """The process waits for a loader's process, which computes."""

    def plant() -> None:
        def compute(data: Synthetic, inputs: Any, targets: Any, *, keys: Any) -> None:
            until = time.monotonic() + 2 * TIMEOUT_S + 4
            while keys is not None and not (tmp_path / "done").exists() and time.monotonic() < until:
                pass
            (tmp_path / "done").touch()

        before_each(Synthetic, "transform", compute)

    line = [*RUN, f"launch.timeout_s={TIMEOUT_S}", "dataset.num_workers=1", "dataset.augment=true"]
    ended = finished(*line, root=tmp_path / "runs", before=plant)
    assert (tmp_path / "done").exists() and "hangs" not in ended.output, ended.output
