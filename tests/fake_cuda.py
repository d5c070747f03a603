"""CUDA in a process on a machine that has none: `cuda:0` to `cuda:7`, with the CPU's numbers and CUDA's rules.

What the host waits for is counted, with the line that waits; a copy from pageable memory is such a wait. A tensor that one
stream has written, and another uses without waiting for it, is a race; what was copied into pinned memory is there only when
it was waited for. Below Python, tests/fake_cuda.cpp answers.

`call(function, ...)` runs a function of a module in a process of its own, since torch finds its devices when it is imported:

    python -m tests.fake_cuda LIBRARY module function ARGUMENTS RESULT     (both in JSON; RESULT is a file)
"""

import collections
import ctypes
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_DEVICES = 8
_OURS = (f"{ROOT}/framework", f"{ROOT}/models")

# --- in the test's process


@functools.cache
def _library(kind: str) -> Path:
    import torch

    folder, source = Path(tempfile.mkdtemp(prefix="fake_cuda_")), ROOT / "tests" / "fake_cuda.cpp"
    torch_folder = Path(torch.__file__).parent
    library = folder / "fake_cuda.so"
    links = [f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    flags = [
        *([] if kind == "CUDA" else [f"-DKIND={kind}"]),
        "-shared",
        "-fPIC",
        "-O0",
        "-w",
        "-std=c++20",
        f"-I{torch_folder}/include",
    ]
    subprocess.run(["g++", *flags, "-o", str(library), str(source), *links], check=True)
    return library


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a module's function returns in a process that has the devices; arguments and result are plain."""
    return _call(function, [arguments])[0]


def call_mps(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return the same in a process that has `mps:0` instead (tests/fake_mps.py)."""
    return _call(function, [arguments], kind="MPS")[0]


def call_ranks(function: Callable[..., Any], num_ranks: int, **arguments: Any) -> list[Any]:
    """Return what it returns in each of several such processes, by rank; it is given `rank`, `num_ranks` and a `folder`."""
    with tempfile.TemporaryDirectory() as folder:
        shared = arguments | {"num_ranks": num_ranks, "folder": folder}
        return _call(function, [shared | {"rank": rank} for rank in range(num_ranks)])


def _call(function: Callable[..., Any], of_each: list[dict[str, Any]], *, kind: str = "CUDA") -> list[Any]:
    name = [str(_library(kind)), function.__module__, function.__name__]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.json" for rank in range(len(of_each))]
        lines = [
            [sys.executable, "-m", f"tests.fake_{kind.lower()}", *name, json.dumps(arguments), str(result)]
            for arguments, result in zip(of_each, results)
        ]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [subprocess.Popen(line, cwd=ROOT, **pipes) for line in lines]
        told = [process.communicate()[0] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(told)
        return [json.loads(result.read_text()) for result in results]


# --- in its own process: streams and events

WAITS: collections.Counter[str] = collections.Counter()  # of the host, by what it waited for, and where
BYTES: collections.Counter[str] = collections.Counter()  # by direction
RACES: list[str] = []


class Stream:
    """Runs what is launched on it in order: here at once, but other streams see that only after they have waited."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        import torch

        self.device = torch.device(device if device is not None else "cuda:0")
        self.clock = 0  # operations launched
        self.seen: dict[Stream, int] = {}  # of other streams
        self.copies: list[tuple[Any, Any]] = []  # into pinned memory, not yet waited for: the memory, and what it will hold

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        for stream, clock in event.seen.items():
            self.seen[stream] = max(clock, self.seen.get(stream, 0))

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def sees(self, stream: "Stream", clock: int) -> bool:
        return stream is self or self.seen.get(stream, 0) >= clock

    def synchronize(self) -> None:
        waited("synchronize")
        self.finish()

    def finish(self) -> None:
        self.deliver()
        for event in EVENTS:
            event.is_done |= event.stream is self

    def deliver(self, into: Any = None) -> None:
        """Let what was copied be there: all of it, or what was copied into this pinned tensor, which the stream itself reads."""
        due = [copy for copy in self.copies if into is None or copy[0].data_ptr() == into.data_ptr()]
        self.copies = [copy for copy in self.copies if not any(copy is one for one in due)]
        for final, stored in due:
            final.copy_(stored)

    def query(self) -> bool:
        return not self.copies


class Event:
    """A moment of a stream; it is done when something has waited for it, or for a later one of its stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.stream: Stream | None = None
        self.seen: dict[Stream, int] = {}
        self.is_done = False
        EVENTS.add(self)

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.seen = self.stream.seen | {self.stream: self.stream.clock}
        self.is_done = False

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        waited("event")
        if self.stream is not None:
            self.stream.finish()

    def elapsed_time(self, other: "Event") -> float:
        if not (self.is_done and other.is_done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1.0


EVENTS: weakref.WeakSet[Event] = weakref.WeakSet()
_CURRENT: dict[int, Stream] = {}


def current_stream(device: Any = None) -> Stream:
    import torch

    index = torch.device(device if device is not None else "cuda:0").index or 0
    return _CURRENT.setdefault(index, Stream(f"cuda:{index}"))


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    index = stream.device.index or 0
    before, _CURRENT[index] = current_stream(stream.device), stream
    yield
    _CURRENT[index] = before


def waited(what: str) -> None:
    """Note that the host waits, and the line of the framework that makes it wait."""
    WAITS[f"{what} at {_line()}"] += 1


def _line() -> str:
    frame = sys._getframe(1)
    while not frame.f_code.co_filename.startswith(_OURS):
        if frame.f_back is None:
            return "?"
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"


class Trace:
    """Where a tensor was written last, which streams have used it, and which the allocator knows of."""

    def __init__(self, tensor: Any) -> None:
        self.made_on = current_stream(tensor.device)
        self.written: tuple[Stream, int] = self.made_on, self.made_on.clock
        self.used: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()
        self.line = _line()

    def __del__(self) -> None:  # the tensor is freed: a weak reference would keep a module from swapping it
        for stream, clock in self.used.items():
            if stream not in self.recorded and not self.made_on.sees(stream, clock):
                RACES.append(f"a tensor of {self.line} is freed while another stream uses it (record_stream)")


_TRACES: "weakref.WeakValueDictionary[int, Trace]" = weakref.WeakValueDictionary()  # by memory, which views share


def _trace(tensor: Any) -> Trace:
    if getattr(tensor, "history", None) is None:
        memory = tensor.stored.untyped_storage()._cdata
        tensor.history = _TRACES.get(memory) or _TRACES.setdefault(memory, Trace(tensor))
    found: Trace = tensor.history
    return found


def _use(taken: list[Any], given: list[Any]) -> None:
    """Check that what an operation takes is there, and note what it writes."""
    for tensor in taken:
        trace, stream = _trace(tensor), current_stream(tensor.device)
        if not stream.sees(*trace.written):
            RACES.append(f"{_line()} uses a tensor that another stream writes at {trace.line}")
        trace.used[stream] = stream.clock + 1
    for stream in {current_stream(tensor.device) for tensor in (*taken, *given)}:
        stream.clock += 1
    for tensor in given:
        stream = current_stream(tensor.device)
        _trace(tensor).written = stream, stream.clock


_WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "is_nonzero")


def _answer(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Count what waits; copy into pinned memory later."""
    from tests.emulated_tensors import Emulated

    name = operation.name().removeprefix("aten::").partition(".")[0]
    if name in _WAITING:
        waited(name.strip("_"))
        current_stream(args[0].device).finish()
    if name not in ("copy_", "_to_copy"):
        return NotImplemented
    target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
    is_to_cpu = isinstance(source, Emulated) and (
        not isinstance(target, Emulated) if name == "copy_" else str(kwargs.get("device", "")).startswith("cpu")
    )
    if isinstance(target, Emulated) and not isinstance(source, Emulated):
        BYTES["to the device"] += source.nbytes
        if not source.is_pinned():
            waited("a copy from pageable memory")
        else:
            current_stream(target.device).deliver(into=source)
    if not is_to_cpu:
        return NotImplemented
    BYTES["from the device"] += source.nbytes
    is_async = kwargs.get("non_blocking", False) or len(args) > 2 and args[2]
    _use([source], [])
    if not is_async or (target is not None and not target.is_pinned()):
        waited("a copy from the device")
        current_stream(source.device).finish()
        return NotImplemented
    if target is None:
        import torch

        target = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, pin_memory=True)
    stored, final = source.stored.detach().clone(), target.detach()
    final.fill_(float("nan") if final.is_floating_point() else 99)  # what is read too early is wrong
    current_stream(source.device).copies.append((final, stored))
    return target


def _tolist(tensor: Any) -> Any:
    waited("a copy from the device")
    current_stream(tensor.device).finish()
    return tensor.stored.tolist()


def plant() -> None:
    """Give this process the devices. Before anything has made a tensor."""
    import torch

    from tests import emulated_tensors

    torch._C._set_multithreading_enabled(False)  # autograd would want a thread of its own for each device
    emulated_tensors.emulate("CUDA")
    emulated_tensors.INSTEAD.append(_answer)
    emulated_tensors.AFTER.append(_use)
    emulated_tensors.Emulated.record_stream = lambda tensor, stream: _trace(tensor).recorded.add(stream)
    emulated_tensors.Emulated.tolist = _tolist
    plain_tensor = torch.tensor
    torch.tensor = lambda *args, device=None, **kwargs: plain_tensor(*args, **kwargs).to(device or "cpu")
    current = [0]
    properties = SimpleNamespace(
        total_memory=80 * 2**30, name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132
    )
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "set_device": lambda device: current.__setitem__(0, torch.device(device).index or 0),
        "current_device": lambda: current[0],
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "default_generators": [torch.Generator() for _ in range(NUM_DEVICES)],
        "synchronize": lambda device=None: current_stream(device).synchronize(),
        "current_stream": current_stream,
        "default_stream": lambda device=None: current_stream(device),
        "stream": on_stream,
        "Stream": Stream,
        "Event": Event,
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)


def prepare_framework() -> None:
    """Let a command find the devices, and runs of several processes talk over gloo, in NCCL's place."""
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    from framework.distributed.groups import Groups
    from framework.preflight import processes
    from tests.emulated_tensors import GlooForEmulated

    processes._cuda_devices = lambda: NUM_DEVICES
    _fsdp_param.alloc_storage = _fsdp_param.free_storage = lambda tensor: None  # the memory is another tensor's

    dist.Backend.register_backend("fake_nccl", GlooForEmulated, devices=["cuda"])
    join = Groups.join

    def fake_join(groups: Groups, store: dist.Store) -> None:
        groups.backend, groups.device = groups.backend.replace("cuda:nccl", "cuda:fake_nccl"), None  # which nothing can split
        join(groups, store)

    Groups.join = fake_join


def main(library: str, module: str, function: str, arguments: str, result: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # before torch, which looks once
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plant()
    prepare_framework()
    found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    from tests.fake_cuda import main as of_the_module  # its counters must be those that others import

    of_the_module(*sys.argv[1:])
