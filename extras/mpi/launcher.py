"""The processes that mpirun has started: each finds its place through MPI, and then continues as under torchrun."""

import os
import socket

from extras.mpi import mpi

# the variables for the rank and the number of processes, and those for the same on this node
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")  # and its derivatives


class Mpirun:
    """A launcher, as docs/extend.md describes it."""

    def started(self) -> bool:
        """Return whether mpirun has started this process as one of several."""
        return bool(self._names())

    def _names(self) -> tuple[str, str, str] | None:
        # Slurm's srun also sets some of MPICH's variables
        is_mpichs = "MPI_LOCALNRANKS" in os.environ or "SLURM_STEP_ID" not in os.environ
        known = [_OPEN_MPI, _MPICH] if is_mpichs else [_OPEN_MPI]
        found = (names for names in known if names[0] in os.environ and int(os.environ.get(names[1], "1")) > 1)
        return next(found, None)

    def join(self) -> list[str]:
        """Set torchrun's variables. Return the reasons why this process cannot meet the others. Collective."""
        names = self._names()
        assert names is not None
        rank, count = (int(os.environ[name]) for name in names[:2])
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": os.environ.get(names[2], "1")}
        if mpi.is_missing():
            what = f"mpirun: started {count} processes, which connect through mpi4py, and mpi4py is not installed"
            return [f"{what} ({mpi.INSTALL}, or torchrun --nproc-per-node={count} train.py ...)"]
        try:
            MPI = mpi.library()
        except RuntimeError as error:
            return [f"mpirun: {error}"]
        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (rank, count):
            what = f"mpirun: started {count} processes, but mpi4py's MPI sees {MPI.COMM_WORLD.size}"
            what += ": mpirun and mpi4py are from different installations"
            return [f"{what} (take both from one: {mpi.INSTALL} brings both)"]
        world, node = mpi.world()
        host = "127.0.0.1" if node.size == world.size else socket.gethostname()
        address, port = world.bcast((host, _free_port(host)) if world.rank == 0 else None)
        os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(node.rank), "LOCAL_WORLD_SIZE": str(node.size)}
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        return []

    def leave(self) -> None:
        """End MPI, on all ranks together."""
        mpi.leave()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
