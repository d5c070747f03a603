"""Checks of processes, devices and backend: the configuration's needs against the machine."""

import importlib.util
import math
import runpy
from pathlib import Path
from typing import Any

from framework.config.folders import option_of
from framework.config.launch import LaunchSection
from framework.config.schema import BackendSection, Node
from framework.distributed.mesh import MESH_AXES, resolve_axes
from framework.runtime.files import open_files
from framework.runtime.problem import Problem


def with_processes(
    launch: LaunchSection, parallel: Node, device: str, backend: BackendSection, *, world_size: int | None
) -> tuple[LaunchSection, list[Problem]]:
    """Return the section with the number of processes filled in, and the problems with the mesh or the machine.

    `world_size` is the launcher's number of processes; None: this process chooses it.
    """
    asked, problems = launch.nproc_per_node, []
    if world_size is not None:
        launch = launch.model_copy(update={"nproc_per_node": world_size, "nnodes": 1})
        source, start = f"the launcher started {world_size}", "{} processes"
        if launch.kind == "slurm":
            what = f"slurm, but {source} already"
            problems.append(Problem("launch", what, "launch=local, or this command without a launcher"))
        if asked is not None and asked > world_size:
            problems.append(Problem("launch.nproc_per_node", f"{asked}, but {source}", "leave it to the launcher"))
    else:
        if asked is None:  # one process for each of a node's CUDA devices; one on a CPU, or if the strategy has no mesh
            there = _devices_of_node(launch) if backend.device(device) != "cpu" else 0
            fitting = there // devices_of_each(parallel) if axes_of(parallel) else 1
            launch = launch.model_copy(update={"nproc_per_node": max(1, fitting)})
        source, start = f"launch.nproc_per_node gives {launch.num_processes}", "launch.nproc_per_node={}"
    if any(not isinstance(size, (int, type(None))) for size in axes_of(parallel).values()):
        return launch, problems  # the strategy's signature check reports it
    counts, count = launch.node_counts, launch.num_processes
    for num_nodes in sorted({counts[0], counts[-1]}):  # a number between them need not fit: see `fitting_nodes`
        if counts != range(1, 2):
            source = f"{num_nodes} nodes of launch.nproc_per_node={count} give {count * num_nodes}"
            start = "launch.nnodes=1 launch.nproc_per_node={}"
        problems += _mesh_problems(parallel, count=count * num_nodes, source=source, start=start)
    if not problems and world_size is None:
        problems = _device_problems(launch, parallel, on_gpus=backend.device(device) != "cpu")
    return launch, problems


def axes_of(parallel: Node) -> dict[str, Any]:
    """Return the sizes of a strategy's mesh axes by name."""
    return {name: parallel[name] for name in MESH_AXES if name in parallel}


def data_ranks(parallel: Node, count: int) -> int:
    """Return how many of so many processes have other samples: all, or all along the axes that do not cut the model."""
    sizes = resolve_axes(axes_of(parallel), world_size=count)
    return math.prod(sizes[axis] for axis in ("replicate", "shard", "expert") if axis in sizes) if sizes else count


def fitting_nodes(launch: LaunchSection, parallel: Node) -> list[int]:
    """Return the allowed numbers of nodes with processes that fill the mesh."""
    counts = {num_nodes: launch.num_processes * num_nodes for num_nodes in launch.node_counts}
    return [n for n, count in counts.items() if not _mesh_problems(parallel, count=count, source="", start="")]


def _mesh_problems(parallel: Node, *, count: int, source: str, start: str) -> list[Problem]:
    axes = axes_of(parallel)
    if not axes and count != 1:
        what = f"{option_of('parallel', parallel)} is one process, but {source} processes"
        return [Problem("parallel", what, f"try {start.format(1)}, or parallel=ddp, parallel=fsdp")]
    if not axes:
        return []
    product = math.prod(size or 1 for size in axes.values())
    open_axes = [name for name, size in axes.items() if size is None]
    if len(open_axes) > 1:
        return [Problem(f"parallel.{open_axes[-1]}", "null, and another axis is null too", "at most one of them")]
    if product < 1 or (count % product if open_axes else count != product):
        given = [f"parallel.{name}={size}" for name, size in axes.items() if size is not None]
        key, _, value = given[0].partition("=")
        arithmetic = f"{' x '.join(given)} = {product}" if len(given) > 1 else value
        what = f"{arithmetic}, but {source} process{'es' * (count != 1)}"
        if open_axes:
            return [Problem(key, what, f"try {start.format(f'a multiple of {product}')}, or another size")]
        return [Problem(key, what, f"try {start.format(product)}, or null for one axis, which takes the rest")]
    return []


def _devices_of_node(launch: LaunchSection) -> int:
    return _cuda_devices() if launch.slurm is None else launch.slurm.num_gpus or 0


def devices_of_each(parallel: Node) -> int:
    """Return how many devices a process of this strategy uses."""
    num_devices = parallel.get("num_devices")
    return num_devices if isinstance(num_devices, int) and num_devices > 0 else 1


def _cuda_devices() -> int:
    """Return the number of CUDA devices. Importing torch takes seconds, so only a build with CUDA is imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is None:
        return 0
    import torch

    return torch.cuda.device_count()


def device_problems(
    launch: LaunchSection, parallel: Node, device: str, backend: BackendSection, invariance: str
) -> list[Problem]:
    """Refuse a backend that does not fit the device, and a device that is missing: no run uses the CPU without a message."""
    if device == "cpu" and backend.name == "nccl":
        return [Problem("device", "cpu, but backend=nccl is for CUDA", "cuda, or backend=gloo")]
    if device == "cuda" and launch.kind == "local" and not _cuda_devices():
        return [Problem("device", "cuda, but PyTorch sees no CUDA device here", "nvidia-smi shows the driver; or device=auto")]
    if backend.module is not None and backend.name is not None:
        from framework.distributed.other_backend import refusals  # torch, only for an optional backend

        of_run: dict[str, Any] = {"num_processes": launch.most_processes, "only_sums": _only_sums(parallel, invariance)}
        lines = refusals(backend.name, module=backend.module, device=device, **of_run)
        return [Problem.of_line(line) for line in lines]
    if device == "cuda" and backend.name == "gloo" and launch.most_processes > 1 and not _only_sums(parallel, invariance):
        what = "gloo, which can only sum and broadcast CUDA tensors: any other message ends the process"
        return [Problem("backend", what, "auto, device=cpu, or parallel=ddp or zero")]
    return []


def _only_sums(parallel: Node, invariance: str) -> bool:
    """Return whether the processes send only sums and broadcasts: no parts of tensors, and no messages to one process."""
    return set(axes_of(parallel)) <= {"replicate"} and invariance != "bitwise"


def _device_problems(launch: LaunchSection, parallel: Node, *, on_gpus: bool) -> list[Problem]:
    """Refuse more processes or devices than the machine's CUDA devices. A machine without any runs them on the CPU."""
    num_processes, each = launch.num_processes, devices_of_each(parallel)
    num_devices, there = num_processes * each, _devices_of_node(launch) if on_gpus else 0
    if not there or num_devices <= there:
        return []
    what = f"{num_processes} x parallel.num_devices={each} = {num_devices}" if each > 1 else f"{num_processes}"
    remedy = f"at most {there // each}, or device=cpu" if each <= there else f"at most {there} of each"
    if launch.slurm is not None:
        what = f"{what}, but launch.slurm.gpus_per_node={launch.slurm.gpus_per_node}"
        return [Problem("launch.nproc_per_node", what, f"launch.slurm.gpus_per_node={num_devices}, or {remedy}")]
    return [Problem("launch.nproc_per_node", f"{what}, but there are {there} CUDA devices", remedy)]


def open_files_problems(launch: LaunchSection, dataset: Node) -> list[Problem]:
    """Refuse more processes than the limit of open files allows, with their connections and loader workers."""
    num_workers = dataset.get("num_workers")
    on_each = _FILES + _FILES_OF_EACH * (launch.most_processes + (num_workers if isinstance(num_workers, int) else 0))
    allowed = open_files() if launch.kind == "local" else on_each  # a job has its own limits
    if allowed >= on_each:
        return []
    what = f"{launch.num_processes}, but this process can open only {allowed} files, and may need {on_each}"
    return [Problem("launch.nproc_per_node", what, f"ulimit -n {on_each}, or more, before the command")]


_FILES, _FILES_OF_EACH = 48, 8  # open files of a process, and of each process or loader worker that it communicates with

_BACKEND_COMES_WITH = {"nccl": "builds for CUDA", "ucc": "builds from source with USE_UCC=1"}


def backend_problems(backend: BackendSection, launch: LaunchSection) -> list[Problem]:
    """Refuse a backend that the installed torch does not have. Torch is imported only for an optional backend."""
    if backend.module is not None:
        if backend.name not in (None, "auto", "gloo", *_BACKEND_COMES_WITH):
            return []
        what = f"{backend.name or 'null'}, but backend.module={backend.module} is another package"
        return [Problem("backend.name", what, "the name under which the package registers its back end")]
    if backend.name in ("auto", "gloo"):
        return []
    if backend.name not in _BACKEND_COMES_WITH:
        what = f"{backend.name or 'null'} is not one of auto, gloo, nccl and ucc"
        return [Problem("backend.name", what, "of another package: backend=other backend.name=NAME backend.module=PACKAGE")]
    from torch import distributed

    available = {"nccl": distributed.is_nccl_available, "ucc": distributed.is_ucc_available}
    if available[backend.name]():
        is_there = backend.name != "nccl" or launch.kind != "local" or _cuda_devices()
        return [] if is_there else [Problem("backend", "nccl, but PyTorch sees no CUDA device here", "auto, or gloo")]
    what = f"{backend.name} is not in this PyTorch build, but in {_BACKEND_COMES_WITH[backend.name]}"
    return [Problem("backend", what, "gloo, or auto for the best available")]
