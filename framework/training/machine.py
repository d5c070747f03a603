"""What the run's processes use of their machines, as columns of the training rows. Definitions: docs/metrics.md."""

import importlib.util
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from framework.distributed.world import World


class Machine:
    """A reader of what a rank and the processes below it (its loaders and loggers) use. Each rank has its own."""

    def __init__(self, directory: Path, *, world: World) -> None:
        self._directory, self._world, self._at = directory, world, _used()

    def columns(self) -> dict[str, float]:
        """Return the columns, over all ranks, since the last call. Collective."""
        device, size, (then, busy_before, _) = self._world.device, self._world.world_size, self._at
        self._at = now, busy, resident = _used()
        own = {"cpu_cores": max(0.0, busy - busy_before) / max(now - then, 1e-9), "resident_gib": resident / 2**30}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            own["gpu_memory_gib"] = (total - free) / 2**30
            if importlib.util.find_spec("pynvml"):
                own["gpu_use"] = torch.cuda.utilization(device) / 100 / size
        sums = self._world.agreement.sum(torch.tensor(list(own.values()), dtype=torch.float64)).tolist()
        return dict(zip(own, sums)) | {"disk_free_gib": shutil.disk_usage(self._directory).free / 2**30}


def _used() -> tuple[float, float, float]:
    """Return the time, the CPU seconds of this process and those below it so far, and their resident bytes."""
    busy = resident = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            busy += sum(process.cpu_times()[:4])  # its own, and of its children that have ended
            resident += process.memory_info().rss
    return time.monotonic(), busy, resident
