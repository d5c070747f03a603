"""The check whether the nodes of a cluster see the folder that a run will write."""

import os
import tempfile
from pathlib import Path
from typing import Any

from framework.runtime import slurm
from framework.runtime.problem import Problem
from framework.runtime.slurm import SlurmFailed

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
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    real = os.path.realpath(path)
    above = [(point, kind) for point, kind in mounts if os.path.commonpath([point, real]) == point]
    return max(above, key=lambda mount: len(mount[0]))[1]
