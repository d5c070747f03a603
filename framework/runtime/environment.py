"""The environment variables of the launcher, and of this process. Only this module reads `os.environ`."""

import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """The process's place in the run, from the variables of torchrun. The defaults are for a single process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    attempt: int = 0  # how many times the worker group has been restarted
    is_launched: bool = False  # torchrun, or any launcher that sets its variables, started this process
    is_foreign: bool = False  # a launcher of the group `launchers` did: it ends the other processes when one process ends
    uses_agent_store: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    step: str = ""  # the name of the Slurm step that has started the processes, without a port that the user has set
    launcher_has_cuda: bool = False  # a variable of this framework: if set, a process that sees no device must not use the CPU

    @classmethod
    def read(cls) -> "Environment":
        env = os.environ
        numbers = {name.lower(): int(env.get(name, default)) for name, default in zip(_TORCHRUN, "0011")}
        return cls(
            **numbers,
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
            is_launched={"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys(),
            is_foreign=FOREIGN_LAUNCHER in env,
            uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(env.get("MASTER_PORT", "0")),
            step=env.get(_STEP, ""),
            launcher_has_cuda=LAUNCHER_HAS_CUDA in env,
        )

    def export(self) -> None:
        """Set the variables as torchrun would, because the user's code may read them."""
        for name, value in zip(_TORCHRUN, (self.rank, self.local_rank, self.world_size, self.local_world_size)):
            os.environ[name] = str(value)


def left_over() -> list[str]:
    """Return torchrun's variables that make this process one of several, if no variable says where the processes meet."""
    found = Environment.read()
    is_alone = (found.rank, found.local_rank, found.world_size, found.local_world_size) == (0, 0, 1, 1)
    return [] if is_alone or found.is_launched else [name for name in _TORCHRUN if name in os.environ]


LAUNCHER_HAS_CUDA = "STEADFAST_LAUNCHER_HAS_CUDA"
FOREIGN_LAUNCHER = "STEADFAST_FOREIGN_LAUNCHER"
_STEP = "STEADFAST_STEP"
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class SrunTask:
    """The process's place among the tasks that one `srun` started."""

    nodes: str  # in Slurm's format, as in node[1-4]
    num_tasks: int
    on_each: list[int]  # the number of tasks of each node

    @classmethod
    def read(cls) -> "SrunTask | None":
        """Return the place.

        Return None if srun did not start this process as one of several, or if srun started a launcher that started this
        process. Return None also if srun started a terminal (`--pty`): only the terminal's shell receives the user's input.
        """
        env = os.environ
        num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        if num_tasks < 2 or Environment.read().is_launched or "SLURM_PTY_PORT" in env:
            return None
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])  # 4(x2),1
        return cls(
            env["SLURM_STEP_NODELIST"], num_tasks, [int(count) for count, times in counts for _ in range(int(times or 1))]
        )

    def export(self, master_addr: str) -> None:
        """Set the variables that torchrun would set. Keep the meeting address and port if the user has set them."""
        env, job, step = os.environ, int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        place = (env["SLURM_PROCID"], env["SLURM_LOCALID"], self.num_tasks, self.on_each[int(env["SLURM_NODEID"])])
        env |= dict(zip(_TORCHRUN, map(str, place)))
        env.setdefault("MASTER_ADDR", master_addr)
        if "MASTER_PORT" not in env:  # all must know it before they communicate; other jobs on the node may have the same
            env |= {"MASTER_PORT": str(20000 + (job * 17 + step) % 10000), _STEP: f"{job}.{step}"}


@dataclass(frozen=True)
class SlurmTask:
    """The process's place in a Slurm job."""

    job_id: int  # the job's own id, also for a job of an array
    name: str  # the name for Slurm's commands; 12_3 in an array
    restarts: int  # how many times the job has been requeued
    node: int  # 0 for the first node of the job

    @classmethod
    def read(cls) -> "SlurmTask":
        env = os.environ
        array = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}" if "SLURM_ARRAY_JOB_ID" in env else "{SLURM_JOB_ID}"
        restarts = int(env.get("SLURM_RESTART_COUNT", "0"))
        return cls(int(env["SLURM_JOB_ID"]), array.format_map(env), restarts, int(env["SLURM_NODEID"]))


def outside_of_jobs() -> AbstractContextManager[None]:
    """Hide the variables that change Slurm's commands: those of this process's job, and the user's defaults for listings."""
    found = {name for name in os.environ if name.startswith(_CHANGE_SLURM) or name == "SBATCH_WAIT"}
    return _without(found - {*_LEAD_TO_SLURM})


def outside_of_groups() -> AbstractContextManager[None]:
    """Hide torchrun's variables that make this process one of several."""
    return _without(_TORCHRUN)


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


_CHANGE_SLURM = ("SLURM_", "SLURMD_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_")
_LEAD_TO_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


def node_name() -> str:
    """Return the name of this node. Several Slurm nodes may share a machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def variables() -> MutableMapping[str, str]:
    """Return the environment variables of this process and of the processes that it starts.

    `setdefault` sets a variable that a library reads, unless the user has set the variable.
    """
    return os.environ


# --- the hash seed


def fix_hashes() -> None:
    """Start this process again with the same hash seed for all processes.

    Do nothing if PYTHONHASHSEED is set, or if another program in this process has called this program. With one seed, the
    order of a set, and all results of hash() in the user's code, are the same on every rank and after a restart. By default,
    Python's hash of a text differs from process to process.
    """
    options = words_before_arguments()
    is_main = sys.argv[0] in options or ("-m" in options and sys.argv[0].endswith("__main__.py"))
    if "PYTHONHASHSEED" in variables() or not sys.executable or not is_main:
        return
    variables()["PYTHONHASHSEED"] = "0"
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def words_before_arguments() -> list[str]:
    """Return the words that the interpreter received before this program's arguments; [] if the arguments have changed."""
    before = len(sys.orig_argv) - len(sys.argv) + 1
    return sys.orig_argv[1:before] if sys.orig_argv[before:] == sys.argv[1:] else []
