"""Workers on this machine: torch elastic's agent, in this process, with workers forked from it while it is warm."""

from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec

from framework.config.frozen_file import Frozen
from framework.launch.agent import Agent, Arranged, cause, prepare, report, report_hang
from framework.launch.scratch import new_folder
from framework.launch.worker import Failure, recorded_failures, work, work_in_child
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION


def launch(config: dict[str, Any], *, frozen: Frozen) -> int:
    """Run the workers to their end. Returns the exit code. No process is left behind."""
    directory = RunDirectory(frozen.path.parent)
    if config["launch"]["nproc_per_node"] > 1:
        return _launch_group(config, frozen=frozen, directory=directory)
    try:
        with PREEMPTION.heard_at_once():
            return work(frozen, None)  # one process needs no group of them: this one will do
    except Exception as error:
        return report(Failure.of(error, rank=0), directory)


def _launch_group(config: dict[str, Any], *, frozen: Frozen, directory: RunDirectory) -> int:
    prepare(config)
    with new_folder(directory.path) as scratch:
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
    if agent.verdict:
        return report_hang(agent.verdict, directory)
    if agent.failure is not None and result.is_failed():
        return report(agent.failure, directory)
    return max(result.return_values.values())


class _Agent(Agent):
    """Tells why it restarts the workers, and does not repeat what hangs, or fails in the same way."""

    def __init__(self, spec: WorkerSpec, *, directory: RunDirectory, scratch: Path) -> None:
        super().__init__(spec, scratch=scratch)
        self.failure: Failure | None = None  # of the latest attempt
        self._seen: set[tuple[str, str]] = set()  # errors and their places, of all attempts
        self._directory = directory

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if self.verdict:
            self._remaining_restarts = 0
        elif result.is_failed():
            number = self.attempt + 1
            recorded = recorded_failures(self._scratch, attempt=self.attempt)
            self.failure = cause(recorded, result.failures, ranks=range(len(worker_group.workers)))
            if (self.failure.error, self.failure.where) in self._seen:
                self._remaining_restarts = 0
            self._seen.add((self.failure.error, self.failure.where))
            if self._remaining_restarts > 0:
                with log.launcher_file(self._directory.log):
                    LOGGER.warning("%s; restart %d of %d", self.failure, number, worker_group.spec.max_restarts)
        return result
