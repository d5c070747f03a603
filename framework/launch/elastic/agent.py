"""Elastic runs: every node runs the same command, nodes join and leave, and the run continues with the present nodes."""

import dataclasses
import signal
import sys
import time
from datetime import timedelta

from torch.distributed.elastic.multiprocessing import RunProcsResult
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from framework.config.modes import MODES, folder_of
from framework.config.schema import RunConfig
from framework.distributed.hang.diagnose import is_of_others
from framework.launch.elastic.meeting import SILENT_S, Meeting, StoreLost, meeting_folder
from framework.launch.failures import Failure, report, starts_again
from framework.launch.network import Network
from framework.launch.scratch import new_folder, remove_scratch
from framework.launch.torchrun import join_round
from framework.launch.worker import WorkerGroup, prepare
from framework.preflight.processes import fitting_nodes
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import node_name, variables
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.forks import comes_true
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.torch_internals import DynamicRendezvous, RoundView

_POLL_S = 0.25
_LAST_CALL_S = 3.0  # from the arrival of enough nodes until a round starts with fewer nodes than allowed
_GRACE_S = 5.0  # time for workers to notice that other workers have ended
_TO_EXPLAIN_S = SILENT_S + 4.0  # from lost connections until the node that has caused it is known


def take_part(config: RunConfig, *, attempt: list[int] | None = None, is_first: bool | None = None) -> int:
    """Be one node of the run until the run ends. Return the exit code, which is the same on all nodes.

    In a Slurm job, `attempt` are the job's number and its requeues, and only the node that `is_first` serves the store. Raise
    StoreLost if the node that serves the store is lost.
    """
    log.start_console(rank=0, who=node_name())
    prepare(config.parallel["_target_"], MODES[config.mode].worker)
    directory, launch = RunDirectory(folder_of(config.run, config.mode)), config.launch
    variables()["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"  # the workers share the nodes' store; each round has its own keys
    sizes = fitting_nodes(launch, config.parallel)
    meeting = Meeting(meeting_folder(directory.path), network=Network.find(), attempt=attempt, is_first=is_first)
    try:
        try:
            meeting.enter(timeout_s=launch.timeout_s, command={"sizes": sizes, "processes": launch.num_processes})
        except ValueError as error:
            print(Problem("launch", str(error), "the same command, and the same time, on every node"), file=sys.stderr)
            return Exit.CONFIGURATION
        remove_scratch(directory.path)
        with new_folder(directory.path) as scratch:
            agent = _Agent(launch, config.run.id, join_round, config, meeting.folder, scratch=scratch, directory=directory)
            return agent.attend(meeting, sizes=sizes)
    except StoreLost:
        if directory.read_summary().get("status") == "running":
            directory.record_end(status="preempted", error=None)
        raise
    except (RunEnded, TimeoutError) as error:
        LOGGER.error("%s", error)
        return error.code if isinstance(error, RunEnded) else Exit.FAILED
    except OSError as error:
        LOGGER.error("%s cannot be used: %s", meeting.folder, error)
        return Exit.DISK
    finally:
        meeting.close()


class _Stopped(Exception):
    """There is no next round: the run has ended, or a person has stopped it."""


class _Agent(WorkerGroup):
    """One node's workers, in rounds. A round that loses a node is not a failure.

    `failures` contains the failure that has ended the run, if it happened on this node.
    """

    def attend(self, meeting: Meeting, *, sizes: list[int]) -> int:
        """Take part in rounds until the run has ended on all nodes. Return the exit code."""
        self._meeting, self._sizes, self.failures = meeting, sizes, list[Failure]()
        self._members: list[str] = []  # the nodes of the latest round, in the order of their ranks
        self._name = f"{meeting.number:06d} {node_name()}"
        self._backend = meeting.backend(self._require_next)
        self._nodes = DynamicRendezvous.from_backend(
            self.run_id, meeting.store, self._backend, sizes[0], sizes[-1], self._name,
            RendezvousTimeout(join=timedelta(seconds=self.launch.timeout_s), last_call=timedelta(seconds=_LAST_CALL_S)),
            keep_alive_interval=1, keep_alive_max_attempt=int(SILENT_S),
        )  # fmt: skip
        self._nodes.use_store(meeting.store, meeting.host, meeting.port)
        try:
            while (end := meeting.recorded("end")) is None:
                round = self._next_round()
                if round and self._name in self._members:
                    self._start(round)
                    self._watch(round)
                elif round:
                    self._wait_out()
            self._report(end["code"], end["error"])
            meeting.leave(lambda: [int(name[:6]) for name in self._nodes.look().alive])
            return int(end["code"])
        except RendezvousConnectionError as error:
            raise meeting.lost() from error
        finally:
            self.end(signal.SIGKILL)
            self._nodes.end_heartbeats()

    def _report(self, code: int, error: str | None) -> None:
        if code == Exit.HANG or self.failures:
            report(str(error) if code == Exit.HANG else self.failures[-1], self._directory)
        elif code == Exit.PREEMPTED and self._directory.read_summary().get("status") in ("running", "failed"):
            self._directory.record_end(status="preempted", error=None)  # its workers did not run long enough to record it
        elif error is not None:
            LOGGER.error("the run has failed: %s", error)
            if self._directory.path.exists():
                self._directory.record_end(status="failed", error=error)

    # --- between rounds

    def _stops(self) -> bool:
        """Return whether a person has stopped the run, on any node."""
        return bool(self._meeting.first("stop", True) if PREEMPTION.requested else self._meeting.recorded("stop"))

    def _require_next(self) -> None:
        """Raise _Stopped if there is no next round."""
        if self._meeting.recorded("end") is not None or self._stops():
            raise _Stopped

    def _next_round(self) -> int:
        """Wait for a round of enough nodes. Return its number, or 0 if there is none yet."""
        self._backend.joins = True
        try:
            self._nodes.next_rendezvous()
        except _Stopped:
            if not self._nodes.look().is_running:
                self._meeting.end(Exit.PREEMPTED)
            time.sleep(_POLL_S)
            return 0
        except RendezvousTimeoutError:
            view = self._nodes.look()
            if not view.is_running:
                there = f"{len(view.members) + 1} of at least {self._sizes[0]} nodes have joined"
                error = f"{there} within launch.timeout_s={self.launch.timeout_s:g}"
                self._meeting.end(Exit.FAILED, error="; ".join([error, *self._lost(view)]))
            return 0
        finally:
            self._backend.joins = False
        view = self._nodes.look(is_new=False)
        self._members, self._number = view.members[: self._size_for(len(view.members))], view.number
        return view.number + 1

    def _size_for(self, count: int) -> int:
        return max((size for size in self._sizes if size <= count), default=0)

    def _lost(self, view: RoundView) -> list[str]:
        """Return the nodes of the latest round that do not live any more, in words."""
        size, lost = self.launch.num_processes, []
        for place, name in enumerate(self._members):
            if name not in view.alive and name != self._name:
                ranks = f"rank {place}" if size == 1 else f"ranks {place * size} to {(place + 1) * size - 1}"
                lost.append(f"{name[7:]}, with {ranks}, was lost")
        return lost

    # --- a round

    def _start(self, round: int) -> None:
        """Start this node's workers of a round."""
        count, self._node = len(self._members), self._members.index(self._name)
        own = f"; this is node {self._node}" if self._node else ""
        nodes = f"{count} node{'s' * (count != 1)} of launch.nproc_per_node={self.launch.num_processes}"
        LOGGER.info("%s", f"round {round}: {nodes}{own}")
        self._meeting.network.use(self._meeting.interface if count > 1 else None)
        self.start(round, node=self._node, num_nodes=count, store=(self._meeting.host, self._meeting.port))

    def _is_over(self, view: RoundView) -> bool:
        """Return whether the round has lost a node, or the nodes have left it."""
        return view.number != self._number or not {*self._members} <= {*view.members}

    def _wait_out(self) -> None:
        """Wait until a round ends that has no place for this node: the number of nodes does not fit the strategy's mesh."""
        while not self._is_over(self._nodes.look()) and self._meeting.recorded("end") is None:
            self._stops()
            time.sleep(_POLL_S)

    def _watch(self, round: int) -> None:
        """Watch this node's workers until they have ended, and record how they ended."""
        is_stopping, over_since = False, None
        while (ended := self.poll()) is None:
            time.sleep(_POLL_S)
            view = self._nodes.look()
            if not self.verdict and self._meeting.recorded(f"verdict_{round}"):
                self.look()  # the ranks of another node have waited until the time-out
            stops = self._stops()
            may_grow = self._size_for(len(view.members) + view.num_waiting) > len(self._members)
            if not is_stopping and (stops or may_grow):
                if not stops:
                    self._meeting.first(f"regroup_{round}", True)
                self.send(signal.SIGTERM)
                is_stopping = True
            patience_s = self._patience_s(view, round)
            if patience_s is None:
                continue
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since >= patience_s:
                self.end(signal.SIGKILL)
                return
        self._conclude(round, ended)

    def _patience_s(self, view: RoundView, round: int) -> float | None:
        """Return for how many seconds the running workers may continue. Return None if there is no problem."""
        if self._meeting.recorded("end") is not None:
            return self.launch.timeout_s  # rank 0 may still close its loggers
        if not self._is_over(view):
            return None
        left = self._meeting.recorded(f"left_{round}")  # None: a node was lost
        return 0.0 if left is None else self.launch.timeout_s if left == "done" else _GRACE_S

    def _conclude(self, round: int, ended: RunProcsResult) -> None:
        """Record how this node's workers ended, for the other nodes."""
        if not self.verdict and not ended.is_failed():
            code = max(ended.return_values.values())
            # without a new node, a person has stopped the run, maybe by a signal to a worker
            if code != Exit.PREEMPTED or self._stops() or not self._meeting.recorded(f"regroup_{round}"):
                self._meeting.end(code)
            self._meeting.first(f"left_{round}", "done")
            return
        self._meeting.first(f"left_{round}", "failed")
        if self.verdict:
            if not self.slept_s:
                self._conclude_hang(round)
            return
        failure = self.cause(ended)
        if failure.lost_peer and not self._is_explained(round, within_s=_TO_EXPLAIN_S):
            # without a count, this would repeat forever
            failure = Failure(0, "the nodes lost their connection, and no process died", "the network")
        if not failure.lost_peer:
            self._note(failure, round)

    def _is_explained(self, round: int, *, within_s: float) -> bool:
        """Return whether another node has failed or was lost: then this node's workers have only lost their connections."""
        keys = ("end", f"failure_{round}", f"verdict_{round}")
        return comes_true(lambda: self._lost(self._nodes.look()) or any(map(self._meeting.recorded, keys)), within_s=within_s)

    def _note(self, failure: Failure, round: int) -> None:
        """Count one failure per round, for all nodes. The last allowed failure, or a repeated failure, ends the run."""
        mine = [self._meeting.number, dataclasses.asdict(failure)]
        if self._meeting.first(f"failure_{round}", mine) != mine or starts_again(failure, self._directory):
            return
        number, most = self._meeting.count("failures"), self.launch.max_restarts
        self._meeting.first(f"counted_{number}", [failure.error, failure.where])
        if number > most or self._meeting.recorded(f"counted_{number - 1}") == [failure.error, failure.where]:
            self.failures.append(failure)
            self._meeting.end(Exit.FAILED, error=f"rank {failure.rank}: {failure.error}")
            return
        with log.log_file(self._directory.log):
            LOGGER.warning("%s; restart %d of %d", failure, number, most)

    def _conclude_hang(self, round: int) -> None:
        """Record this node's verdict, and wait for the other nodes' verdicts. The run ends with all of them."""
        self._meeting.first(f"verdict_{round}_{self._node}", self.verdict)
        self._meeting.first(f"verdict_{round}", True)
        keys, recorded = [f"verdict_{round}_{place}" for place in range(len(self._members))], self._meeting.recorded
        comes_true(lambda: recorded("end") is not None or all(map(recorded, keys)), within_s=_TO_EXPLAIN_S)
        if recorded("end") is not None:
            return
        verdicts = sorted(filter(None, map(recorded, keys)), key=is_of_others)
        if not is_of_others(verdicts[0]):
            self._meeting.end(Exit.HANG, error="; ".join(verdicts))
        elif len(verdicts) == len(keys):
            everyone = "the nodes' ranks wait for each other, in different collectives"
            self._meeting.end(Exit.HANG, error="; ".join([everyone, *verdicts]))
