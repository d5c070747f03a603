"""What our agents share, on one node and on several: workers forked from a warm process, and the telling of how they end."""

import importlib
import logging
import signal
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from framework.distributed.hang.board import posted_verdict
from framework.launch.worker import Failure, board_in
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import set_default
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER


def prepare(config: dict[str, Any]) -> None:
    """Make this process one from which workers are forked: warm, and silent about what we report ourselves."""
    importlib.import_module(config["parallel"]["_target_"].rpartition(".")[0])
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we report, in three lines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*fork.*multi-threaded", category=DeprecationWarning)
    # the other signals are ours: workers stop at a step boundary (framework.runtime.preemption)
    set_default("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")


class Agent(LocalElasticAgent):
    """Torch elastic's agent; it ends workers that have found one of them to hang. `scratch` is this node's folder."""

    def __init__(self, spec: WorkerSpec, *, scratch: Path) -> None:
        # a forked child cannot use CUDA if its parent has; and what a CPU worker needs, it inherits imported
        start_method = "spawn" if torch.cuda.is_available() else "fork"
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(scratch)), start_method=start_method)
        self.verdict = ""  # on a hang
        self._scratch = scratch

    @property
    def attempt(self) -> int:
        """Return how often workers have been started before those that there are now."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group) if not self._has_hung() else None
        if result is None or self._has_hung():
            # those who have found it are about to end; who has not after a second is killed
            self._shutdown(signal.SIGCONT, timeout=1)
            return RunResult(state=WorkerState.FAILED)
        return result

    def _has_hung(self) -> bool:
        board = board_in(self._scratch, attempt=self.attempt)
        self.verdict = posted_verdict(board, num_local=len(self._worker_group.workers))
        return bool(self.verdict)


class Arranged(RendezvousHandler):
    """The rendezvous of nodes that know their places: nothing to agree on, and so no port to listen on."""

    def __init__(self, run_id: str) -> None:
        self.rank = 0
        self.num_nodes = 1
        self._run_id = run_id
        self._is_closed = False

    def get_backend(self) -> str:
        return "arranged"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(
            store=dist.HashStore(),  # of this call alone
            rank=self.rank,
            world_size=self.num_nodes,
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


def cause(recorded: list[Failure], ended: dict[int, ProcessFailure], *, ranks: Iterable[int]) -> Failure:
    """Return the failure that caused the others: a worker that was killed leaves peers that merely miss it.

    `recorded` are those that the workers have written down; `ended` are the processes that the agent has seen end. A lost
    peer is the answer where all of these `ranks` have lost one.
    """
    if recorded and not recorded[0].lost_peer:
        return recorded[0]
    silent = sorted(set(ranks) - {failure.rank for failure in recorded})
    for rank in silent:
        if rank in ended and ended[rank].exitcode < 0:
            name = ended[rank].signal_name()
            # from outside, it may not come again; a library that aborts will do it in the same way
            where = f"process {ended[rank].pid}" if name == "SIGKILL" else "no place in Python: a library's own code"
            return Failure(rank, f"killed by {name}", where)
    if silent:  # the agent has looked at one process only, and that was a peer
        return Failure(silent[0], "killed, without a word", "no place in the code")
    return recorded[0]


def report(failure: Failure, directory: RunDirectory) -> Exit:
    directory.record_end(status="failed", error=f"rank {failure.rank}: {failure.error}")
    with log.launcher_file(directory.log):
        LOGGER.error("%s\n  at %s\n  the whole story is in %s", failure, failure.where, directory.log)
    return Exit.FAILED


def report_hang(verdict: str, directory: RunDirectory) -> Exit:
    directory.record_end(status="failed", error=verdict)
    with log.launcher_file(directory.log):
        LOGGER.error("%s\n  the stacks of all ranks are in %s", verdict, directory.log)
    return Exit.HANG
