"""The section `launch`: processes, nodes, and the resources of a Slurm job."""

import re
from collections.abc import Iterator
from typing import Literal

from framework.config.section import AboveZero, Count, Positive, Section, setting
from framework.runtime.problem import Problem, shown


class SlurmSection(Section):
    partition: str | None = setting(None, "the partition")
    time_min: Positive | None = setting(None, "minutes until Slurm ends the job; the job then continues as often as needed")
    account: str | None = setting(None, "the account that is charged")
    qos: str | None = setting(None, "the quality of service")
    mem_gb: AboveZero | None = setting(None, "memory of each node")
    cpus_per_task: Positive | None = setting(
        None, "CPUs of each node, because one task holds all processes; null = one for each process and loader worker"
    )
    gpus_per_node: Count | str | None = setting(
        None, "N or TYPE:N, for example a100:4; 0 = none; null = one for each process, if the partition has some"
    )
    constraint: str | None = setting(None, "features that the nodes must have")
    exclude: str | None = setting(None, "nodes that the job must not get")
    options: dict[str, str | int | bool | None] = setting(
        {}, 'other options of sbatch, by their long names, for example {reservation: x, gres: "gpu:a100:2", exclusive: true}'
    )
    setup: list[str] = setting(
        [], 'lines of shell code that the job runs first, for example ["module load cuda"]; the job ends if a line fails'
    )
    python: list[str] = setting(
        [], "the command for Python on the nodes, for example [apptainer, exec, --nv, image.sif, python]; [] = this one"
    )
    srun: list[str] = setting([], 'more options for srun, for example ["--container-image=image.sqsh"]')
    snapshot: bool = setting(
        False, "run the framework's code and your code as they were at submission, from a copy in the run's directory"
    )
    check: bool = setting(True, "before the first submission, let a node check that it sees the run's directory")
    signal_s: Positive = setting(120, "seconds before the end of the job at which it saves a checkpoint and requeues itself")
    requeue: bool = setting(True, "requeue the job automatically if it is preempted, runs out of time or loses a node")
    array_parallelism: Positive | None = setting(None, "jobs of a sweep that run at the same time; null = as many as fit")

    def rules(self) -> Iterator[Problem]:
        if not re.fullmatch(r"([\w.-]+:)?\d{1,4}", str(self.gpus_per_node or 0)):
            yield Problem("gpus_per_node", f"{shown(self.gpus_per_node)} is not valid", "an integer, or TYPE:N as in a100:4")
        for name in self.sbatch_options:
            if (instead := _OWN_OPTIONS.get(name)) is not None:
                yield Problem(f"options.{name}", "is set by the framework", instead)

    @property
    def num_gpus(self) -> int | None:
        """The requested GPUs per node, without their type. None if the number is not given."""
        return None if self.gpus_per_node is None else int(str(self.gpus_per_node).rpartition(":")[2])

    @property
    def sbatch_options(self) -> dict[str, str | int | bool | None]:
        """`options`, by the long names of sbatch."""
        return {name.replace("_", "-"): value for name, value in self.options.items()}


_OWN_OPTIONS = {  # options of sbatch: the key with the same meaning, or why the option would break a job
    **{name: f"launch.slurm.{name}" for name in ("partition", "account", "qos", "constraint", "exclude", "requeue")},
    "gpus-per-node": "launch.slurm.gpus_per_node", "cpus-per-task": "launch.slurm.cpus_per_task",
    "mem": "launch.slurm.mem_gb", "time": "launch.slurm.time_min", "signal": "launch.slurm.signal_s",
    "no-requeue": "launch.slurm.requeue=false", "nodes": "launch.nnodes", "array": "-m submits an array",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus-per-task", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"),
                    "one task of each node starts launch.nproc_per_node processes"),
    "export": "launch.slurm.setup, as in [export A=b]",  # without submitit's own variables a job cannot start
    **dict.fromkeys(("output", "error", "open-mode", "chdir", "wrap", "parsable", "test-only", "wait", "job-name", "input"),
                    "the run decides the job's name and output"),
}  # fmt: skip


class LaunchSection(Section):
    kind: Literal["local", "slurm"] = setting("local", "on these machines (local), or as a job (slurm)")
    nproc_per_node: Positive | None = setting(
        None, "processes on each node; null = number of CUDA devices (with launch=slurm: slurm.gpus_per_node), or 1"
    )
    nnodes: int | str = setting(
        1,
        "a number, or MIN:MAX if nodes may leave and join (docs/clusters.md); without Slurm, run the same command on each node",
    )
    max_restarts: Count = setting(
        3, "restarts of the worker group after a failure; a lost node, or a requeue of the job, does not count"
    )
    timeout_s: AboveZero = setting(
        600.0, "of one collective operation, then a message names the rank that hangs; also for enough nodes to join"
    )
    grace_s: AboveZero | None = setting(
        None, "seconds between the signal that asks a run to stop and the signal that kills it; null = not known"
    )
    keep_freed_memory: bool | None = setting(
        None, "the C library keeps freed memory for the next step, the kernel does not get it back; null = on CPUs"
    )
    slurm: SlurmSection | None = setting(None, "null = the default of the site's Slurm")

    def rules(self) -> Iterator[Problem]:
        if not self.node_counts:
            expected = "a number of nodes, or MIN:MAX for a run that nodes may leave and join"
            yield Problem("nnodes", f"{shown(self.nnodes)} is not valid", expected)

    @property
    def node_counts(self) -> range:
        """The allowed numbers of nodes (`nnodes` is a number or MIN:MAX). Empty if `nnodes` is invalid."""
        match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", str(self.nnodes))
        return range(int(match[1]), int(match[2] or match[1]) + 1) if match is not None else range(0)

    @property
    def num_processes(self) -> int:
        """The number of processes on each node."""
        return self.nproc_per_node or 1

    @property
    def most_processes(self) -> int:
        """The number of processes on the largest allowed number of nodes."""
        return self.num_processes * self.node_counts[-1]
