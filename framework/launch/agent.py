"""Torch elastic's agent, which forks workers from this warm process: one agent for a run here, or one on each node."""

import logging
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from framework.config.components import locate
from framework.config.schema import LaunchSection
from framework.distributed.hang.board import posted_verdict
from framework.launch.failures import Failure
from framework.runs.directory import RunDirectory
from framework.runtime.environment import set_default
from framework.runtime.parent_death import die_with_parent
from framework.runtime.preemption import PREEMPTION
from framework.runtime.torch_internals import ElasticAgent


def board_in(folder: Path, *, attempt: int) -> Path:
    return folder / f"board_{attempt}"


def prepare(*targets: str) -> None:
    """Prepare this process for forking workers from it: import what they need, and silence what we report ourselves.

    `targets` are dotted paths of what the workers will import.
    """
    for target in targets:
        locate(target)
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we report, in three lines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*fork.*multi-threaded", category=DeprecationWarning)
    # the other signals are ours: workers stop at a step boundary (framework.runtime.preemption)
    set_default("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")


class Agent(ElasticAgent):
    """Torch elastic's agent; it ends the workers when they have found that one of them hangs.

    Each worker calls `work` with `arguments`. `scratch` is this node's folder, `directory` the run's.
    """

    def __init__(
        self,
        launch: LaunchSection,
        run_id: str,
        work: Callable[..., int],
        *arguments: Any,
        scratch: Path,
        directory: RunDirectory,
    ) -> None:
        self.place = StaticRendezvous(run_id)
        spec = WorkerSpec(
            role="worker",
            local_world_size=launch.num_processes,
            entrypoint=_work_in_child,
            args=(work, *arguments),
            rdzv_handler=self.place,
            max_restarts=launch.max_restarts,
        )
        # a forked child cannot use CUDA if its parent has used it; a CPU worker inherits the imported modules
        super().__init__(spec, folder=str(scratch), start_method="spawn" if torch.cuda.is_available() else "fork")
        self.verdict = ""  # on a hang
        self.failures: list[Failure] = []
        self._scratch, self._directory = scratch, directory

    @property
    def attempt(self) -> int:
        """Return how often workers have been started before the present ones."""
        return self.workers.spec.max_restarts - self.restarts_left

    def watch_workers(self) -> RunResult:
        result = super().watch_workers() if not self._has_hung() else None
        if result is None or self._has_hung():
            # workers that have found it are about to end; a worker that has not ended after a second is killed
            self.end_workers(signal.SIGCONT, timeout_s=1)
            return RunResult(state=WorkerState.FAILED)
        return result

    def _has_hung(self) -> bool:
        board = board_in(self._scratch, attempt=self.attempt)
        self.verdict = posted_verdict(board, num_local=len(self.workers.workers))
        return bool(self.verdict)


def _work_in_child(work: Callable[..., int], *arguments: Any) -> int:
    """Be a worker: end with the process that has started this one, and leave messages to the user to that process."""
    die_with_parent()
    tempfile.tempdir = None  # not the launcher's
    PREEMPTION.watch()  # a spawned process has not inherited it
    PREEMPTION.speaks = False
    return work(*arguments)


class StaticRendezvous(StaticTCPRendezvous):
    """The rendezvous of nodes that know their places: nothing to agree on, and so no port to listen on."""

    use_agent_store = False  # the workers have a store of their own

    def __init__(self, run_id: str) -> None:
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(master_addr=self.master_addr, master_port=self.master_port)
        return RendezvousInfo(dist.HashStore(), self.rank, self.world_size, address)  # a store for this call alone
