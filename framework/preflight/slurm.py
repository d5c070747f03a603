"""The options of a Slurm job, and checks of them against the cluster before the job is submitted."""

import math
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from framework.config.launch import LaunchSection, SlurmSection
from framework.config.modes import folder_of
from framework.config.schema import BackendSection, Node, RunSection
from framework.config.spelling import did_you_mean
from framework.preflight.processes import devices_of_each
from framework.preflight.shared_folder import have_written, problems_of_place
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.problem import Problem, missing_extra, shown
from framework.runtime.slurm import SlurmFailed, SlurmSilent


def slurm_section(launch: LaunchSection) -> SlurmSection:
    """Return the section that exists with launch=slurm."""
    assert launch.slurm is not None
    return launch.slurm


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
        return slurm_section(self.launch)

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
            "mem": f"{self.memory_mb}M" if asked.mem_gb is not None else None,
            "gpus-per-node": self.gpus or None,
            # to the tasks, not to the batch script
            "signal": f"USR1@{asked.signal_s}",
            "requeue" if asked.requeue else "no-requeue": True,
            "no-kill": len(counts) > 1,  # the remaining nodes continue
        }
        return {name: value for name, value in (options | asked.sbatch_options).items() if value not in (None, False)}

    @property
    def num_cpus(self) -> int:
        """The CPUs of a node: one for each process and each of its loader workers, or as many as the nodes have."""
        asked, least = self.asked.cpus_per_task, self.launch.num_processes
        if asked is not None or self.num_workers == 0:
            return asked or least
        most = max((kind.num_cpus for kind in self.kinds), default=least)
        return max(least, min(least * (1 + self.num_workers), most))

    @property
    def memory_mb(self) -> int:
        return math.ceil((self.asked.mem_gb or 0) * 1024)

    @property
    def gpus(self) -> str | int | None:
        """The GPUs of a node, `[TYPE:]N`: as asked; else one for each device, if all nodes of the partition have GPUs."""
        if self.asked.gpus_per_node is not None or not self._may_choose_gpus:
            return self.asked.gpus_per_node or None
        return self.num_devices if self.kinds and all(kind.num_gpus for kind in self.kinds) else None

    @property
    def _may_choose_gpus(self) -> bool:
        return self.num_devices > 0 and not self._gpu_options

    @property
    def _gpu_options(self) -> list[str]:
        options = self.asked.sbatch_options
        return [f"--{name}={value}" for name, value in options.items() if name == "gres" or name.startswith("gpus")]

    @property
    def num_gpus(self) -> int:
        return int(str(self.gpus or 0).rpartition(":")[2])

    @cached_property
    def kinds(self) -> list["NodeKind"]:
        """The kinds of nodes of the partitions that the job may run in."""
        return [kind for kind in node_kinds() if kind.partition in self.partitions]

    @property
    def partitions(self) -> list[str]:
        if self.asked.partition:
            return self.asked.partition.split(",")
        return list(dict.fromkeys(kind.partition for kind in node_kinds() if kind.is_default))

    def problems(self) -> list[Problem]:
        """Return the resources that the partition does not have, as problems."""
        asked, there = self.asked, list(dict.fromkeys(kind.partition for kind in node_kinds()))
        if not self.partitions:
            return [Problem("launch.slurm.partition", "null, but there is no default", "one of " + ", ".join(there))]
        for name in self.partitions:
            if name not in there:
                close = did_you_mean(name, there)
                expected = "one of " + ", ".join(there) + (f"; {close}" if close else "")
                return [Problem("launch.slurm.partition", f"there is no partition {name!r}", expected)]
        where = f"partition {','.join(self.partitions)}"
        has_gpus = [kind.num_gpus > 0 for kind in self.kinds]
        if asked.gpus_per_node is None and self._may_choose_gpus and any(has_gpus) and not all(has_gpus):
            what = f"null, but {where} has nodes with GPUs and nodes without"
            expected = f"launch.slurm.gpus_per_node={self.num_devices}, or 0 for none"
            return [Problem("launch.slurm.gpus_per_node", what, expected)]
        return self._resource_problems(where)

    def _resource_problems(self, where: str) -> list[Problem]:
        asked, kinds = self.asked, self.kinds
        cpus_key = "launch.slurm.cpus_per_task" if asked.cpus_per_task else "launch.nproc_per_node"
        gpus_key = "launch.nproc_per_node" if asked.gpus_per_node is None else "launch.slurm.gpus_per_node"
        needs: list[tuple[str, float, str, list[float]]] = [
            (cpus_key, self.num_cpus, "CPUs", [kind.num_cpus for kind in kinds]),
            ("launch.slurm.mem_gb", self.memory_mb, "MB", [kind.memory_mb for kind in kinds]),
            (gpus_key, self.num_gpus, "GPUs", [kind.num_gpus for kind in kinds]),
            ("launch.slurm.time_min", asked.time_min or 0, "minutes", [kind.limit_min for kind in kinds]),
        ]
        found = [Problem(key, f"{needed:g} {unit}, but {where} has no more than {max(has):g}", f"at most {max(has):g}")
                 for key, needed, unit, has in needs if needed > max(has)]  # fmt: skip
        shortest = asked.signal_s // 60 + 2  # with less time, an attempt may end before its first step
        if asked.time_min is not None and asked.time_min < shortest:
            when = f"launch.slurm.signal_s={asked.signal_s} before the end, or up to a minute earlier"
            what = f"{asked.time_min} minutes, but Slurm stops the job {when}"
            found.append(Problem("launch.slurm.time_min", what, f"at least {shortest}"))
        if found:
            return found
        fit = [all(needed <= has[place] for _, needed, _, has in needs) for place in range(len(kinds))]
        num_nodes, least = (sum(kind.num_nodes for kind, fits in zip(kinds, fit) if fits), self.launch.node_counts[0])
        if least > num_nodes:
            what = f"{self.launch.nnodes}, but {where} has {num_nodes} such nodes"
            return [Problem("launch.nnodes", what, f"at most {num_nodes}" if num_nodes else "fewer resources on each node")]
        return []

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
        found = request.problems() + _line_problems(request.asked)
        if "%" in run.dir:
            found.append(Problem("run.dir", "has a %, which Slurm replaces in the names of its output files", "a path without"))
        if found:
            return found
        options = request.options(job_name=f"{name}/{run.id}")
        is_known = not request.asked.check or have_written(Path(run.root), folder)
        return _check_limits(options, request.partitions) or ([] if is_known else problems_of_place(folder, options))
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


# --- the resources of the cluster


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one partition with the same resources."""

    partition: str
    is_default: bool
    num_nodes: int
    num_cpus: int
    memory_mb: int
    num_gpus: int
    limit_min: float


@cache
def node_kinds() -> tuple[NodeKind, ...]:
    """Ask once which nodes the cluster has. SlurmFailed if Slurm does not answer."""
    kinds = []
    for line in slurm.ask("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G|%l").splitlines():
        partition, nodes, cpus, memory, gres, limit = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", gres))
        name = partition.rstrip("*")
        kinds.append(NodeKind(name, name != partition, int(nodes), int(cpus), int(memory), gpus, _minutes(limit)))
    return tuple(kinds)


def _minutes(limit: str) -> float:
    """Return the minutes of DAYS-HOURS:MINUTES:SECONDS, where the first parts may be missing; infinity for a word."""
    days, _, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts):
        return math.inf
    hours, minutes, seconds = [0, 0, *map(int, parts)][-3:]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def _check_limits(options: dict[str, Any], partitions: list[str]) -> list[Problem]:
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    try:
        slurm.ask("sbatch", "--test-only", *flags, "--wrap=true")
    except SlurmSilent:
        raise
    except SlurmFailed as error:
        # this may be temporary: sbatch lets a job wait for nodes that are down
        states = slurm.ask("sinfo", "--noheader", f"--partition={','.join(partitions)}", "--format=%T").split()
        if "node configuration is not available" not in str(error) or all(state.startswith(_UP) for state in states):
            return [Problem("launch.slurm", f"Slurm refuses such a job: {error}", "what the site allows")]
    return []


_UP = ("idle", "mixed", "allocated", "completing", "reserved", "planned")  # *: it does not answer now
