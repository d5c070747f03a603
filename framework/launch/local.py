"""Workers on this machine: torch elastic's agent, in this process, with workers forked from it while it is warm."""

import fcntl
import hashlib
import importlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from framework import log
from framework.environment import set_default
from framework.frozen import Frozen
from framework.launch.worker import Failure, recorded_failures, work, work_in_child
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
        return report(Failure.of(error, rank=0), directory)


def _launch_group(config: dict[str, Any], *, frozen: Frozen, directory: RunDirectory) -> int:
    prepare(config)
    with scratch_folder(directory) as scratch:
        spec = WorkerSpec(
            role="worker",
            local_world_size=config["launch"]["nproc_per_node"],
            entrypoint=work_in_child,
            args=(frozen, scratch),
            rdzv_handler=Arranged(config["run"]["id"]),
            max_restarts=config["launch"]["max_restarts"],
        )
        agent = _Agent(spec, directory=directory, scratch=scratch)
        result = agent.run()
    if agent.failure is not None and result.is_failed():
        return report(agent.failure, directory)
    return max(result.return_values.values())


def prepare(config: dict[str, Any]) -> None:
    """Make this process one from which workers are forked: warm, and silent about what we report ourselves."""
    importlib.import_module(config["parallel"]["_target_"].rpartition(".")[0])
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we report, in three lines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*fork.*multi-threaded", category=DeprecationWarning)
    # the other signals are ours: workers stop at a step boundary (framework.preemption)
    set_default("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")


def start_method() -> str:
    """Return how workers are started.

    A forked child cannot use CUDA if its parent has; and what a CPU worker needs, it inherits imported.
    """
    return "spawn" if torch.cuda.is_available() else "fork"


@contextmanager
def scratch_folder(directory: RunDirectory) -> Iterator[Path]:
    """Yield a temporary folder, where torch too leaves a file for every worker's last error.

    Those of this run whose process was killed are removed; another node of the run may be alive on this machine.
    """
    prefix = f"steadfast_{hashlib.sha256(str(directory.path.absolute()).encode()).hexdigest()[:16]}_"
    for leftover in Path(tempfile.gettempdir()).glob(prefix + "*"):
        with suppress(OSError), _locked(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="steadfast_new_"))
    with _locked(new):
        folder = new.rename(new.with_name(prefix + new.name.rpartition("_")[2]))  # not before it is locked
        tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, as long as this process lives. BlockingIOError where another does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


class _Agent(LocalElasticAgent):
    """Torch elastic's agent; it tells why it restarts the workers, and does not repeat what fails in the same way."""

    def __init__(self, spec: WorkerSpec, *, directory: RunDirectory, scratch: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(scratch)), start_method=start_method())
        self.failure: Failure | None = None  # of the latest attempt
        self._directory = directory
        self._scratch = scratch

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            before, max_restarts = self.failure, worker_group.spec.max_restarts
            number = max_restarts - self._remaining_restarts + 1
            recorded = recorded_failures(self._scratch, attempt=number - 1)
            self.failure = cause(recorded, result.failures, ranks=range(len(worker_group.workers)))
            if before is not None and (self.failure.error, self.failure.where) == (before.error, before.where):
                self._remaining_restarts = 0
            if self._remaining_restarts > 0:
                with log.launcher_file(self._directory.log):
                    LOGGER.warning("%s; restart %d of %d", self.failure, number, max_restarts)
        return result


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
            return Failure(rank, f"killed by {ended[rank].signal_name()}", f"process {ended[rank].pid}")
    if silent:  # the agent has looked at one process only, and that was a peer
        return Failure(silent[0], "killed, without a word", "no place in the code")
    return recorded[0]


def report(failure: Failure, directory: RunDirectory) -> Exit:
    directory.record_end(status="failed", error=f"rank {failure.rank}: {failure.error}")
    with log.launcher_file(directory.log):
        LOGGER.error("%s\n  at %s\n  the whole story is in %s", failure, failure.where, directory.log)
    return Exit.FAILED
