"""The devices of a process. All processes of a run must have the same kind of device."""

import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from framework.runtime.environment import LAUNCHER_HAS_CUDA, Environment, variables
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER

NO_MPS = "mps, but PyTorch sees no GPU of Apple's"


def has_mps() -> bool:
    return torch.backends.mps.is_available()


def devices_of(place: Environment, *, device: str, num_devices: int | None) -> list[torch.device]:
    """Return the devices of this process: `num_devices` of them, or all visible devices if it is None. A CPU is one device.

    `device` is cuda, cpu, mps, or auto (CUDA devices if there are any). Raise Unfit if the requested devices do not exist.
    """
    if device == "mps":
        if not has_mps():
            raise Unfit(f"device: {NO_MPS} on {socket.gethostname()} (device=cpu)")
        return [torch.device("mps", 0)]
    there = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if not there:
        if device == "cuda" or (device == "auto" and place.launcher_has_cuda):
            raise Unfit(f"device: {device}, but PyTorch sees no CUDA device on {socket.gethostname()} ({_without_cuda()})")
        if device == "auto" and torch.version.cuda and place.rank == 0:
            LOGGER.warning("training on the CPU: %s (device=cuda refuses to start without a GPU)", _without_cuda())
        return [torch.device("cpu")]
    count = num_devices or there
    first = 0 if there == count else place.local_rank * count  # some launchers show each process only its own devices
    if first + count > there:
        what = (
            f"{place.local_world_size} processes here need {place.local_world_size * count} CUDA devices, and there are {there}"
        )
        raise Unfit(f"launch.nproc_per_node: {what} on {socket.gethostname()} (as many processes as devices, or device=cpu)")
    return [torch.device("cuda", first + index) for index in range(count)]


def _without_cuda() -> str:
    """Return a reason why PyTorch may have no CUDA device."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    return "nvidia-smi shows whether the driver works; CUDA_VISIBLE_DEVICES may hide the devices"


def start_method() -> str:
    """Return how this process must start workers. If it sees CUDA devices, set a variable that informs the workers.

    A forked child cannot use CUDA if its parent has used CUDA. A forked worker on the CPU inherits the imported modules.
    """
    if not torch.cuda.is_available():
        return "fork"
    variables()[LAUNCHER_HAS_CUDA] = "1"
    return "spawn"


def cuda_devices() -> list[str]:
    """Return the CUDA devices that this process sees, as in CUDA_VISIBLE_DEVICES. This does not initialise CUDA."""
    count = torch.cuda.device_count()
    names = [name.strip() for name in variables().get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (names or [str(number) for number in range(count)])[:count]


def record_collectives(folder: Path) -> None:
    """Make NCCL's flight recorder keep the latest collectives. After a time-out, NCCL writes them into `folder`.

    Call this before the first group is made. The user's own settings stay.
    """
    if not torch.cuda.is_available():
        return
    settings = {"FR_BUFFER_SIZE": "2000", "FR_DUMP_TEMP_FILE": f"{folder}/nccl_collectives_rank_", "NCCL_DUMP_ON_TIMEOUT": "1"}
    for name, value in settings.items():
        variables().setdefault(f"TORCH_{name}", value)


def require_one_kind(kind: str, store: dist.Store, *, world_size: int, timeout: timedelta) -> None:
    """Raise Unfit, on every rank, if some ranks have CUDA devices and others a CPU: their groups would block each other.

    Collective.
    """
    store.add(f"devices/{kind}", 1)
    if store.add("devices/all", 1) == world_size:
        store.set("devices/known", "")
    store.wait(["devices/known"], timeout)
    counts = {name: store.add(f"devices/{name}", 0) for name in ("cuda", "cpu")}
    if all(counts.values()):
        mine = f"this process, on {socket.gethostname()}, computes on {kind.replace('cuda', 'CUDA').replace('cpu', 'the CPU')}"
        seen = f"{counts['cuda']} of {world_size} processes see CUDA devices"
        raise Unfit(f"device: auto, but {seen}; {mine} (device=cuda or device=cpu)")
