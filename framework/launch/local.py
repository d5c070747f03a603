"""Workers on this machine: torch elastic's agent, in this process, with workers forked from it while it is warm."""

import importlib
import logging
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from framework import log
from framework.board import posted_verdict
from framework.environment import set_default
from framework.frozen import Frozen
from framework.launch.scratch import new_folder
from framework.launch.worker import Failure, board_in, recorded_failures, work, work_in_child
from framework.log import LOGGER
from framework.outcome import Exit
from framework.run_directory import RunDirectory


def launch(config: dict[str, Any], *, frozen: Frozen) -> int:
    """Run the workers to their end. Returns the exit code. No process is left behind."""
    directory = RunDirectory(Path(config["run"]["dir"]))
    if config["launch"]["nproc_per_node"] > 1:
        return _launch_group(config, frozen=frozen, directory=directory)
    try:
        return work(frozen, None)  # one process needs no group of them: this one will do
    except Exception as error:
        return _report(Failure.of(error, rank=0), directory)


def _launch_group(config: dict[str, Any], *, frozen: Frozen, directory: RunDirectory) -> int:
    importlib.import_module(config["parallel"]["_target_"].rpartition(".")[0])
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we report, in three lines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*fork.*multi-threaded", category=DeprecationWarning)
    # the other signals are ours: workers stop at a step boundary (framework.preemption)
    set_default("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")
    with new_folder(directory.path) as scratch:
        spec = WorkerSpec(
            role="worker",
            local_world_size=config["launch"]["nproc_per_node"],
            entrypoint=work_in_child,
            args=(frozen, scratch),
            rdzv_handler=_OneNode(config["run"]["id"]),
            max_restarts=config["launch"]["max_restarts"],
        )
        agent = _Agent(spec, directory=directory, scratch=scratch)
        tempfile.tempdir = str(scratch)  # where torch leaves a file for every worker's last error
        try:
            result = agent.run()
        finally:
            tempfile.tempdir = None
    if agent.verdict:
        return _report_hang(agent.verdict, directory)
    if agent.failure is not None and result.is_failed():
        return _report(agent.failure, directory)
    return max(result.return_values.values())


class _Agent(LocalElasticAgent):
    """Torch elastic's agent; it tells why it restarts the workers, and does not repeat what fails in the same way."""

    def __init__(self, spec: WorkerSpec, *, directory: RunDirectory, scratch: Path) -> None:
        # a forked child cannot use CUDA if its parent has; and what a CPU worker needs, it inherits imported
        start_method = "spawn" if torch.cuda.is_available() else "fork"
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(scratch)), start_method=start_method)
        self.failure: Failure | None = None  # of the latest attempt
        self.verdict = ""  # on a hang
        self._directory = directory
        self._scratch = scratch

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._has_hung(worker_group):
            return RunResult(state=WorkerState.FAILED)
        result = super()._monitor_workers(worker_group)
        if self._has_hung(worker_group):
            return RunResult(state=WorkerState.FAILED)
        if result.is_failed():
            before, max_restarts = self.failure, worker_group.spec.max_restarts
            number = max_restarts - self._remaining_restarts + 1
            recorded = recorded_failures(self._scratch, attempt=number - 1)
            self.failure = _cause(recorded, result.failures, num_ranks=len(worker_group.workers))
            if before is not None and (self.failure.error, self.failure.where) == (before.error, before.where):
                self._remaining_restarts = 0
            if self._remaining_restarts > 0:
                with log.launcher_file(self._directory.log):
                    LOGGER.warning("%s; restart %d of %d", self.failure, number, max_restarts)
        return result


    def _has_hung(self, worker_group: WorkerGroup) -> bool:
        """Return whether the workers have found one of them to hang. Then none is left, and none is started again."""
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        board = board_in(self._scratch, attempt=attempt)
        self.verdict = posted_verdict(board, num_local=len(worker_group.workers))
        if self.verdict:
            self._remaining_restarts = 0
            # those who have found it are about to end; who has not after a second is killed
            self._shutdown(signal.SIGCONT, timeout=1)
        return bool(self.verdict)


class _OneNode(RendezvousHandler):
    """The rendezvous of a node alone: nothing to agree on, and so no port to listen on."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        return "one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        return RendezvousInfo(
            store=dist.PrefixStore(f"round_{self._round}", dist.HashStore()),
            rank=0,
            world_size=1,
            bootstrap_store_info=RendezvousStoreInfo(master_addr="127.0.0.1", master_port=0),
        )

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True


def _cause(recorded: list[Failure], ended: dict[int, ProcessFailure], *, num_ranks: int) -> Failure:
    """Return the failure that caused the others: a worker that was killed leaves peers that merely miss it.

    `recorded` are those that the workers have written down; `ended` are the processes that the agent has seen end.
    """
    if recorded and not recorded[0].lost_peer:
        return recorded[0]
    silent = sorted(set(range(num_ranks)) - {failure.rank for failure in recorded})
    for rank in silent:
        if rank in ended and ended[rank].exitcode < 0:
            return Failure(rank, f"killed by {ended[rank].signal_name()}", f"process {ended[rank].pid}")
    if silent:  # the agent has looked at one process only, and that was a peer
        return Failure(silent[0], "killed, without a word", "no place in the code")
    return recorded[0]


def _report(failure: Failure, directory: RunDirectory) -> Exit:
    directory.record_end(status="failed", error=f"rank {failure.rank}: {failure.error}")
    with log.launcher_file(directory.log):
        LOGGER.error("%s\n  at %s\n  the whole story is in %s", failure, failure.where, directory.log)
    return Exit.FAILED


def _report_hang(verdict: str, directory: RunDirectory) -> Exit:
    directory.record_end(status="failed", error=verdict)
    with log.launcher_file(directory.log):
        LOGGER.error("%s\n  the stacks of all ranks are in %s", verdict, directory.log)
    return Exit.HANG
