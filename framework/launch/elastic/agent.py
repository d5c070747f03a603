"""Elastic runs: the same command on every node; nodes come and go, and the run goes on with those that are there."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState

from framework.config.frozen_file import Frozen
from framework.launch.agent import Agent, Arranged, cause, prepare, report, report_hang
from framework.launch.claim import Begun, claim, is_finished
from framework.launch.elastic.membership import Membership
from framework.launch.elastic.shared_record import Meeting, Superseded
from framework.launch.handover import as_text, from_text
from framework.launch.scratch import new_folder, sweep
from framework.launch.worker import Failure, begin_child, record_failure, recorded_failures, work
from framework.preflight.processes import fitting_nodes
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment, set_default
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem

_POLL_S = 0.25
_LAST_CALL_S = 3.0  # after a node has come, before a round begins with fewer than there may be
_GRACE_S = 5.0  # for workers to notice by themselves that others are gone


def take_part(config: dict[str, Any], *, attempt: list[int] | None = None) -> int:
    """Be one node of the run until it ends. Returns the exit code, the same on all nodes.

    An `attempt` that compares as greater takes the run from the nodes of the others.
    """
    try:
        return _take_part(config, attempt=attempt or [])
    except Superseded as superseded:
        LOGGER.error("this node has to leave the run: %s", superseded)
        return superseded.code


def _take_part(config: dict[str, Any], *, attempt: list[int]) -> int:
    directory = RunDirectory(Path(config["run"]["dir"]))
    launch = config["launch"]
    prepare(config)
    # every node has as many workers: torch then numbers them without a store
    set_default("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    meeting = Meeting(
        directory.path.with_name(f".{directory.path.name}.elastic"),
        sizes=fitting_nodes(config),
        num_workers=launch["nproc_per_node"],
        max_restarts=launch["max_restarts"],
        attempt=attempt,
    )
    try:
        while not meeting.enter():
            if PREEMPTION.requested:
                LOGGER.info("stopped before this node took part; the same command lets it")
                return Exit.PREEMPTED
            time.sleep(_POLL_S)
    except ValueError as error:
        print(Problem("launch", str(error), "give the same command on every node"), file=sys.stderr)
        return Exit.CONFIGURATION
    except OSError as error:
        LOGGER.error("%s cannot be used: %s", meeting.folder, error)
        return Exit.DISK
    try:
        sweep(directory.path)
        with new_folder(directory.path) as scratch:
            spec = WorkerSpec(
                role="worker",
                local_world_size=launch["nproc_per_node"],
                entrypoint=_join,
                args=(config, meeting.folder, scratch),
                rdzv_handler=Arranged(config["run"]["id"]),
                max_restarts=launch["max_restarts"],
            )
            agent = _Agent(spec, meeting=meeting, directory=directory, scratch=scratch, timeout_s=launch["timeout_s"])
            return agent.attend()
    except OSError as error:
        LOGGER.error("this node has to leave the run: %s", error)
        return Exit.DISK
    finally:
        meeting.leave()


def _join(config: dict[str, Any], folder: Path, node_folder: Path) -> int:
    """One worker's part in a round. Rank 0's configuration is the round's: it alone claims the directory and freezes."""
    begin_child()
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    try:
        decision = _decide(config, folder=folder) if environment.rank == 0 else None
        store = dist.FileStore(str(folder / f"start_{environment.attempt}"), environment.world_size)
        if decision is not None:
            store.set("decision", as_text(decision))
        taken = from_text(store.get("decision").decode())
    except Exception as error:
        record_failure(error, environment=environment, scratch=folder)
        raise
    return work(taken, folder, node_scratch=node_folder) if isinstance(taken, Frozen) else taken


def _decide(config: dict[str, Any], *, folder: Path) -> Frozen | int:
    began = folder / "began"
    if began.exists() and config["run"]["resume"] == "never":  # that is about the run, not about each of its rounds
        config = config | {"run": config["run"] | {"resume": "auto"}}
    if is_finished(config):
        return Exit.FINISHED
    begun = claim(config, party="elastic")
    if not isinstance(begun, Begun):
        return begun
    began.touch()
    return begun.frozen  # its lock stays with this process until it ends


class _Agent(Agent):
    """Torch elastic's agent, with a worker group for each round; a round that loses a node is not a failure."""

    def __init__(
        self, spec: WorkerSpec, *, meeting: Meeting, directory: RunDirectory, scratch: Path, timeout_s: float
    ) -> None:
        super().__init__(spec, scratch=scratch)
        self._meeting = meeting
        self._directory = directory
        self._timeout_s = timeout_s
        self._failure: Failure | None = None  # that has ended the run, where it is this node's

    def attend(self) -> int:
        """Take part in round after round until the run has ended on all nodes. Returns how."""
        try:
            while (membership := self._next_round()).code is None:
                self._start(membership)
                self._watch(membership.round)
        finally:
            self._shutdown(signal.SIGKILL)
        if self.verdict:
            report_hang(self.verdict, self._directory)
        elif self._failure is not None:
            report(self._failure, self._directory)
        elif membership.error is not None:
            LOGGER.error("the run has failed: %s", membership.error)
            if self._directory.path.exists():
                self._directory.record_end(status="failed", error=membership.error)
        return membership.code

    def _next_round(self) -> Membership:
        """Wait for a round in which this node takes part, or until the run has ended and all nodes have left it."""
        came, since = set[int](), time.monotonic()
        possible = since  # when a round ran, or could have begun, for the last time
        while True:
            seen, now = self._meeting.look(), time.monotonic()
            if set(seen.waiting) != came:
                came, since = set(seen.waiting), now
            if seen.running or seen.may_start:
                possible = now
            if not seen.running if seen.code is not None else self._meeting.number in seen.running:
                return seen
            before = seen.text()
            if self._advance(seen, waited_s=now - since, idle_s=now - possible).text() == before:
                time.sleep(_POLL_S)
                continue
            with self._meeting.change() as membership:
                self._advance(membership, waited_s=now - since, idle_s=now - possible)
                self._meeting.clear(before=membership.round)

    def _advance(self, membership: Membership, *, waited_s: float, idle_s: float) -> Membership:
        """Take the step that is due between rounds, if any: another node may be about to take the same."""
        if self._meeting.number not in membership.nodes:
            self._meeting.wait_for_next(membership)
        membership.stops |= PREEMPTION.requested
        if membership.running or membership.code is not None:
            return membership
        if membership.stops:
            membership.end(Exit.PREEMPTED)
        elif membership.may_start and (membership.is_full or waited_s > _LAST_CALL_S):
            membership.start_round()
        elif idle_s > self._timeout_s:
            there, needed = len(membership.nodes), membership.sizes[0]
            error = f"{there} of at least {needed} nodes have come in launch.timeout_s={self._timeout_s:g}"
            membership.end(Exit.FAILED, error=error)
        return membership

    def _start(self, membership: Membership) -> None:
        spec = self._worker_group.spec
        place = spec.rdzv_handler
        assert isinstance(place, Arranged)
        place.rank, place.num_nodes = membership.members.index(self._meeting.number), len(membership.members)
        if place.rank == 0:
            nodes = f"{place.num_nodes} node{'s' * (place.num_nodes != 1)}"
            LOGGER.info("%s", f"round {membership.round}: {nodes} of launch.nproc_per_node={spec.local_world_size}")
        # torch numbers attempts by restarts, which every agent counts for itself; the rounds are counted together
        self._remaining_restarts = spec.max_restarts - membership.round
        self._initialize_workers(self._worker_group)

    def _watch(self, round: int) -> None:
        """See to this node's workers until they are gone, and put on record how they went."""
        is_told, over_since = False, None
        while (result := self._monitor_workers(self._worker_group)).state == WorkerState.HEALTHY:
            time.sleep(_POLL_S)
            seen = self._meeting.look()
            if not is_told and (PREEMPTION.requested or seen.stops or seen.may_grow):
                is_told = self._tell_workers(round)
            patience_s = self._patience_s(seen, round)
            if patience_s is None:
                continue
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since >= patience_s:
                self._shutdown(signal.SIGKILL)
                break
        with self._meeting.change() as membership:
            self._conclude(membership, round, result)
            self._meeting.wait_for_next(membership)

    def _patience_s(self, membership: Membership, round: int) -> float | None:
        """Return how long workers that still run may go on doing so; None if nothing is wrong."""
        if membership.round != round or membership.is_short:  # the others go on without them, or wait for a dead node
            return 0.0
        if membership.broken == round:  # they are about to notice by themselves
            return _GRACE_S
        return self._timeout_s if membership.code is not None else None  # rank 0 may be closing its loggers

    def _tell_workers(self, round: int) -> bool:
        """Have the workers stop after their step, with a checkpoint; first of all say why, for all nodes' will."""
        with self._meeting.change() as membership:
            membership.stops |= PREEMPTION.requested
            if membership.may_grow:
                membership.regroups = round
            is_due = membership.stops or membership.regroups == round
        if is_due and self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return is_due

    def _conclude(self, membership: Membership, round: int, result: RunResult) -> None:
        membership.stops |= PREEMPTION.requested
        if result.state == WorkerState.SUCCEEDED:
            code = max(result.return_values.values())
            # nobody has asked for it: then a person has sent a signal to a worker
            if code != Exit.PREEMPTED or membership.stops or membership.regroups != round:
                membership.end(code)
            return
        if self.verdict:
            membership.end(Exit.HANG, error=self.verdict)
            return
        membership.broken = max(membership.broken, round)
        if result.state == WorkerState.HEALTHY:  # until we ended them
            return
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        recorded = [
            failure for failure in recorded_failures(self._meeting.folder, attempt=round) if failure.rank in ranks
        ]
        failure = cause(recorded, result.failures, ranks=ranks)
        if failure.lost_peer or membership.code is not None:
            return
        number = membership.note(failure, round)
        if membership.code is not None:
            self._failure = failure
        else:
            with log.launcher_file(self._directory.log):
                LOGGER.warning("%s; restart %d of %d", failure, number, membership.max_restarts)
