"""Workers: how they are started on this machine, and what each does: reads the frozen configuration, joins, runs."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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
from framework.runtime.preemption import PREEMPTION


def work(frozen: FrozenConfig, scratch: Path | None, *, node_scratch: Path | None = None) -> int:
    """Run this process's part of the run. Returns the exit code that all ranks agree on; raises what goes wrong.

    `scratch` is a folder that all ranks share, `node_scratch` a folder of this node's ranks, if that is another. None: the
    launcher is not ours.
    """
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    with log.log_file(RunDirectory(frozen.path.parent).log, who=f"rank {environment.rank}"):
        try:
            return _work(frozen, environment=environment, scratch=scratch, node_scratch=node_scratch or scratch)
        except Exception as error:
            record_failure(error, environment=environment, scratch=scratch)
            raise


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
        digests = world.agreement.gather(frozen.digest)
        if len(set(digests)) > 1:
            odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise RuntimeError(f"rank {odd} reads another configuration than rank 0 ({frozen.path}); is it one file system?")
        try:
            code: Exit = locate(MODES[config.mode].worker)(Builder(config, world=world))
        except RunEnded as end:
            if world.rank == 0:
                LOGGER.error("%s", end)
            code = end.code
        world.leave()
        return code


@contextmanager
def _watched(
    frozen: FrozenConfig, environment: Environment, scratch: Path | None, *, timeout_s: float
) -> Iterator[Board | None]:
    """Yield the board of this node's ranks. If an error inside is part of a hang, end this process.

    At once, since nothing later could end it: the destructors of gloo's groups wait for whatever is still under way.
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
        if scratch is None:  # the launcher is not ours, and does not report it
            if environment.rank == environment.local_rank:  # the first node, whose rank 0 keeps the record
                directory.record_end(status="failed", error=verdict)
            if board.leads:
                LOGGER.error("%s\n  the stacks of all ranks are in %s", verdict, directory.log)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Exit.HANG)


# --- in the process that starts them


def start_workers(run: ClaimedRun) -> int:
    """Run the workers to their end. Returns the exit code. No process is left behind."""
    config, directory = run.config, RunDirectory(run.frozen.path.parent)
    if config.launch.num_processes == 1:
        try:
            with PREEMPTION.heard_at_once():
                return work(run.frozen, None)  # in this process
        except Exception as error:
            return report(Failure.of(error, rank=0), directory)
    prepare(config.parallel["_target_"], MODES[config.mode].worker)
    with new_folder(directory.path) as scratch:
        agent = _LocalAgent(config.launch, config.run.id, work, run.frozen, scratch, scratch=scratch, directory=directory)
        result = agent.run()
    if agent.verdict:
        return report(agent.verdict, directory)
    return report(agent.failures[-1], directory) if result.is_failed() else max(result.return_values.values())


class _LocalAgent(Agent):
    """Logs why it restarts the workers, and does not repeat a run that hangs, or that fails in the same way again."""

    def watch_workers(self) -> RunResult:
        result = super().watch_workers()
        if self.verdict:
            self.restarts_left = 0
        elif result.is_failed():
            number = self.attempt + 1
            recorded = recorded_failures(self._scratch, attempt=self.attempt)
            failure = cause(recorded, result.failures, ranks=range(len(self.workers.workers)))
            if any((before.error, before.where) == (failure.error, failure.where) for before in self.failures):
                self.restarts_left = 0
            self.failures.append(failure)
            if self.restarts_left > 0:
                with log.log_file(self._directory.log):
                    LOGGER.warning("%s; restart %d of %d", failure, number, self.workers.spec.max_restarts)
        return result
