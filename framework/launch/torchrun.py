"""Under torchrun, or any launcher that sets its variables: rank 0 composes, the other ranks use the result."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from framework.config.frozen_file import FrozenConfig, digest_of
from framework.config.modes import MODES
from framework.config.schema import RunConfig
from framework.launch.claim import ClaimedRun, claim, is_finished
from framework.launch.decision import PATIENCE, SIGN_S, print_problems, publish, received, store_of
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, Interrupted, headline, is_lost_peer
from framework.runtime.forks import repeating
from framework.runtime.log import LOGGER
from framework.runtime.preemption import die_with_parent
from framework.runtime.problem import Problem


def join(begin: Callable[[], ClaimedRun | int], *, environment: Environment, line: list[str] | None = None) -> int:
    """Run this rank's part. Only rank 0 calls `begin`, which composes, checks and makes the directory.

    `line` is the process's command line, if it may differ from that of the other processes.
    """
    die_with_parent()
    if environment.world_size > environment.local_world_size:
        from framework.launch.network import Network  # imports psutil

        network = Network.find()
        # NCCL finds its networks by itself, and may use several networks
        network.use(network.towards(environment.master_addr), libraries=("GLOO_SOCKET_IFNAME",))
    is_one = line is None or _have_one_line(line, environment=environment)
    begun, taken = agree(begin if is_one else lambda: print_problems([_SEVERAL]), environment=environment)
    if not isinstance(taken, FrozenConfig):
        return taken
    try:
        return carry_out(taken, begun=begun, scratch=None)
    except Exception as error:
        LOGGER.error("rank %d failed: %s", environment.rank, headline(error))
        if environment.is_foreign and not is_lost_peer(error):  # rank 0 cannot record it, because the launcher ends rank 0
            text = f"rank {environment.rank}: {headline(error)}"
            RunDirectory(taken.path.parent).record_end(status="failed", error=text)
        return Exit.FAILED


def agree(begin: Callable[[], ClaimedRun | int], *, environment: Environment) -> tuple[ClaimedRun | None, FrozenConfig | int]:
    """Return what rank 0 has begun (None on other ranks; rank 0 keeps its lock), and the decision for all ranks. Collective."""
    if environment.rank != 0:
        return None, received(environment=environment)
    # the others wait as long as there are signs: rank 0 may read or fetch terabytes before the start
    with repeating(lambda: store_of(environment).add("signs", 1), every_s=SIGN_S, name="signs"):
        try:
            begun = begin()
        except Interrupted as end:  # the other ranks must end, too
            LOGGER.error("%s", end)
            begun = end.code
    run, taken = (begun, begun.frozen) if isinstance(begun, ClaimedRun) else (None, begun)
    publish(taken, environment=environment)
    return run, taken


def carry_out(frozen: FrozenConfig, *, begun: ClaimedRun | None, scratch: Path | None) -> int:
    """Do this rank's part of the run, with the mirror on rank 0. Return the exit code."""
    from framework.launch.worker import work  # imports torch

    with nullcontext(int) if begun is None else begun.mirrored() as settle:
        return settle(work(frozen, scratch))


def join_round(config: RunConfig, folder: Path, scratch: Path) -> int:
    """Do one worker's part of a round of an elastic run, whose nodes share `folder`. Return the exit code.

    All ranks use the configuration of rank 0, which alone claims the directory. `scratch` is this node's folder.
    """
    from framework.launch.failures import record_failure  # imports torch

    def begin() -> ClaimedRun | int:
        """Claim the directory. This process keeps the lock until it ends. Return an exit code if nothing is left to do."""
        began = folder / "began"
        mine = config.begun() if began.exists() else config
        if MODES[mine.mode].about == "run" and is_finished(mine.run, targets=mine.targets()):
            return Exit.FINISHED
        run = claim(mine, party="elastic")
        if isinstance(run, ClaimedRun):
            began.touch()
        return run

    environment = Environment.read()
    log.start_console(rank=environment.rank)
    try:
        begun, taken = agree(begin, environment=environment)
    except Exception as error:
        record_failure(error, environment=environment, scratch=scratch)
        raise
    return carry_out(taken, begun=begun, scratch=scratch) if isinstance(taken, FrozenConfig) else taken


_SEVERAL = Problem("srun", "its tasks have different commands, but are the processes of one run",
                   "one command for all; srun --ntasks=1 for each run; or -m for a sweep")  # fmt: skip


def _have_one_line(line: list[str], *, environment: Environment) -> bool:
    """Return, on rank 0, whether all processes have the same command line."""
    from framework.distributed.groups import awaited

    store = store_of(environment, part="line")
    mine = digest_of(line)
    if environment.rank != 0:
        store.set(str(environment.rank), mine)
        return True
    others = [awaited(store, str(rank), timeout=PATIENCE).decode() for rank in range(1, environment.world_size)]
    return all(other == mine for other in others)
