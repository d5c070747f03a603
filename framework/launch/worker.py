"""What a worker process does, however it was started: read the frozen configuration, join the others, run."""

import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from framework.config.frozen_file import Frozen, thaw
from framework.distributed.hang import diagnose as hang
from framework.distributed.hang.board import Board
from framework.distributed.world import World
from framework.launch.scratch import common_folder
from framework.modes.evaluate import evaluate
from framework.modes.export import export
from framework.modes.train import execute as train
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, RunEnded, headline, is_lost_peer, place_of
from framework.runtime.files import write_atomically
from framework.runtime.log import LOGGER
from framework.runtime.parent_death import die_with_parent
from framework.runtime.preemption import PREEMPTION


def work(frozen: Frozen, scratch: Path | None, *, node_scratch: Path | None = None) -> int:
    """Run this process's part of the run. Returns the exit code that all ranks agree on; raises what goes wrong.

    `scratch` is a folder that all ranks share, `node_scratch` one that this node's do, if that is another. None: the
    launcher is not ours.
    """
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    log.start_file(RunDirectory(frozen.path.parent).log, rank=environment.rank)
    try:
        return _work(frozen, environment=environment, scratch=scratch, node_scratch=node_scratch or scratch)
    except Exception as error:
        record_failure(error, environment=environment, scratch=scratch)
        raise
    finally:
        log.stop_file()


def _work(frozen: Frozen, *, environment: Environment, scratch: Path | None, node_scratch: Path | None) -> int:
    config = thaw(frozen)
    if environment.local_world_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // environment.local_world_size))
    timeout_s = config["launch"]["timeout_s"]
    with ExitStack() as at_end, _watched(frozen, environment, node_scratch, timeout_s=timeout_s) as board:
        world = World.start(
            environment,
            backend=config["backend"]["name"],
            timeout_s=timeout_s,
            scratch=scratch,
            num_devices=config["parallel"].get("num_devices", 1),
            board=board,
        )
        at_end.callback(world.stop)
        _check_configuration(world, frozen)
        code = _execute(config, world=world)
        world.leave()
        return code


def _execute(config: dict[str, Any], *, world: World) -> Exit:
    try:
        return _EXECUTE[config["mode"]](config, world=world)
    except RunEnded as end:
        if world.rank == 0:
            LOGGER.error("%s", end)
        return end.code


_EXECUTE = {"train": train, "eval": evaluate, "export": export}


@contextmanager
def _watched(
    frozen: Frozen, environment: Environment, scratch: Path | None, *, timeout_s: float
) -> Iterator[Board | None]:
    """Yield the board of this node's ranks. If an error inside is part of a hang, end this process.

    At once, as nothing after it could: the destructors of gloo's groups wait for whatever is still under way.
    """
    if environment.world_size == 1:
        yield None
        return
    directory, verdict = RunDirectory(frozen.path.parent), ""
    with ExitStack() as ends:
        folder = scratch or ends.enter_context(common_folder(directory.path, attempt=environment.attempt))
        board = Board(
            board_in(folder, attempt=environment.attempt),
            rank=environment.rank,
            local_rank=environment.local_rank,
            num_local=environment.local_world_size,
        )
        ends.callback(board.close)
        try:
            yield board
        except Exception as error:
            hang.tell(board, error)
            spans_nodes = environment.world_size > environment.local_world_size
            verdict = hang.settle(board, timeout_s=timeout_s, spans_nodes=spans_nodes)
            if not verdict:
                raise
            if (
                board.leads and not environment.uses_mpi
            ):  # mpirun kills what is left, and keeps the code of the first end
                hang.kill_silent(board)
    if verdict:
        if scratch is None:  # our own launcher tells it otherwise
            _tell_hang(verdict, directory, environment=environment, leads=board.leads)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Exit.HANG)


def _tell_hang(verdict: str, directory: RunDirectory, *, environment: Environment, leads: bool) -> None:
    if environment.rank == environment.local_rank:  # the first node, whose rank 0 keeps the record
        directory.record_end(status="failed", error=verdict)
    if leads:
        LOGGER.error("%s\n  the stacks of all ranks are in %s", verdict, directory.log)


def board_in(folder: Path, *, attempt: int) -> Path:
    return folder / f"board_{attempt}"


def work_in_child(frozen: Frozen, scratch: Path | None) -> int:
    """`work`, in a process of its own that does not outlive the one that started it."""
    begin_child()
    return work(frozen, scratch)


def begin_child() -> None:
    """Make this process a worker, which ends with the one that started it and leaves the talking to that."""
    die_with_parent()
    tempfile.tempdir = None  # not the launcher's
    PREEMPTION.watch()  # a spawned one has not inherited it
    PREEMPTION.speaks = False


def _check_configuration(world: World, frozen: Frozen) -> None:
    digests = world.gather(frozen.digest)
    if len(set(digests)) > 1:
        odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RuntimeError(
            f"rank {odd} reads another configuration than rank 0 ({frozen.path}); is it one file system?"
        )


def record_failure(error: Exception, *, environment: Environment, scratch: Path | None) -> None:
    """Keep the whole story in train.log, and the headline where the parent finds it."""
    log.to_files(traceback.format_exc())
    if scratch is not None:
        failure = Failure.of(error, rank=environment.rank)
        text = json.dumps(dataclasses.asdict(failure))
        write_atomically(scratch / f"failure_{environment.attempt}_{environment.rank}.json", text)


@dataclass(frozen=True)
class Failure:
    """Why a worker ended: the headline."""

    rank: int
    error: str
    where: str
    lost_peer: bool = False  # the error only says that another rank is gone
    time: float = 0.0  # seconds since the epoch

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> "Failure":
        return cls(rank, headline(error), place_of(error), lost_peer=is_lost_peer(error), time=time.time())

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


def recorded_failures(scratch: Path, *, attempt: int) -> list[Failure]:
    """Return what the workers of an attempt have recorded of their ends, the first first; those who lost a peer last."""
    found = [Failure(**json.loads(path.read_text())) for path in scratch.glob(f"failure_{attempt}_*.json")]
    return sorted(found, key=lambda failure: (failure.lost_peer, failure.time))
