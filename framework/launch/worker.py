"""Workers: torch elastic starts them. Each worker reads the frozen configuration, joins the world, and runs."""

import gc
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, RunProcsResult, start_processes

from framework.build.training import Builder
from framework.config.frozen_file import FrozenConfig, thaw
from framework.config.launch import LaunchSection
from framework.config.modes import MODES
from framework.config.targets import locate
from framework.distributed.devices import record_collectives, start_method
from framework.distributed.hang import diagnose as hang
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
from framework.runtime.preemption import PREEMPTION, held_back
from framework.runtime.program import tell_of_threads
from framework.runtime.torch_compiler import import_dynamo


def work(frozen: FrozenConfig, scratch: Path | None) -> int:
    """Run this process's part of the run. Return the exit code that all ranks agree on. Errors are raised.

    The ranks of this node share the folder `scratch`. None: the run has one process, or another launcher has started the
    processes.
    """
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    with log.log_file(RunDirectory(frozen.path.parent).log, who=f"rank {environment.rank}"), PREEMPTION.not_passed_on():
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
        keeps_memory = config.launch.keep_freed_memory
        if world.device.type == "cpu" if keeps_memory is None else keeps_memory:
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
        gc.collect()  # DDP's reducer and the shards must go before their process groups: exit can hang (pytorch#56297)
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

        with hang.watched_alone(timeout_s=timeout_s, on_hang=end) as board:
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


class WorkerGroup:
    """This node's workers, as children of this process. They are ended when it is found that one of them hangs.

    Each worker calls `work` with `arguments` and `scratch`, this node's folder. `directory` is the run's.
    """

    _TO_NOTICE_S = 3.0  # a rank after its time-out finds the hang itself

    def __init__(
        self, launch: LaunchSection, run_id: str, work: Callable[..., int], *arguments: Any, scratch: Path,
        directory: RunDirectory,
    ) -> None:  # fmt: skip
        self.launch, self.run_id = launch, run_id
        self.verdict = ""  # the verdict, after a hang
        self._work, self._scratch, self._directory = (work, *arguments, scratch), scratch, directory
        self._logs = DefaultLogsSpecs(log_dir=str(scratch))
        self._running: PContext | None = None

    def start(self, attempt: int, *, node: int = 0, num_nodes: int = 1, store: tuple[str, int] | None = None) -> None:
        """Start the workers of an attempt. `store` is the address of the store of all nodes, if there is one."""
        count, self._attempt = self.launch.num_processes, attempt
        host, port = store or ("127.0.0.1", 0)
        common = {
            "WORLD_SIZE": num_nodes * count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node, "GROUP_WORLD_SIZE": num_nodes,
            "MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": store is not None,
            "TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_MAX_RESTARTS": self.launch.max_restarts,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": variables().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }  # fmt: skip
        self._ranks = range(node * count, (node + 1) * count)
        envs = {number: {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": number}.items()}
                for number, rank in enumerate(self._ranks)}  # fmt: skip
        self._board = Board(board_in(self._scratch, attempt=attempt), first_rank=self._ranks[0], num_local=count)
        self._spans_nodes = num_nodes > 1
        with held_back():
            self._running = start_processes(
                "worker", _work_in_child, dict.fromkeys(envs, self._work), envs, self._logs, start_method=start_method()
            )

    def poll(self) -> RunProcsResult | None:
        """Return how the workers have ended, or None as long as they work. After a hang, there is only the verdict."""
        assert self._running is not None  # `start` comes first
        result = self._running.wait(0) if not self._board.verdict else None
        if result is None and self._board.stillness_s() > self.launch.timeout_s + self._TO_NOTICE_S:
            self.look()
        self.verdict = self._board.verdict
        if self.verdict:
            # workers that have found the hang end soon; a worker that has not ended after a second is killed
            self.end(signal.SIGCONT, timeout_s=1)
            return RunProcsResult()
        return result

    def look(self) -> None:
        """Find out which rank of this node hangs, if its ranks cannot, or if the ranks of another node wait for them."""
        with log.log_file(self._directory.log):
            hang.look(self._board, timeout_s=self.launch.timeout_s, spans_nodes=self._spans_nodes)

    def cause(self, ended: RunProcsResult) -> Failure:
        """Return why the workers have failed."""
        failed = {self._ranks[number]: failure for number, failure in ended.failures.items()}
        pids = dict(zip(self._ranks, self._running.pids().values())) if self._running is not None else {}
        return cause(recorded_failures(self._scratch, attempt=self._attempt), failed, pids=pids)

    @property
    def slept_s(self) -> float:
        """For how many seconds the ranks were suspended, if this has caused the verdict of a hang; else 0."""
        return self._board.idleness.slept_s(timeout_s=self.launch.timeout_s) if self.verdict else 0.0

    def send(self, signum: signal.Signals) -> None:
        for pid in self._running.pids().values() if self._running is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def end(self, signum: signal.Signals, *, timeout_s: int = 30) -> None:
        """Send the workers a signal, and kill the workers that remain after the time-out."""
        if self._running is not None:
            self._running.close(signum, timeout_s)


def _work_in_child(work: Callable[..., int], *arguments: Any) -> int:
    """Be a worker. End with the parent process, which prints the messages to the user."""
    begin_child()
    tempfile.tempdir = None  # this process must not use the launcher's folder
    code = work(*arguments)
    tell_of_threads(0, heard_after_s=1.0)  # when the parent has the code
    return code


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
        workers = WorkerGroup(config.launch, config.run.id, work, run.frozen, scratch=scratch, directory=directory)
        try:
            return in_new_thread(partial(_run, workers, directory))
        finally:
            workers.end(signal.SIGTERM)


def _run(workers: WorkerGroup, directory: RunDirectory) -> int:
    """Run the workers of one machine to their end. Return the exit code. Do not repeat a hang, or the same failure."""
    failures, most = list[Failure](), workers.launch.max_restarts
    attempt = 0
    while True:
        workers.start(attempt)
        while (ended := workers.poll()) is None:
            time.sleep(0.1)
        if slept_s := workers.slept_s:
            LOGGER.warning("the run was suspended for %.0f s, longer than its processes wait for each other: they start again",
                           slept_s)  # fmt: skip
        elif workers.verdict:
            return report(workers.verdict, directory)
        elif not ended.is_failed():
            return int(max(ended.return_values.values()))
        elif not starts_again(failure := workers.cause(ended), directory):
            is_repeated = any((before.error, before.where) == (failure.error, failure.where) for before in failures)
            failures.append(failure)
            if is_repeated or len(failures) > most:
                return report(failure, directory)
            with log.log_file(directory.log):
                LOGGER.warning("%s; restart %d of %d", failure, len(failures), most)
        attempt += 1
