"""The cost of a checkpoint: processor time and memory of a save, the stall of the training, and the pauses of Python.

    python benchmarks/checkpoints.py             everything; also Lightning, with benchmarks/comparison/requirements.txt
    python benchmarks/checkpoints.py saves       a save, beside write() and fsync of the same bytes, and torch.save with fsync
    python benchmarks/checkpoints.py stalls      how long training waits while a thread saves in the background

All sides write the same state (a model and its AdamW moments) to the same disk: into a new file, which is flushed and replaces
the previous file. The sides run in turn, each once per round. Ratios are medians over rounds, with their quartiles.
"Steadfast" is the whole protocol: hashed and flushed shard, manifest, rename, retention.
"""

import argparse
import functools
import importlib.util
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from framework.checkpoint.saver import Saver  # noqa: E402
from framework.checkpoint.store import CheckpointStore  # noqa: E402
from framework.distributed.world import World  # noqa: E402
from framework.runtime.environment import Environment  # noqa: E402

SIZES_MB = (10, 109, 1000)
NUM_LAYERS = 12


def state_of(size_mb: float) -> dict[str, Tensor]:
    """Return a state of this many megabytes: 12 weights, and two moments of each weight."""
    count = int(size_mb * 1e6 / 4 / 3 / NUM_LAYERS)
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {f"{kind}/layer{number}": torch.randn(count) for number in range(NUM_LAYERS) for kind in kinds}


def store_in(folder: Path) -> CheckpointStore:
    world = World.start(Environment.read(), backend="auto", timeout_s=60.0, scratch=None)
    return CheckpointStore(folder / "checkpoints", world=world, keep_last=1, keep_best=0, mode="min")


@contextmanager
def replaced(path: Path) -> Iterator[Any]:
    """Yield a new file, which is flushed and replaces the previous file."""
    with open(path.with_suffix(".new"), "wb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".new"), path)


def write_bytes(tensors: dict[str, Tensor], path: Path) -> None:
    with replaced(path) as file:
        for tensor in tensors.values():
            block = tensor.numpy().data.cast("B")
            while block:
                block = block[file.write(block) :]


def torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    with replaced(path) as file:
        torch.save(tensors, file)


class OfDCP:
    """torch.distributed.checkpoint, in one process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def save(self, tensors: dict[str, Tensor]) -> Any:
        import torch.distributed.checkpoint as dcp

        self._number += 1
        dcp.save(dict(tensors), checkpoint_id=str(self._folder / f"dcp_{self._number % 2}"), no_dist=True)


def quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:5.2f} [{low:.2f}..{high:.2f}]"


def in_turn(sides: dict[str, Callable[[], object]], *, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return each side's processor and wall milliseconds in each round, without the first round, which fills the caches."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(num_rounds + 1):
        for name, work in sides.items():
            cpu, wall = time.process_time(), time.perf_counter()
            work()
            times[name].append((1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)))
    return {name: found[1:] for name, found in times.items()}


def peak_mb(work: Callable[[], object]) -> float:
    """Return by how much the memory of a process grows while it does the work."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        sender.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    process = context.Process(target=run)
    process.start()
    found: float = receiver.recv()
    process.join()
    return found


def sides_of(tensors: dict[str, Tensor], folder: Path) -> dict[str, Callable[[], object]]:
    store, dcp, number = store_in(folder), OfDCP(folder), iter(range(1, 1000))
    return {
        "write() and fsync": functools.partial(write_bytes, tensors, folder / "bytes"),
        "torch.save and fsync": functools.partial(torch_save, tensors, folder / "torch.pt"),
        "torch's DCP": functools.partial(dcp.save, tensors),
        "Steadfast": lambda: store.save(next(number), tensors, {"monitor": None}),
        "Steadfast, verified": lambda: store._verified(next(store.directory.glob("step_*"))),
    }


def report_saves() -> None:
    print(f"torch {torch.__version__}; a save: medians, and the processor time against that of write() and fsync\n")
    print(f"{'state MB':>8}  {'side':22} {'CPU ms':>8} {'wall ms':>8} {'CPU ratio':>20} {'more memory, MB':>16}")
    for size in SIZES_MB:
        with tempfile.TemporaryDirectory(dir=".") as name:
            sides = sides_of(state_of(size), Path(name))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                times = in_turn(sides, num_rounds=9 if size < 500 else 5)
                memory = {name: peak_mb(work) for name, work in sides.items()}
            base = [cpu for cpu, _ in times["write() and fsync"]]
            for side, found in times.items():
                cpus, walls = zip(*found)
                ratios = quartiles([cpu / other for cpu, other in zip(cpus, base)])
                print(f"{size:8}  {side:22} {statistics.median(cpus):8.0f} {statistics.median(walls):8.0f} {ratios:>20} "
                      f"{memory[side]:16.0f}", flush=True)  # fmt: skip


# --- in the background


class Training:
    """Training steps of an MLP with AdamW in this process. A side saves the state between two steps."""

    def __init__(self, size_mb: float) -> None:
        dim = int((size_mb * 1e6 / 4 / 3 / 4) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.randn(16, dim)

    def step(self) -> float:
        """Take a step. Return its seconds."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun

    def tensors(self) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        moments = {f"optimizer/{name}/{key}": value for name, parameter in named.items()
                   for key, value in self.optimizer.state[parameter].items()}  # fmt: skip
        return {f"model/{name}": parameter.detach() for name, parameter in named.items()} | moments


class Beside:
    """A side with a save in the background. Training waits in `begin`; `settle` waits until the state is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None

    def begin(self, tensors: dict[str, Tensor]) -> None:
        self.settle()
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=torch_save, args=(copies, self.folder / "torch.pt"))
        self._thread.start()

    def settle(self) -> None:
        if self._thread is not None:
            self._thread.join()


class Ours(Beside):
    def __init__(self, folder: Path) -> None:
        store, self._step = store_in(folder), 0
        self._saver = Saver(store, world=store.world, is_async=True, max_failures=0, facts={})

    def begin(self, tensors: dict[str, Tensor]) -> None:
        self._step += 1
        self._saver.save(self._step, tensors, {"monitor": None}, flush=lambda: None)

    def settle(self) -> None:
        self._saver.settle()


class OfLightning(Beside):
    def __init__(self, folder: Path) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._is_written = threading.Event()

        class Noted(TorchCheckpointIO):  # the plugin does not report the end of a save
            def save_checkpoint(_, *args: Any, **kwargs: Any) -> None:
                super().save_checkpoint(*args, **kwargs)
                self._is_written.set()

        self._path, self._io = folder / "lightning.ckpt", AsyncCheckpointIO(Noted())
        self._is_written.set()

    def begin(self, tensors: dict[str, Tensor]) -> None:
        self.settle()
        self._is_written.clear()
        self._io.save_checkpoint({"state_dict": dict(tensors)}, str(self._path))

    def settle(self) -> None:
        self._is_written.wait()


def longest_pause_s(training: Training, side: Beside) -> float:
    """Return the longest time in which a thread of Python could not run while the state was written."""
    pauses, is_over = [0.0], threading.Event()

    def look() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    side.begin(training.tensors())
    watcher = threading.Thread(target=look)
    watcher.start()
    side.settle()
    is_over.set()
    watcher.join()
    return max(pauses)


def report_stalls() -> None:
    kinds: dict[str, type[Beside]] = {"a copy, and torch.save in a thread": Beside, "Steadfast": Ours}
    if importlib.util.find_spec("lightning"):
        kinds["Lightning, AsyncCheckpointIO"] = OfLightning
    print(
        "\nbeside the steps: how much later the next step ends (median, quartiles), and how long Python stood still at most\n"
    )
    print(f"{'state MB':>8}  {'side':36} {'a step, ms':>10} {'later by, ms':>26} {'standstill, ms':>15}")
    for size in (10, 109, 460):
        with tempfile.TemporaryDirectory(dir=".") as name:
            training = Training(size)
            sides = {side: kind(Path(name)) for side, kind in kinds.items()}
            later: dict[str, list[float]] = {side: [] for side in sides}
            pauses: dict[str, list[float]] = {side: [] for side in sides}
            alone: list[float] = []
            for number in range(10):
                for side, saver in sides.items():
                    alone += [usual := statistics.median(training.step() for _ in range(5))]
                    begun = time.perf_counter()
                    saver.begin(training.tensors())
                    training.step()
                    later[side] += [1e3 * (time.perf_counter() - begun - usual)] if number else []
                    saver.settle()
                    pauses[side] += [1e3 * longest_pause_s(training, saver)] if number else []
            for side in sides:
                low, middle, high = statistics.quantiles(later[side], n=4)
                print(f"{size:8}  {side:36} {1e3 * statistics.median(alone):10.1f} {f'{middle:.0f} [{low:.0f}..{high:.0f}]':>26} "
                      f"{statistics.median(pauses[side]):15.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["saves", "stalls"])
    asked = parser.parse_args().what
    torch.set_num_threads(1)
    if asked in (None, "saves"):
        report_saves()
    if asked in (None, "stalls"):
        report_stalls()
