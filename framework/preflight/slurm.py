"""A Slurm job's options, and checks of them against the cluster before anything is submitted."""

import math
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.schema import LaunchSection, RunSection, SlurmSection
from framework.config.spelling import did_you_mean
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.problem import Problem, missing_extra
from framework.runtime.slurm import SlurmFailed


def slurm_section(launch: LaunchSection) -> SlurmSection:
    """Return the section that exists with launch=slurm."""
    assert launch.slurm is not None
    return launch.slurm


def job_options(launch: LaunchSection, *, job_name: str) -> dict[str, Any]:
    """Return the options of a run's job: sbatch's long options by name, True for an option without a value."""
    asked, counts = slurm_section(launch), launch.node_counts
    options = {
        "job-name": job_name,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "exclude": asked.exclude,
        "time": asked.time_min,
        "nodes": f"{counts[0]}-{counts[-1]}",  # without a number of tasks, which would get as few nodes as possible
        "cpus-per-task": _num_cpus(launch),
        "mem": f"{_memory_mb(asked)}M" if asked.mem_gb is not None else None,
        "gpus-per-node": asked.gpus_per_node,
        # to the tasks, not to the batch script
        "signal": f"USR1@{asked.signal_s}",
        "requeue" if asked.requeue else "no-requeue": True,
        "no-kill": len(counts) > 1,  # the remaining nodes continue
    }
    return {name: value for name, value in options.items() if value is not None and value is not False}


def job_problems(name: str, run: RunSection, launch: LaunchSection) -> list[Problem]:
    """Return why Slurm would refuse the job, or the job could not run, as far as that shows without submitting it."""
    if launch.kind != "slurm":
        return []
    if problems := missing_extra("launch", "slurm"):
        return problems
    if shutil.which("sbatch") is None:
        what = "slurm, but there is no sbatch on PATH"
        return [Problem("launch", what, "a machine from which jobs are submitted, or launch=local")]
    try:
        if queued_jobs([RunDirectory(Path(run.dir))]):
            return []  # nothing will be submitted
        found = _check_partition(launch, _node_kinds())
    except SlurmFailed as error:
        return [Problem("launch", f"Slurm does not answer: {error}", "try again, or launch=local")]
    if "%" in run.dir:
        found.append(Problem("run.dir", "holds a %, which Slurm replaces in the names of its output", "a path without"))
    options = job_options(launch, job_name=f"{name}/{run.id}")
    return found or _check_limits(options) or _check_visible(Path(run.dir), options)


# --- what the cluster has


@dataclass(frozen=True)
class _NodeKind:
    """Nodes of one partition with the same resources."""

    partition: str
    is_default: bool
    num_nodes: int
    num_cpus: int
    memory_mb: int
    num_gpus: int
    limit_min: float


def _node_kinds() -> list[_NodeKind]:
    kinds = []
    for line in slurm.ask("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G|%l").splitlines():
        partition, nodes, cpus, memory, gres, limit = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", gres))
        name = partition.rstrip("*")
        kinds.append(_NodeKind(name, name != partition, int(nodes), int(cpus), int(memory), gpus, _minutes(limit)))
    return kinds


def _minutes(limit: str) -> float:
    """Return the minutes of DAYS-HOURS:MINUTES:SECONDS, whose leading parts may be missing; infinity for a word."""
    days, _, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts):
        return math.inf
    hours, minutes, seconds = [0, 0, *map(int, parts)][-3:]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def _num_cpus(launch: LaunchSection) -> int:
    return slurm_section(launch).cpus_per_task or launch.num_processes


def _memory_mb(asked: SlurmSection) -> int:
    return math.ceil((asked.mem_gb or 0) * 1024)


def _check_partition(launch: LaunchSection, kinds: list[_NodeKind]) -> list[Problem]:
    asked, there = slurm_section(launch), list(dict.fromkeys(kind.partition for kind in kinds))
    chosen = asked.partition.split(",") if asked.partition else [kind.partition for kind in kinds if kind.is_default]
    if not chosen:
        return [Problem("launch.slurm.partition", "null, but there is no default", "one of " + ", ".join(there))]
    for name in chosen:
        if name not in there:
            close = did_you_mean(name, there)
            expected = "one of " + ", ".join(there) + (f"; {close}" if close else "")
            return [Problem("launch.slurm.partition", f"there is no partition {name!r}", expected)]
    kinds = [kind for kind in kinds if kind.partition in chosen]
    where = f"partition {','.join(dict.fromkeys(chosen))}"
    cpus_key = "launch.slurm.cpus_per_task" if asked.cpus_per_task else "launch.nproc_per_node"
    needs: list[tuple[str, float, str, list[float]]] = [
        (cpus_key, _num_cpus(launch), "CPUs", [kind.num_cpus for kind in kinds]),
        ("launch.slurm.mem_gb", _memory_mb(asked), "MB", [kind.memory_mb for kind in kinds]),
        ("launch.slurm.gpus_per_node", asked.gpus_per_node or 0, "GPUs", [kind.num_gpus for kind in kinds]),
        ("launch.slurm.time_min", asked.time_min or 0, "minutes", [kind.limit_min for kind in kinds]),
    ]
    found = [Problem(key, f"{needed:g} {unit}, but {where} has no more than {max(has):g}", f"at most {max(has):g}")
             for key, needed, unit, has in needs if needed > max(has)]  # fmt: skip
    shortest = asked.signal_s // 60 + 2  # with less time an attempt may end before its first step
    if asked.time_min is not None and asked.time_min < shortest:
        when = f"launch.slurm.signal_s={asked.signal_s} before the end, or up to a minute earlier"
        what = f"{asked.time_min} minutes, but Slurm has the job stop {when}"
        found.append(Problem("launch.slurm.time_min", what, f"at least {shortest}"))
    if found:
        return found
    fit = [all(needed <= has[place] for _, needed, _, has in needs) for place in range(len(kinds))]
    num_nodes, least = (sum(kind.num_nodes for kind, fits in zip(kinds, fit) if fits), launch.node_counts[0])
    if least > num_nodes:
        what = f"{launch.nnodes}, but {where} has {num_nodes} such nodes"
        return [Problem("launch.nnodes", what, f"at most {num_nodes}" if num_nodes else "less of each")]
    return []


def _check_limits(options: dict[str, Any]) -> list[Problem]:
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    try:
        slurm.ask("sbatch", "--test-only", *flags, "--wrap=true")
    except SlurmFailed as error:
        # that error may be temporary: sbatch lets a job wait for nodes that are down
        if "node configuration is not available" not in str(error):
            return [Problem("launch.slurm", f"Slurm refuses such a job: {error}", "what the site allows")]
    return []


_MEMORY = ("tmpfs", "ramfs", "overlay")  # file systems that are local to a machine or a container


def _check_visible(place: Path, options: dict[str, Any]) -> list[Problem]:
    """Refuse a run's directory that the nodes do not see. A node, if one is free at once, looks for a file there."""
    place = place.absolute()
    nearest = next(parent for parent in [place, *place.parents] if parent.is_dir())
    problem = Problem("run.dir", f"{nearest} is of this machine alone: the nodes do not see it",
                      "a directory on a file system that they share")  # fmt: skip
    names = ("partition", "account", "qos", "constraint", "exclude")
    flags = [f"--{name}={options[name]}" for name in names if name in options]
    with tempfile.NamedTemporaryFile(dir=nearest, prefix=".seen_by_nodes_") as file:
        test = 'test -e "$0" && echo seen || echo unseen'
        try:
            answer = slurm.ask("srun", "--immediate=5", "--nodes=1", "--ntasks=1", "--time=1", "--mpi=none", "--chdir=/",
                          *flags, "sh", "-c", test, file.name)  # fmt: skip
        except SlurmFailed:  # no node is free; the job itself checks at its start
            answer = ""
    return [problem] if "unseen" in answer or ("seen" not in answer and _file_system(nearest) in _MEMORY) else []


def _file_system(path: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    real = os.path.realpath(path)
    above = [(point, kind) for point, kind in mounts if os.path.commonpath([point, real]) == point]
    return max(above, key=lambda mount: len(mount[0]))[1]
