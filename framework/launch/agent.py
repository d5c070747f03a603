"""Torch elastic's agent, which forks workers from this process while it is warm: one of a run here, or one on each node."""

import logging
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from framework.config.components import locate
from framework.config.schema import LaunchSection
from framework.distributed.hang.board import posted_verdict
from framework.launch.failures import Failure
from framework.runs.directory import RunDirectory
from framework.runtime.environment import set_default
from framework.runtime.torch_internals import ElasticAgent


def board_in(folder: Path, *, attempt: int) -> Path:
    return folder / f"board_{attempt}"


def prepare(*targets: str) -> None:
    """Make this process one from which workers are forked: silent about what we report ourselves, and warm.

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
    """Torch elastic's agent; it ends workers that have found one of them to hang.

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
            entrypoint=work,
            args=arguments,
            rdzv_handler=self.place,
            max_restarts=launch.max_restarts,
        )
        # a forked child cannot use CUDA if its parent has; and what a CPU worker needs, it inherits imported
        super().__init__(spec, folder=str(scratch), start_method="spawn" if torch.cuda.is_available() else "fork")
        self.verdict = ""  # on a hang
        self.failure: Failure | None = None
        self._scratch = scratch
        self._directory = directory

    @property
    def attempt(self) -> int:
        """Return how often workers have been started before those that there are now."""
        return self.workers.spec.max_restarts - self.restarts_left

    def watch_workers(self) -> RunResult:
        result = super().watch_workers() if not self._has_hung() else None
        if result is None or self._has_hung():
            # those who have found it are about to end; who has not after a second is killed
            self.end_workers(signal.SIGCONT, timeout_s=1)
            return RunResult(state=WorkerState.FAILED)
        return result

    def _has_hung(self) -> bool:
        board = board_in(self._scratch, attempt=self.attempt)
        self.verdict = posted_verdict(board, num_local=len(self.workers.workers))
        return bool(self.verdict)


class StaticRendezvous(RendezvousHandler):
    """The rendezvous of nodes that know their places: nothing to agree on, and so no port to listen on."""

    def __init__(self, run_id: str) -> None:
        self.rank, self.num_nodes = 0, 1
        self._run_id = run_id

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
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
