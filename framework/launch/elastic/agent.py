"""Elastic runs: every node runs the same command, nodes join and leave, and the run continues with the present nodes."""

import copy
import os
import signal
import sys
import time
from collections.abc import Iterable
from functools import partial

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from framework.config.modes import MODES, folder_of
from framework.config.schema import RunConfig
from framework.distributed.groups import serve_store
from framework.distributed.hang.diagnose import is_of_others
from framework.launch.elastic.entry import RoundEntry
from framework.launch.elastic.links import LOST_AFTER_S, Links, interface_of
from framework.launch.elastic.meeting import Meeting, Superseded
from framework.launch.elastic.membership import Member, Membership
from framework.launch.elastic.network import Network
from framework.launch.failures import Failure, cause, recorded_failures, report
from framework.launch.scratch import new_folder, remove_scratch
from framework.launch.worker import Agent, prepare
from framework.preflight.processes import fitting_nodes
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import node_name, variables
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem

_POLL_S = 0.25
_LAST_CALL_S = 3.0  # from the last node's arrival until a round starts with fewer nodes than allowed
_GRACE_S = 5.0  # time for workers to notice that other workers have ended


def take_part(config: RunConfig, *, attempt: list[int] | None = None) -> int:
    """Be one node of the run until the run ends. Return the exit code, which is the same on all nodes.

    A node with a greater `attempt` takes the run from the nodes of smaller attempts.
    """
    log.start_console(rank=0, who=node_name())
    prepare(config.parallel["_target_"], MODES[config.mode].worker)
    directory, launch = RunDirectory(folder_of(config.run, config.mode)), config.launch
    # every node has the same number of workers, so torch numbers them without a store
    variables().setdefault("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    network = Network.find()
    ports = launch.port_range or (0,)
    links = Links(network.addresses, ports=ports)
    meeting = Meeting(
        directory.path.with_name(f".{directory.path.name.lstrip('.')}.elastic"),
        node=Member(node_name(), os.getpid(), attempt or [], machine=network.machine),
        links=links,
        sizes=fitting_nodes(launch, config.parallel),
        num_workers=launch.num_processes,
        max_restarts=launch.max_restarts,
    )
    try:
        if (code := _enter(meeting)) is not None:
            return code
        try:
            remove_scratch(directory.path)
            with new_folder(directory.path) as scratch:
                entry = RoundEntry(config, meeting.folder)
                agent = _Agent(launch, config.run.id, entry.join, scratch, scratch=scratch, directory=directory)
                return agent.attend(meeting, links, network, ports=ports, timeout_s=launch.timeout_s)
        finally:
            meeting.leave()
    except (Superseded, OSError) as error:
        LOGGER.error("this node has to leave the run: %s", error)
        return error.code if isinstance(error, Superseded) else Exit.DISK
    finally:
        links.close()


def _enter(meeting: Meeting) -> Exit | None:
    """Join the meeting. Return an exit code if this is not possible."""
    try:
        while not meeting.enter():
            if PREEMPTION.requested:
                LOGGER.info("stopped before this node joined the run; the same command joins it")
                return Exit.PREEMPTED
            time.sleep(_POLL_S)
    except ValueError as error:
        print(Problem("launch", str(error), "give the same command on every node"), file=sys.stderr)
        return Exit.CONFIGURATION
    except OSError as error:
        LOGGER.error("%s cannot be used: %s", meeting.folder, error)
        return Exit.DISK
    return None


_UNDONE = RunResult(state=WorkerState.HEALTHY)  # workers that were ended, or that never started


class _Agent(Agent):
    """Torch elastic's agent, with one worker group per round. A round that loses a node is not a failure.

    `failures` contains the failure that has ended the run, if it happened on this node.
    """

    def attend(self, meeting: Meeting, links: Links, network: Network, *, ports: Iterable[int], timeout_s: float) -> int:
        """Take part in rounds until the run has ended on all nodes. Return the exit code."""
        self._meeting, self._links, self._network, self._timeout_s = meeting, links, network, timeout_s
        self._ports = ports
        self.place.use_agent_store = True  # in each round, the store of its first node
        try:
            while (membership := self._next_round()).code is None:
                if self._start(membership):
                    self._watch(membership.round)
        finally:
            self.end_workers(signal.SIGKILL)
        if membership.code == Exit.HANG or self.failures:
            report(str(membership.error) if membership.code == Exit.HANG else self.failures[-1], self._directory)
        elif membership.code == Exit.PREEMPTED and self._directory.read_summary().get("status") in ("running", "failed"):
            self._directory.record_end(status="preempted", error=None)  # its workers did not run long enough to record it
        elif membership.code == Exit.CONFIGURATION and membership.error is not None:
            print(membership.error, file=sys.stderr)
        elif membership.error is not None:
            LOGGER.error("the run has failed: %s", membership.error)
            if self._directory.path.exists():
                self._directory.record_end(status="failed", error=membership.error)
        return membership.code

    def _next_round(self) -> Membership:
        """Wait until a round includes this node, or until the run has ended and all nodes have left it."""
        came, since = list[int](), time.monotonic()
        possible = since  # the last time at which a round ran, or could have started
        while True:
            seen, now = self._meeting.look(), time.monotonic()
            if seen.ready != came:
                came, since = seen.ready, now
            if seen.running or seen.may_start:
                possible = now
            if not seen.running if seen.code is not None else self._meeting.number in seen.running:
                return seen
            step = partial(self._advance, waited_s=now - since, idle_s=now - possible)
            if step(copy.deepcopy(seen)) == seen:
                time.sleep(_POLL_S)
            else:
                self._meeting.clear(self._meeting.change(step))

    def _advance(self, membership: Membership, *, waited_s: float, idle_s: float) -> Membership:
        """Return the record after the next step between rounds, if a step is due. Another node may take the same step."""
        if self._meeting.number not in membership.nodes:
            self._meeting.wait_for_next(membership)
        membership.stops |= PREEMPTION.requested
        if membership.running or membership.code is not None:
            return membership
        if (fault := self._network.fault(membership.nodes.values())) is not None:
            membership.end(Exit.CONFIGURATION, error=fault)
        elif hang := self._hang(membership):
            membership.end(Exit.HANG, error=hang)
        elif membership.stops:
            membership.end(Exit.PREEMPTED)
        elif membership.may_start and (membership.is_full or waited_s > _LAST_CALL_S):
            membership.start_round()
        elif idle_s > self._timeout_s:
            there = f"{len(membership.nodes)} of at least {membership.sizes[0]} nodes have joined"
            lacks = [*self._apart(membership, membership.doubtful), *membership.lost_nodes]
            membership.end(Exit.FAILED, error="; ".join([f"{there} within launch.timeout_s={self._timeout_s:g}", *lacks]))
        return membership

    def _hang(self, membership: Membership) -> str:
        """Return the verdict of the latest round's nodes on a hang. Return an empty text if only the network is the cause."""
        told = [membership.verdicts[number] for number in membership.members if number in membership.verdicts]
        guilty = [verdict for verdict in told if not is_of_others(verdict)]
        if guilty:
            return "; ".join([*guilty, *(verdict for verdict in told if verdict not in guilty)])
        is_parted = any(set(pair) <= set(membership.members) for pair in membership.doubtful)
        if not told or len(told) < len(membership.members) or is_parted or membership.is_short:
            return ""
        return "; ".join(["the nodes' ranks wait for each other, in different collectives", *told])

    def _start(self, membership: Membership) -> bool:
        """Start this node's workers of a round. Return False if the round has already ended."""
        spec, place = self.workers.spec, self.place
        place.rank, place.world_size = membership.members.index(self._meeting.number), len(membership.members)
        if place.rank == 0:
            nodes = f"{place.world_size} node{'s' * (place.world_size != 1)}"
            LOGGER.info("%s", f"round {membership.round}: {nodes} of launch.nproc_per_node={spec.local_world_size}")
        # torch numbers attempts by restarts, which each agent counts alone; rounds are counted for all nodes
        self.restarts_left = spec.max_restarts - membership.round
        address = self._links.address(set(membership.members) - {self._meeting.number})
        self._network.use(interface_of(address) if address is not None else None)
        if place.rank == 0:
            host = address or "127.0.0.1"
            self._served, port = serve_store(host, ports=self._ports)  # it lives as long as the round
            self._meeting.announce(membership.round, (host, port))
        while (served := self._meeting.announced(membership.round)) is None:
            time.sleep(_POLL_S)
            seen = self._meeting.look()
            if self._patience_s(seen, membership.round) is not None:
                self._meeting.change(partial(self._conclude, round=membership.round, result=_UNDONE, failure=None))
                return False
        place.master_addr, place.master_port = served
        self.start_workers()
        return True

    def _watch(self, round: int) -> None:
        """Watch this node's workers until they have ended, and record how they ended."""
        is_stopping, over_since = False, None
        while (result := self.watch_workers()).state == WorkerState.HEALTHY:
            time.sleep(_POLL_S)
            seen = self._meeting.look()
            if seen.verdicts and not self.verdict and seen.round == round:
                self.look()  # the ranks of another node have waited until the time-out
            if not is_stopping and (PREEMPTION.requested or seen.stops or seen.may_grow):
                is_stopping = self._ask_to_stop(round)
            patience_s = self._patience_s(seen, round)
            if patience_s is None:
                continue
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since >= patience_s:
                self.end_workers(signal.SIGKILL)
                break
        seen = self._meeting.look()
        if seen.round == round and seen.code is None:
            for line in self._apart(seen, seen.lost_links):
                LOGGER.warning("%s", line)
        failure = self._failure(round, result)
        number = self._meeting.change(partial(self._conclude, round=round, result=result, failure=failure))
        if failure is not None and number:
            with log.log_file(self._directory.log):
                LOGGER.warning("%s; restart %d of %d", failure, number, seen.max_restarts)

    def _apart(self, membership: Membership, pairs: list[tuple[int, int]]) -> list[str]:
        """Return a message for each pair of nodes that cannot reach each other."""
        lines = []
        for one, other in pairs:
            if self._meeting.number == other:
                one, other = other, one
            hosts = (membership.nodes[number].host if number in membership.nodes else "?" for number in (other, one))
            where = ", ".join(address for address, _ in self._meeting.addresses(other))
            lines.append("{} cannot be reached from {} ({})".format(*hosts, f"{where}: no answer in {LOST_AFTER_S:g} s"))
        return lines

    def _patience_s(self, membership: Membership, round: int) -> float | None:
        """Return for how many seconds the running workers may continue. Return None if there is no problem."""
        if membership.round != round or membership.is_short:  # the others continue without them, or wait for a dead node
            return 0.0
        if membership.lost_links:  # TCP would wait for a quarter of an hour
            return 0.0
        if membership.broken == round:  # the workers will soon notice by themselves
            return _GRACE_S
        return self._timeout_s if membership.code is not None else None  # rank 0 may still close its loggers

    def _ask_to_stop(self, round: int) -> bool:
        """Make the workers stop after their step, with a checkpoint. First record the reason for all nodes."""

        def ask(membership: Membership) -> bool:
            membership.stops |= PREEMPTION.requested
            if membership.may_grow:
                membership.regroups = round
            return membership.stops or membership.regroups == round

        if is_due := self._meeting.change(ask):
            self.signal_workers(signal.SIGTERM)
        return is_due

    def _failure(self, round: int, result: RunResult) -> Failure | None:
        """Return this node's own failure that has ended its part of a round, or None."""
        if result.state in (WorkerState.SUCCEEDED, WorkerState.HEALTHY) or self.verdict:  # healthy: until this agent ended them
            return None
        ranks = [worker.global_rank for worker in self.workers.workers]
        recorded = [failure for failure in recorded_failures(self._meeting.folder, attempt=round) if failure.rank in ranks]
        failure = cause(recorded, result.failures, ranks=ranks)
        return None if failure.lost_peer else failure

    def _conclude(self, membership: Membership, *, round: int, result: RunResult, failure: Failure | None) -> int:
        """Record how this node's part of a round ended, and wait for the next. Return the failure's number, or 0."""
        self._meeting.wait_for_next(membership)
        membership.stops |= PREEMPTION.requested
        if result.state == WorkerState.SUCCEEDED:
            code = max(result.return_values.values())
            # otherwise no node has requested it: a person has sent a signal to a worker
            if code != Exit.PREEMPTED or membership.stops or membership.regroups != round:
                membership.end(code)
            return 0
        membership.broken = max(membership.broken, round)
        if self.verdict and membership.round == round and not self.slept_s:
            membership.verdicts[self._meeting.number] = self.verdict
        if membership.lost_links and membership.round == round:
            membership.parted = round
        if failure is None or membership.code is not None or membership.round != round:
            return 0
        number = membership.note(failure, round)
        if membership.code is not None:
            self.failures.append(failure)
            return 0
        return number
