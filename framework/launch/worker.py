"""Workers: how they are started on this machine; and what each does, however started: reads the frozen file, joins, runs."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult

from framework.build.training import Builder
from framework.config.components import locate
from framework.config.frozen_file import FrozenConfig, thaw
from framework.config.modes import MODES
from framework.distributed.hang import diagnose as hang
from framework.distributed.hang.board import Board
from framework.distributed.world import World
from framework.launch.agent import Agent, board_in, prepare
from framework.launch.claim import ClaimedRun
from framework.launch.failures import Failure, cause, record_failure, recorded_failures, report
from framework.launch.scratch import common_folder, new_folder
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.log import LOGGER
from framework.runtime.parent_death import die_with_parent
from framework.runtime.preemption import PREEMPTION


def work(frozen: FrozenConfig, scratch: Path | None, *, node_scratch: Path | None = None) -> int:
    """Run this process's part of the run. Returns the exit code that all ranks agree on; raises what goes wrong.

    `scratch` is a folder that all ranks share, `node_scratch` one that this node's do, if that is another. None: the
    launcher is not ours.
    """
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    log.start_file(RunDirectory(frozen.path.parent).log, who=f"rank {environment.rank}")
    try:
        return _work(frozen, environment=environment, scratch=scratch, node_scratch=node_scratch or scratch)
    except Exception as error:
        record_failure(error, environment=environment, scratch=scratch)
        raise
    finally:
        log.stop_file()


def _work(frozen: FrozenConfig, *, environment: Environment, scratch: Path | None, node_scratch: Path | None) -> int:
    config = thaw(frozen)
    if environment.local_world_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // environment.local_world_size))
    timeout_s = config.launch.timeout_s
    with ExitStack() as at_end, _watched(frozen, environment, node_scratch, timeout_s=timeout_s) as board:
        world = World.start(
            environment,
            backend=config.backend.name,
            timeout_s=timeout_s,
            scratch=scratch,
            num_devices=config.parallel.get("num_devices", 1),
            board=board,
        )
        at_end.callback(world.stop)
        _check_configuration(world, frozen)
        try:
            code: Exit = locate(MODES[config.mode].worker)(Builder(config, world=world))
        except RunEnded as end:
            if world.rank == 0:
                LOGGER.error("%s", end)
            code = end.code
        world.groups.leave()
        return code


@contextmanager
def _watched(
    frozen: FrozenConfig, environment: Environment, scratch: Path | None, *, timeout_s: float
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
            hang.report_error(board, error)
            spans_nodes = environment.world_size > environment.local_world_size
            verdict = hang.settle(board, timeout_s=timeout_s, spans_nodes=spans_nodes)
            if not verdict:
                raise
            if board.leads and not environment.uses_mpi:  # mpirun kills what is left, and keeps the code of the first end
                hang.kill_silent(board)
    if verdict:
        is_told = scratch is not None  # by our own launcher
        if not is_told and environment.rank == environment.local_rank:  # the first node, whose rank 0 keeps the record
            directory.record_end(status="failed", error=verdict)
        if not is_told and board.leads:
            LOGGER.error("%s\n  the stacks of all ranks are in %s", verdict, directory.log)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Exit.HANG)


def work_in_child(frozen: FrozenConfig, scratch: Path | None) -> int:
    """`work`, in a process of its own that does not outlive the one that started it."""
    begin_child()
    return work(frozen, scratch)


def begin_child() -> None:
    """Make this process a worker, which ends with the one that started it and leaves the talking to that."""
    die_with_parent()
    tempfile.tempdir = None  # not the launcher's
    PREEMPTION.watch()  # a spawned one has not inherited it
    PREEMPTION.speaks = False


def _check_configuration(world: World, frozen: FrozenConfig) -> None:
    digests = world.agreement.gather(frozen.digest)
    if len(set(digests)) > 1:
        odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RuntimeError(f"rank {odd} reads another configuration than rank 0 ({frozen.path}); is it one file system?")


# --- in the process that starts them


def start_workers(run: ClaimedRun) -> int:
    """Run the workers to their end. Returns the exit code. No process is left behind."""
    if run.config.launch.num_processes > 1:
        return _start_group(run)
    try:
        with PREEMPTION.heard_at_once():
            return work(run.frozen, None)  # one process needs no group of them: this one will do
    except Exception as error:
        return report(Failure.of(error, rank=0), RunDirectory(run.frozen.path.parent))


def _start_group(run: ClaimedRun) -> int:
    config, directory = run.config, RunDirectory(run.frozen.path.parent)
    prepare(config.parallel["_target_"], MODES[config.mode].worker)
    with new_folder(directory.path) as scratch:
        agent = _LocalAgent(
            config.launch, config.run.id, work_in_child, run.frozen, scratch, scratch=scratch, directory=directory
        )
        result = agent.run()
    if agent.verdict:
        return report(agent.verdict, directory)
    if agent.failure is not None and result.is_failed():
        return report(agent.failure, directory)
    return max(result.return_values.values())


class _LocalAgent(Agent):
    """Tells why it restarts the workers, and does not repeat what hangs, or fails in the same way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: set[tuple[str, str]] = set()  # errors and their places, of all attempts

    def watch_workers(self) -> RunResult:
        result = super().watch_workers()
        if self.verdict:
            self.restarts_left = 0
        elif result.is_failed():
            number = self.attempt + 1
            recorded = recorded_failures(self._scratch, attempt=self.attempt)
            self.failure = cause(recorded, result.failures, ranks=range(len(self.workers.workers)))
            if (self.failure.error, self.failure.where) in self._seen:
                self.restarts_left = 0
            self._seen.add((self.failure.error, self.failure.where))
            if self.restarts_left > 0:
                with log.launcher_file(self._directory.log):
                    LOGGER.warning("%s; restart %d of %d", self.failure, number, self.workers.spec.max_restarts)
        return result
