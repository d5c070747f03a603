"""Workers: torch elastic's agent starts them. Each worker reads the frozen configuration, joins the world, and runs."""

import gc
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from framework.build.training import Builder
from framework.config.frozen_file import FrozenConfig, thaw
from framework.config.launch import LaunchSection
from framework.config.modes import MODES
from framework.config.targets import locate
from framework.distributed.devices import record_collectives, start_method
from framework.distributed.hang import diagnose as hang
from framework.distributed.hang.alone import watched_alone
from framework.distributed.hang.board import Board, OwnBoard
from framework.distributed.world import World
from framework.launch.claim import ClaimedRun
from framework.launch.failures import Failure, cause, record_failure, recorded_failures, report, starts_again
from framework.launch.fitting import fitting
from framework.launch.scratch import board_in, common_folder, new_folder
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment, variables
from framework.runtime.exits import Exit, RunEnded, Unfit, exits_as_errors
from framework.runtime.forks import begin_child, in_new_thread
from framework.runtime.log import LOGGER
from framework.runtime.memory import keep_freed_memory
from framework.runtime.numerics import share_cores
from framework.runtime.preemption import PREEMPTION
from framework.runtime.program import tell_of_threads
from framework.runtime.torch_compiler import import_dynamo
from framework.runtime.torch_internals import ElasticAgent


def work(frozen: FrozenConfig, scratch: Path | None) -> int:
    """Run this process's part of the run. Return the exit code that all ranks agree on. Errors are raised.

    The ranks of this node share the folder `scratch`. None: the run has one process, or another launcher has started the
    processes.
    """
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    with log.log_file(RunDirectory(frozen.path.parent).log, who=f"rank {environment.rank}"):
        try:
            return _work(frozen, environment=environment, scratch=scratch)
        except Exception as error:
            record_failure(error, environment=environment, scratch=scratch)
            raise


def _work(frozen: FrozenConfig, *, environment: Environment, scratch: Path | None) -> int:
    config = thaw(frozen)
    share_cores(environment.local_world_size)
    timeout_s = config.launch.timeout_s
    with ExitStack() as at_end, _watched(frozen, environment, scratch, timeout_s=timeout_s) as board:
        record_collectives(frozen.path.parent)
        try:
            world = World.start(
                environment, device=config.backend.device(config.device), backend=config.backend.name or "auto",
                backend_module=config.backend.module, timeout_s=timeout_s, scratch=scratch,
                num_devices=config.parallel.get("num_devices", 1), board=board,
            )  # fmt: skip
        except Unfit as end:  # it is raised on every rank
            LOGGER.error("%s", end)
            return end.code
        at_end.callback(world.stop)
        if config.launch.keeps_memory_on(world.device.type):
            keep_freed_memory()
        if odd := [rank for rank in world.agreement.distinct(frozen.digest) if rank]:
            raise RuntimeError(
                f"rank {odd[0]} reads another configuration than rank 0 ({frozen.path}); is it the same file system?"
            )
        gc.freeze()  # imported objects stay, so no garbage collection needs to look at them
        at_end.callback(gc.unfreeze)
        try:
            builder = Builder(config, world=world, token=frozen.token)
            with world.groups.ending_together(), exits_as_errors(), fitting(builder) as build:
                code: Exit = locate(MODES[config.mode].worker)(build)
        except RunEnded as end:
            if world.rank == 0:
                LOGGER.error("%s", end)
            code = end.code
        world.groups.leave()
        return code


@contextmanager
def _watched(
    frozen: FrozenConfig, environment: Environment, scratch: Path | None, *, timeout_s: float
) -> Iterator[OwnBoard | None]:
    """Yield the board of this node's ranks. If an error inside is part of a hang, end this process immediately.

    Nothing could end it later: the destructors of gloo's groups wait for the operations in progress.
    """
    directory, verdict = RunDirectory(frozen.path.parent), ""
    if environment.world_size == 1:

        def end(verdict: str) -> None:
            os._exit(report(verdict, directory))  # HANG

        with watched_alone(timeout_s=timeout_s, on_hang=end) as board:
            yield board
        return
    with ExitStack() as ends:
        folder = scratch or ends.enter_context(common_folder(directory.path, attempt=environment.attempt))
        board = OwnBoard(
            board_in(folder, attempt=environment.attempt), rank=environment.rank, local_rank=environment.local_rank,
            num_local=environment.local_world_size,
        )  # fmt: skip
        ends.callback(board.close)
        try:
            yield board
        except Exception as error:
            hang.report_error(board, error)
            spans_nodes = environment.world_size > environment.local_world_size
            verdict = hang.settle(board, timeout_s=timeout_s, spans_nodes=spans_nodes)
            if not verdict:
                raise
            if board.has_judged and not environment.is_foreign:  # such a launcher ends the others itself
                hang.kill_silent(board)
    if verdict:
        if scratch is None:  # another launcher, which does not report it
            if environment.rank == environment.local_rank:  # the first node, where rank 0 keeps the record
                directory.record_end(status="failed", error=verdict)
            if board.has_judged:
                LOGGER.error("%s\n  the stacks of all ranks are in %s", verdict, directory.log)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Exit.HANG)


# --- in the process that starts the workers


def prepare(*targets: str) -> None:
    """Prepare this process to fork workers: import what they need, such as `targets`, and silence what is reported later."""
    import_dynamo()
    for target in targets:
        locate(target)
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # the framework reports it in three lines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*fork.*multi-threaded", category=DeprecationWarning)
    # the framework handles the other signals: workers stop at a step boundary (framework.runtime.preemption)
    variables().setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")


class Agent(ElasticAgent):
    """Torch elastic's agent. It ends the workers when they have found that one of them hangs.

    Each worker calls `work` with `arguments` and `scratch`, this node's folder. `directory` is the run's.
    """

    _TO_NOTICE_S = 3.0  # a rank after its time-out finds the hang itself

    def __init__(
        self, launch: LaunchSection, run_id: str, work: Callable[..., int], *arguments: Any, scratch: Path,
        directory: RunDirectory,
    ) -> None:  # fmt: skip
        self.place = StaticRendezvous("127.0.0.1", 0, rank=0, world_size=1, run_id=run_id, timeout=0)
        spec = WorkerSpec(
            role="worker",
            local_world_size=launch.num_processes,
            entrypoint=_work_in_child,
            args=(work, *arguments, scratch),
            rdzv_handler=self.place,
            max_restarts=launch.max_restarts,
        )
        super().__init__(spec, folder=str(scratch), start_method=start_method())
        self.verdict = ""  # the verdict, after a hang
        self.failures: list[Failure] = []
        self._scratch, self._directory, self._timeout_s = scratch, directory, launch.timeout_s
        self._view: Board | None = None  # of an attempt's ranks

    @property
    def attempt(self) -> int:
        """Return how many times workers have been started before the present workers."""
        return self.workers.spec.max_restarts - self.restarts_left

    def watch_workers(self) -> RunResult:
        result = super().watch_workers() if not self._has_hung() else None
        stands_still = self._board().stillness_s() > self._timeout_s + self._TO_NOTICE_S
        if stands_still and result is not None and result.state == WorkerState.HEALTHY:
            self.look()
        if result is None or self._has_hung():
            # workers that have found the hang end soon; a worker that has not ended after a second is killed
            self.end_workers(signal.SIGCONT, timeout_s=1)
            return RunResult(state=WorkerState.FAILED)
        return result

    def look(self) -> None:
        """Find out which rank of this node hangs, if its ranks cannot, or if the ranks of another node wait for them."""
        with log.log_file(self._directory.log):
            hang.look(self._board(), timeout_s=self._timeout_s, spans_nodes=self.place.world_size > 1)

    def _board(self) -> Board:
        """Return the board of this attempt's ranks."""
        path = board_in(self._scratch, attempt=self.attempt)
        if self._view is None or self._view.path != path:
            workers = self.workers.workers
            self._view = Board(path, first_rank=workers[0].global_rank, num_local=len(workers))
        return self._view

    @property
    def slept_s(self) -> float:
        """For how many seconds the ranks were suspended, if this has caused the verdict of a hang; else 0."""
        return self._board().idleness.slept_s(timeout_s=self._timeout_s) if self.verdict else 0.0

    def _has_hung(self) -> bool:
        self.verdict = self._board().verdict
        return bool(self.verdict)


def _work_in_child(work: Callable[..., int], *arguments: Any) -> int:
    """Be a worker. End with the parent process, which prints the messages to the user."""
    begin_child()
    tempfile.tempdir = None  # this process must not use the launcher's folder
    PREEMPTION.watch()  # a spawned process does not inherit it
    PREEMPTION.speaks = False
    code = work(*arguments)
    tell_of_threads(0, heard_after_s=1.0)  # when the agent has the code
    return code


class StaticRendezvous(StaticTCPRendezvous):
    """The rendezvous of nodes that know their places: they need no agreement and no port."""

    use_agent_store = False  # the workers have their own store

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(master_addr=self.master_addr, master_port=self.master_port)
        return RendezvousInfo(dist.HashStore(), self.rank, self.world_size, address)  # a store only for this call


def start_workers(run: ClaimedRun) -> int:
    """Run the workers to their end. Return the exit code. No process is left."""
    config, directory = run.config, RunDirectory(run.frozen.path.parent)
    while config.launch.num_processes == 1:
        try:
            with PREEMPTION.heard_at_once():
                return work(run.frozen, None)  # in this process
        except Exception as error:
            failure = Failure.of(error, rank=0)
        if not starts_again(failure, directory):
            return report(failure, directory)
    prepare(config.parallel["_target_"], MODES[config.mode].worker)
    with new_folder(directory.path) as scratch:
        agent = _LocalAgent(config.launch, config.run.id, work, run.frozen, scratch=scratch, directory=directory)
        result = in_new_thread(agent.run)
    if agent.verdict:
        return report(agent.verdict, directory)
    return report(agent.failures[-1], directory) if result.is_failed() else max(result.return_values.values())


class _LocalAgent(Agent):
    """The agent of one machine. It logs why it restarts the workers. It does not repeat a hang, or the same failure."""

    def watch_workers(self) -> RunResult:
        result = super().watch_workers()
        if self.slept_s:
            LOGGER.warning("the run was suspended for %.0f s, longer than its processes wait for each other: they start again",
                           self.slept_s)  # fmt: skip
            self.allow_restart()
        elif self.verdict:
            self.restarts_left = 0
        elif result.is_failed():
            number = self.attempt + 1
            recorded = recorded_failures(self._scratch, attempt=self.attempt)
            failure = cause(recorded, result.failures, ranks=range(len(self.workers.workers)))
            if starts_again(failure, self._directory):
                self.allow_restart()
                return result
            if any((before.error, before.where) == (failure.error, failure.where) for before in self.failures):
                self.restarts_left = 0
            self.failures.append(failure)
            if self.restarts_left > 0:
                with log.log_file(self._directory.log):
                    LOGGER.warning("%s; restart %d of %d", failure, number, self.workers.spec.max_restarts)
        return result
