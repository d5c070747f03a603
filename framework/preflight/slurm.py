"""The options of a Slurm job, and checks before it is submitted: by the cluster, and of the folder that the nodes must see."""

import math
import shutil
import subprocess
import tempfile
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import psutil

from framework.config.launch import LaunchSection, SlurmSection
from framework.config.modes import folder_of
from framework.config.schema import BackendSection, Node, RunSection
from framework.preflight.processes import devices_of_each
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.problem import Problem, missing_extra, shown
from framework.runtime.slurm import SlurmFailed, SlurmSilent


@dataclass(frozen=True)
class JobRequest:
    """A run's request to Slurm. SlurmFailed if it depends on the cluster and Slurm does not answer."""

    launch: LaunchSection
    num_devices: int  # that the processes of a node use, if it has GPUs
    num_workers: int  # loader processes of each process

    @classmethod
    def of(cls, launch: LaunchSection, dataset: Node, parallel: Node, backend: BackendSection, device: str) -> "JobRequest":
        num_workers = dataset.get("num_workers")
        on_gpus = backend.device(device) != "cpu"
        num_devices = launch.num_processes * devices_of_each(parallel) if on_gpus else 0
        return cls(launch, num_devices, num_workers if isinstance(num_workers, int) else 0)

    @property
    def asked(self) -> SlurmSection:
        assert self.launch.slurm is not None  # it exists with launch=slurm
        return self.launch.slurm

    def options(self, *, job_name: str) -> dict[str, Any]:
        """Return sbatch's long options by name, True for an option without a value."""
        asked, counts = self.asked, self.launch.node_counts
        options = {
            "job-name": job_name,
            "partition": asked.partition,
            "account": asked.account,
            "qos": asked.qos,
            "constraint": asked.constraint,
            "exclude": asked.exclude,
            "time": asked.time_min,
            "nodes": f"{counts[0]}-{counts[-1]}",  # with a number of tasks, the job would get as few nodes as possible
            "cpus-per-task": self.num_cpus,
            "mem": f"{math.ceil(asked.mem_gb * 1024)}M" if asked.mem_gb is not None else None,
            "gpus-per-node": self.gpus or None,
            # to the tasks, not to the batch script
            "signal": f"USR1@{asked.signal_s}",
            "requeue" if asked.requeue else "no-requeue": True,
            "no-kill": len(counts) > 1,  # the remaining nodes continue
        }
        return {name: value for name, value in (options | asked.sbatch_options).items() if value not in (None, False)}

    @cached_property
    def num_cpus(self) -> int:
        """The CPUs of a node: one for each process and each of its loader workers, or as many as Slurm accepts."""
        least = self.launch.num_processes
        if self.asked.cpus_per_task is not None or self.num_workers == 0:
            return self.asked.cpus_per_task or least

        def refused(num_workers: int) -> bool:
            asked = {"partition": self.asked.partition, "account": self.asked.account, "qos": self.asked.qos}
            return bool(refusal(**asked, **{"cpus-per-task": least * (1 + num_workers)}))

        is_whole = not refused(self.num_workers)
        return least * (1 + (self.num_workers if is_whole else bisect_left(range(1, self.num_workers), True, key=refused)))

    @cached_property
    def gpus(self) -> str | int | None:
        """The GPUs of a node, `[TYPE:]N`: as asked; else one for each device, if the partition has nodes with GPUs."""
        if self.asked.gpus_per_node is not None or self.num_devices == 0 or self._gpu_options:
            return self.asked.gpus_per_node or None
        kinds = slurm.ask("sinfo", "--noheader", *self._place, "--format=%P %G").splitlines()
        default = kinds if self._place else [kind for kind in kinds if kind.partition(" ")[0].endswith("*")]
        return self.num_devices if any("gpu" in kind.partition(" ")[2] for kind in default) else None

    @property
    def _place(self) -> list[str]:
        return [f"--partition={self.asked.partition}"] if self.asked.partition else []

    @property
    def _gpu_options(self) -> list[str]:
        options = self.asked.sbatch_options
        return [f"--{name}={value}" for name, value in options.items() if name == "gres" or name.startswith("gpus")]

    @property
    def num_gpus(self) -> int:
        return int(str(self.gpus or 0).rpartition(":")[2])

    def problems(self) -> list[Problem]:
        """Return why Slurm refuses the request. If it accepts the request without one option, this option is named."""
        asked = self.asked
        shortest = asked.signal_s // 60 + 2  # with less time, an attempt may end before its first step
        if asked.time_min is not None and asked.time_min < shortest:
            when = f"launch.slurm.signal_s={asked.signal_s} before the end, or up to a minute earlier"
            what = f"{asked.time_min} minutes, but Slurm stops the job {when}"
            return [Problem("launch.slurm.time_min", what, f"at least {shortest}")]
        options = self.options(job_name="test")
        why = refusal(**options)
        if not why or _is_temporary(why, *self._place):
            return []
        keys = {
            "partition": "launch.slurm.partition", "account": "launch.slurm.account", "qos": "launch.slurm.qos",
            "constraint": "launch.slurm.constraint", "exclude": "launch.slurm.exclude", "time": "launch.slurm.time_min",
            "cpus-per-task": "launch.slurm.cpus_per_task" if asked.cpus_per_task else "launch.nproc_per_node",
            "mem": "launch.slurm.mem_gb", "nodes": "launch.nnodes",
            "gpus-per-node": "launch.nproc_per_node" if asked.gpus_per_node is None else "launch.slurm.gpus_per_node",
        }  # fmt: skip
        for name, key in keys.items():
            if name in options and not refusal(**{other: value for other, value in options.items() if other != name}):
                return [Problem(key, f"Slurm refuses {name}={options[name]}: {why}", "what the site allows (sinfo)")]
        return [Problem("launch.slurm", f"Slurm refuses such a job: {why}", "what the site allows")]

    def __str__(self) -> str:
        """Return the request for each node, as a text."""
        num_cpus, num_gpus, needed = self.num_cpus, self.num_gpus, self.launch.num_processes * (1 + self.num_workers)
        gpus = " ".join(self._gpu_options) or f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
        text = f"requests on each node {num_cpus} CPU{'s' * (num_cpus != 1)} and {gpus}"
        return text if num_cpus >= needed else f"{text}; its processes and loader workers are {needed}"


def job_problems(
    name: str,
    mode: str,
    run: RunSection,
    launch: LaunchSection,
    dataset: Node,
    parallel: Node,
    device: str,
    backend: BackendSection,
) -> list[Problem]:
    """Return why Slurm would refuse the job, or why the job could not run, as far as this is known before it is submitted."""
    if launch.kind != "slurm":
        return []
    if problems := missing_extra("launch", "slurm"):
        return problems
    if shutil.which("sbatch") is None:
        what = "slurm, but there is no sbatch on PATH"
        return [Problem("launch", what, "a machine from which jobs are submitted, or launch=local")]
    request, folder = JobRequest.of(launch, dataset, parallel, backend, device), folder_of(run, mode)
    try:
        if queued_jobs([RunDirectory(folder)]):
            return []  # nothing will be submitted
        found = _line_problems(request.asked)
        if "%" in run.dir:
            found.append(Problem("run.dir", "has a %, which Slurm replaces in the names of its output files", "a path without"))
        if found:
            return found
        if found := request.problems():
            return found
        options = request.options(job_name=f"{name}/{run.id}")
        is_known = not request.asked.check or have_written(Path(run.root), folder)
        return [] if is_known else problems_of_place(folder, options)
    except SlurmSilent as error:
        return [Problem("launch", f"Slurm does not answer: {error}", "the same command, later", code=Exit.PREEMPTED)]
    except SlurmFailed as error:
        return [Problem("launch", f"Slurm cannot be asked: {error}", "a machine where `sinfo` works, or launch=local")]


def _line_problems(asked: SlurmSection) -> list[Problem]:
    """Refuse lines that are not complete shell code and would break the job's script, and options that srun does not have."""
    found = []
    try:
        if asked.srun:
            slurm.ask("srun", *asked.srun, "--version")  # srun reads its options in order
    except SlurmSilent:
        raise
    except SlurmFailed as error:
        found.append(Problem("launch.slurm.srun", f"srun refuses it: {error}", "srun's options, each with its value"))
    for line in asked.setup:
        done = subprocess.run(["bash", "-n", "-c", f"{{ {line}\n}}"], capture_output=True, text=True)
        if done.returncode != 0:
            what = done.stderr.strip().partition("\n")[0].partition("line ")[2] or "a syntax error"
            what = f"{shown(line)} is not a line of shell ({what})"
            found.append(Problem("launch.slurm.setup", what, "each line must be complete"))
    return found


@lru_cache(maxsize=None, typed=True)  # the jobs of a sweep have few different requests
def refusal(**options: Any) -> str:
    """Return why Slurm refuses a job with these options. Return an empty text if it accepts the job."""
    given = {name: value for name, value in options.items() if value not in (None, False)}
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    try:
        slurm.ask("sbatch", "--test-only", *flags, "--wrap=true")
    except SlurmSilent:
        raise
    except SlurmFailed as error:
        return str(error)
    return ""


def _is_temporary(why: str, *place: str) -> bool:
    """Return whether nodes are down, for which sbatch lets a job wait."""
    states = slurm.ask("sinfo", "--noheader", *place, "--format=%T").split()
    return not all(state.startswith(_UP) for state in states) and "node configuration is not available" in why


_UP = ("idle", "mixed", "allocated", "completing", "reserved", "planned")  # *: it does not answer now


# --- the folder that nodes must see


_MEMORY = ("tmpfs", "ramfs", "overlay")  # file systems that are local to a machine or a container
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "panfs", "afs", "wekafs", "orangefs")


def have_written(root: Path, folder: Path) -> bool:
    """Return whether jobs of earlier runs have written their output below the run's root: then the nodes see it."""
    outputs = (path for pattern in ("*.out", "*/*.out") for path in root.glob(f"*/*/slurm/{pattern}"))
    return root.absolute() in folder.absolute().parents and next(outputs, None) is not None


def problems_of_place(place: Path, options: dict[str, Any]) -> list[Problem]:
    """Refuse a run's directory that the nodes do not see. If a node is free immediately, a job there looks for a file.

    The job takes a second. It is not needed for a file system that machines share.
    """
    place = place.absolute()
    nearest = next(parent for parent in [place, *place.parents] if parent.is_dir())
    if (kind := _file_system(nearest)) in _SHARED:
        return []
    problem = Problem("run.dir", f"{nearest} is on this machine only: the nodes do not see it",
                      "a directory on a file system that the nodes share")  # fmt: skip
    names = ("partition", "account", "qos", "constraint", "exclude")
    flags = [f"--{name}={options[name]}" for name in names if name in options]
    with tempfile.NamedTemporaryFile(dir=nearest, prefix=".seen_by_nodes_") as file:
        test = 'test -e "$0" && echo seen || echo unseen'
        try:
            answer = slurm.ask("srun", "--immediate=5", "--nodes=1", "--ntasks=1", "--time=1", "--mpi=none", "--chdir=/",
                          *flags, "sh", "-c", test, file.name)  # fmt: skip
        except SlurmFailed:  # no node is free; the job itself checks at its start
            answer = ""
    return [problem] if "unseen" in answer or ("seen" not in answer and kind in _MEMORY) else []


def _file_system(path: Path) -> str:
    above = [mount for mount in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(mount.mountpoint)]
    return max(above, key=lambda mount: len(mount.mountpoint)).fstype
