"""The bytes per model parameter that each process holds under each strategy, compared with the arithmetic.

    python benchmarks/memory.py
    python benchmarks/memory.py peak
    python benchmarks/memory.py large

The bytes are measured at the end of an optimizer step of AdamW in float32: the storages of all living tensors of the process.
These are the parameters, their gradients, the optimizer's state, and the batch, which is small here.

`peak`: the most memory that a process takes from the machine while it builds, resumes, trains, saves and writes the final
weights, in addition to its memory before it built. The arithmetic excludes activations and the memory that the allocator
keeps.

`large`: the time and memory of a model that is built without its numbers, as under fsdp, tensor and pipelines.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=8", "dataset.num_train=16",
         "dataset.num_val=1", "dataset.num_test=1", "model=gpt", "model.dim=256", "model.num_layers=6",
         "global_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=2", "trainer.eval_every=null"]  # fmt: skip
STRATEGIES = {  # name, overrides, and bytes for the parameter, the gradient and the two moments of AdamW
    "single": (["parallel=single"], 4 + 4 + 8),
    "ddp, 2": (["parallel=ddp", "launch.nproc_per_node=2"], 4 + 4 + 8),
    "ddp, 4": (["parallel=ddp", "launch.nproc_per_node=4"], 4 + 4 + 8),
    "zero, 2": (["parallel=zero", "launch.nproc_per_node=2"], 4 + 4 + 8 / 2),
    "zero, 4": (["parallel=zero", "launch.nproc_per_node=4"], 4 + 4 + 8 / 4),
    "fsdp, 2": (["parallel=fsdp", "launch.nproc_per_node=2"], (4 + 4 + 8) / 2),
    "fsdp, 4": (["parallel=fsdp", "launch.nproc_per_node=4"], (4 + 4 + 8) / 4),
    "hsdp, 2 x 2": (["parallel=hsdp", "parallel.shard=2", "launch.nproc_per_node=4"], (4 + 4 + 8) / 2),
    "tensor, 2": (["parallel=tensor", "launch.nproc_per_node=2"], (4 + 4 + 8) / 2),
    "fsdp+tp, 2 x 2": (["parallel=fsdp+tp", "launch.nproc_per_node=4"], (4 + 4 + 8) / 4),
    "pipeline, 2": (["parallel=pipeline", "micro_batch_size=1", "launch.nproc_per_node=2"], (4 + 4 + 8) / 2),
}

RUN = """
import sys
sys.path[:0] = [ROOT, ROOT + "/benchmarks"]
from memory import note_after_second_step
from framework.cli.run import start
note_after_second_step(FOLDER)
sys.exit(start(OVERRIDES))
"""


def note_after_second_step(folder: str) -> None:
    """Make every process record its bytes at the end of the second step."""
    from framework.training.loop import Trainer

    original = Trainer.train_step

    def train_step(trainer, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = original(trainer, *args, **kwargs)
        if trainer.progress.step == 2:
            Path(folder, f"{trainer.world.rank}.json").write_text(json.dumps(living_bytes()))
        return result

    Trainer.train_step = train_step  # type: ignore[method-assign, assignment]


def living_bytes() -> int:
    """Return the bytes of the storages of all tensors that Python can see. Each storage counts once."""
    import torch

    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            tensors = [item, item.grad] if item.is_leaf else [item]
            for tensor in tensors:
                if tensor is not None:
                    local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


PEAK_MODEL = ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=8", "dataset.num_train=16",
              "dataset.num_val=1", "dataset.num_test=1", "dataset.vocab_size=8192", "model=gpt", "model.dim=1024", "model.num_layers=8",
              "model.num_heads=8", "global_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.eval_every=null",
              "checkpoint.every=2", "rehearse=false"]  # fmt: skip
PEAKS = {  # overrides, and the number of processes that share a parameter, its gradient and its moments
    "single": (["parallel=single"], 1),
    "ddp, 2": (["parallel=ddp", "launch.nproc_per_node=2"], 1),
    "fsdp, 2": (["parallel=fsdp", "launch.nproc_per_node=2"], 2),
    "fsdp, 4": (["parallel=fsdp", "launch.nproc_per_node=4"], 4),
    "tensor, 2": (["parallel=tensor", "launch.nproc_per_node=2"], 2),
    "pipeline, 2": (["parallel=pipeline", "micro_batch_size=1", "launch.nproc_per_node=2"], 2),
}
# freed memory must return immediately, or this would measure the allocator
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PHASES = ("build", "resume", "train", "save", "results")

PEAK_RUN = RUN.replace("note_after_second_step", "note_peaks")


def note_peaks(folder: str) -> None:
    """Make every process record, for each phase, the most memory that it has taken since before the build."""
    from framework.build.training import Builder
    from framework.checkpoint.saver import Saver
    from framework.modes import train as mode
    from framework.training.loop import Trainer

    peaks: dict[str, int] = {}
    before: list[int] = []

    def watched(holder: object, name: str, phase: str) -> None:
        original = getattr(holder, name)

        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            gc.collect()
            before.append(own_memory())
            seen, is_over = [own_memory()], threading.Event()

            def look() -> None:
                while not is_over.wait(0.001):
                    seen.append(own_memory())

            looking = threading.Thread(target=look)
            looking.start()
            try:
                return original(*args, **kwargs)
            finally:
                is_over.set()
                looking.join()
                peaks[phase] = max(peaks.get(phase, 0), max(seen) - before[0])
                Path(folder, f"{os.getpid()}.json").write_text(json.dumps(peaks))

        setattr(holder, name, run)

    for holder, name, phase in [(Builder, "trainer", "build"), (mode, "_continue", "resume"), (Trainer, "train_step", "train"),
                                (Saver, "save", "save"), (mode, "_leave_results", "results")]:  # fmt: skip
        watched(holder, name, phase)


def own_memory() -> int:
    """Return the bytes of this process's memory, without pages of files, which the machine can take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def peaks_of(overrides: list[str]) -> tuple[int, dict[str, int]]:
    """Return the bytes of the whole model, and the maximum of any rank in each phase, for a run that resumes another run.

    `build elsewhere`: the minimum of a rank. Rank 0 builds the numbers of the whole model, and sends the others their parts.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*PEAK_MODEL, *overrides, f"run.root={folder}/runs"]
        for more in (["trainer.max_steps=2", "name=first"], ["name=second"]):
            (notes := Path(folder, "notes")).mkdir(exist_ok=True)
            begin = next(iter(Path(folder).glob("runs/first/*")), None)
            resume = [] if begin is None else [f"run.resume={begin}"]
            values = {"ROOT": str(ROOT), "FOLDER": str(notes), "OVERRIDES": [*command, *more, *resume]}
            header = "".join(f"{key} = {value!r}\n" for key, value in values.items())
            subprocess.run([sys.executable, "-c", header + PEAK_RUN], capture_output=True, check=True, env=ENVIRONMENT)
        ranks = [json.loads(path.read_text()) for path in notes.glob("*.json")]
        (summary,) = Path(folder).glob("runs/second/*/summary.json")
        num_bytes = json.loads(summary.read_text())["parameters"] * 4
    elsewhere = {"build elsewhere": min(rank["build"] for rank in ranks)}
    return num_bytes, {phase: max(rank.get(phase, 0) for rank in ranks) for phase in PHASES} | elsewhere


def print_peaks() -> None:
    print(f"{'strategy':12} {'most of any rank, MB':>22}" + "".join(f" {phase:>9}" for phase in PHASES))
    for name, (overrides, share) in PEAKS.items():
        whole, peaks = peaks_of(overrides)
        # DDP's constructor sends the weights from a copy; a save keeps its copy of weights and moments for the next save
        weights, state = whole / share, 4 * whole / share
        sent = weights if name.startswith("ddp") else 0
        arithmetic = {"build": weights + sent, "resume": 3 * weights, "train": state, "save": state + 3 * weights,
                      "results": state + 3 * weights}  # fmt: skip
        print(f"{name:12} {'measured':>22}" + "".join(f" {peaks[phase] / 1e6:9.0f}" for phase in PHASES))
        print(f"{'':12} {'arithmetic':>22}" + "".join(f" {arithmetic[phase] / 1e6:9.0f}" for phase in PHASES), flush=True)


def print_large() -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    from framework.parallel.first_weights import build
    from models.gpt import GPT

    before, start = own_memory(), time.perf_counter()
    torch.manual_seed(0)
    model = build(lambda: GPT(vocab_size=128256, seq_len=8192, dim=8192, num_layers=80, num_heads=64), on_meta=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e9:.1f} billion parameters: {time.perf_counter() - start:.1f} s, {(own_memory() - before) / 1e6:.0f} MB")


def measure(overrides: list[str]) -> tuple[int, list[int]]:
    """Return the number of parameters, and the bytes of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"ROOT": str(ROOT), "FOLDER": folder, "OVERRIDES": [*MODEL, *overrides, f"run.root={folder}/runs"]}
        header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        subprocess.run([sys.executable, "-c", header + RUN], capture_output=True, check=True)
        (summary,) = Path(folder).glob("runs/*/*/summary.json")
        ranks = sorted(Path(folder).glob("*.json"))
        return json.loads(summary.read_text())["parameters"], [json.loads(path.read_text()) for path in ranks]


def main() -> None:
    print(f"{'strategy':16} {'bytes per parameter, each rank':36} {'mean':>6} {'arithmetic':>11} {'ratio':>6}")
    for name, (overrides, expected) in STRATEGIES.items():
        num_parameters, ranks = measure(overrides)
        each = [size / num_parameters for size in ranks]
        mean = sum(each) / len(each)
        shown = "  ".join(f"{size:.2f}" for size in each)
        print(f"{name:16} {shown:36} {mean:6.2f} {expected:11.2f} {mean / expected:6.3f}", flush=True)


if __name__ == "__main__":
    {"peak": print_peaks, "large": print_large}.get(sys.argv[-1], main)()
