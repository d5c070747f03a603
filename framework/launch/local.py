"""Workers on this machine: torch elastic's agent, in this process, with workers forked from it while it is warm."""

import importlib
import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from framework.frozen import Frozen
from framework.launch.worker import work, work_in_child
from framework.log import LOGGER
from framework.outcome import Exit
from framework.run_directory import RunDirectory


def launch(config: dict[str, Any], *, frozen: Frozen) -> int:
    """Run the workers to their end. Returns the exit code. No process is left behind."""
    scratch = Path(tempfile.mkdtemp(prefix="steadfast_"))
    directory = RunDirectory(Path(config["run"]["dir"]))
    try:
        if config["launch"]["nproc_per_node"] == 1:
            return work(frozen, scratch)  # one process needs no group of them: this one will do
        return _launch_group(config, frozen=frozen, scratch=scratch)
    except ChildFailedError as error:
        _report(_first_failure(error, scratch, num_ranks=config["launch"]["nproc_per_node"]), directory)
        return Exit.FAILED
    except Exception as error:
        failure = _failures(scratch)[0] if _failures(scratch) else {"rank": 0, "error": str(error), "where": "launch"}
        _report(failure, directory)
        return Exit.FAILED
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _launch_group(config: dict[str, Any], *, frozen: Frozen, scratch: Path) -> int:
    settings = config["launch"]
    # a forked child cannot use CUDA if its parent has; and what a CPU worker needs, it inherits imported
    start_method = "spawn" if torch.cuda.is_available() else "fork"
    importlib.import_module(config["parallel"]["_target_"].rpartition(".")[0])
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we report, in three lines
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message=".*fork.*multi-threaded", category=DeprecationWarning)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings["nproc_per_node"],
        run_id=config["run"]["id"],
        rdzv_backend=_OneNode.NAME,
        max_restarts=settings["max_restarts"],
        monitor_interval=0.1,
        start_method=start_method,
        signals_to_handle="SIGQUIT",  # the others are ours: workers stop at a step boundary (framework.preemption)
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )
    rendezvous_handler_registry._registry.pop(_OneNode.NAME, None)
    rendezvous_handler_registry.register(_OneNode.NAME, _OneNode)
    codes = elastic_launch(agent, work_in_child)(frozen, scratch)
    return max(codes.values())


class _OneNode(RendezvousHandler):
    """The rendezvous of a node alone: nothing to agree on, and so no port to listen on."""

    NAME = "steadfast-one-node"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        return self.NAME

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


def _failures(scratch: Path) -> list[dict[str, Any]]:
    """Return what the workers recorded of their ends, the first first; those who only lost a peer last."""
    found = [json.loads(path.read_text()) for path in scratch.glob("failure_*.json")]
    return sorted(found, key=lambda failure: (failure["lost_peer"], failure["time"]))


def _first_failure(error: ChildFailedError, scratch: Path, *, num_ranks: int) -> dict[str, Any]:
    """Return the failure that caused the others: a worker that was killed leaves peers that merely miss it."""
    recorded = _failures(scratch)
    if recorded and not recorded[0]["lost_peer"]:
        return recorded[0]
    silent = sorted(set(range(num_ranks)) - {failure["rank"] for failure in recorded})
    killed = {rank: failure for rank, failure in error.failures.items() if failure.exitcode < 0}
    for rank in silent:
        if rank in killed:
            return {"rank": rank, "error": f"killed by {killed[rank].signal_name()}", "where": f"process {killed[rank].pid}"}
    if silent:  # the agent has looked at one process only, and that was a peer
        return {"rank": silent[0], "error": "killed, without a word", "where": "no place in the code"}
    return recorded[0]


def _report(failure: dict[str, Any], directory: RunDirectory) -> None:
    directory.update_summary(status="failed", error=f"rank {failure['rank']}: {failure['error']}")
    LOGGER.error("%s", f"rank {failure['rank']} failed: {failure['error']}\n"
                       f"  at {failure['where']}\n  the whole story is in {directory.log}")  # fmt: skip
