"""The growth of a run's costs with the number of processes, samples, parameters, rows and runs.

    python benchmarks/growth.py [PICTURE.png]

Processes: 1 to 8 processes on this machine's cores. Ranks: up to 1,024 ranks, simulated in one process with torch's fake
process group, for the computations that each rank does alone. Parameters: up to 10^9 on the "meta" device, where only the
bookkeeping costs. Each figure is a median.
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import order, records
from framework.checkpoint.chunks import WritePlan
from framework.cli.run import checked_line, start
from framework.data.order import parts
from framework.modules.summary import summary
from framework.optim.optimizers import hidden_matrices, param_groups, trainable
from framework.runs.history import read_history
from framework.runs.metrics_file import MetricsFile
from models.gpt import GPT

ROOT = Path(__file__).resolve().parent.parent
NUM_ROUNDS = 3
Figures = dict[str, float]  # by the measured quantity


def seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(NUM_ROUNDS):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def of_command(count: int) -> Figures:
    """Measure a command with this many processes: the default model under ddp, 16 samples in each process."""
    with tempfile.TemporaryDirectory() as folder:
        line = [f"run.dir={folder}/run", "trainer.max_epochs=null", "trainer.max_steps=60", f"global_batch_size={16 * count}",
                "checkpoint.every=20", "trainer.eval_every=null", "rehearse=false"]  # fmt: skip
        line += ["parallel=ddp", f"launch.nproc_per_node={count}"] if count > 1 else []
        begun = time.perf_counter()
        subprocess.run([sys.executable, str(ROOT / "train.py"), *line], capture_output=True, check=True)
        whole_s = time.perf_counter() - begun
        rows = [json.loads(text) for text in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "train"][2:]
    step_s = statistics.median(row["step_s"] for row in rows)
    return {
        "a step, ms": 1e3 * step_s,
        "the same by processes a core, ms": 1e3 * step_s / max(1, count / len(os.sched_getaffinity(0))),
        "start and end, s": whole_s - 60 * step_s,
        "memory of a process, MiB": 1024 * max(row["memory_gib"] for row in rows),
        "a save keeps the steps waiting, ms": statistics.median(1e4 * r["checkpoint_s"] for r in rows if r["step"] % 20 == 10),
    }


def of_processes(count: int) -> Figures:
    rounds = [of_command(count) for _ in range(NUM_ROUNDS)]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def plan_of_save(tensors: Mapping[str, torch.Tensor], count: int) -> None:
    """Plan a save on rank 0 of many ranks; the other ranks have the same, or the other parts of the same. Nothing is sent."""
    agreement = SimpleNamespace(
        distinct=lambda value: {0: value},
        sum=lambda counts: counts * count,
        scatter_plan=lambda holding, deal: deal([holding] * count)[0],
    )
    WritePlan(SimpleNamespace(agreement=agreement)).mine(tensors)  # type: ignore[arg-type]  # all that it uses of a world


def of_ranks(count: int) -> Figures:
    """Measure the work that each of many ranks does alone: meshes, its part of a batch, the plan of a save, the preflight."""
    nodes = [f"launch.nnodes={count // 8}", "launch.nproc_per_node=8"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    mesh, part = init_device_mesh("cpu", (count,)), torch.empty(1, 1024, device="meta")
    cut = {f"layers.{index}.weight": DTensor.from_local(part, mesh, [Shard(0)]) for index in range(300)}
    whole = {name: torch.empty(1024, 1024, device="meta") for name in cut}
    found = {
        "mesh of one axis, ms": seconds(lambda: init_device_mesh("cpu", (count,), mesh_dim_names=("replicate",))),
        "mesh of two axes, ms": seconds(
            lambda: init_device_mesh("cpu", (count // 8, 8), mesh_dim_names=("replicate", "shard"))
        ),
        "its part of a batch, ms": seconds(lambda: parts(16 * count, micro_batch_size=4, dp_rank=count - 1, dp_size=count)),
        "plan of a save, 300 tensors that all have, ms": seconds(lambda: plan_of_save(whole, count)),
        "plan of a save, 300 tensors that are cut, ms": seconds(lambda: plan_of_save(cut, count)),
        "check of the command line, ms": seconds(lambda: checked_line(["parallel=ddp", *nodes, f"global_batch_size={count}"])),
    }
    dist.destroy_process_group()
    return {name: 1e3 * figure for name, figure in found.items()}


def of_samples(count: int) -> Figures:
    first = partial(order.first_batch, count)
    return {"first batch, ms": order.median_ms(first), "memory, MiB": order.peak_mib(first)}


def of_parameters(dim: int, num_layers: int) -> tuple[int, Figures]:
    """Measure, on "meta", the costs of parameters besides their numbers: names, rules, and the plan of a save."""
    with torch.device("meta"):
        model = GPT(vocab_size=8000, seq_len=128, dim=dim, num_layers=num_layers, num_heads=4)
    held = dict(model.named_parameters())
    found = {
        "parameter groups, ms": seconds(lambda: param_groups(trainable(model, hidden=hidden_matrices(model)), [])),
        "plan of a save on 8 ranks, ms": seconds(lambda: plan_of_save(held, 8)),
        "summary, ms": seconds(lambda: summary(model, example=None)),
    }
    return sum(parameter.numel() for parameter in held.values()), {name: 1e3 * figure for name, figure in found.items()}


def of_rows(count: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        mark = records.make(path, count)
        resume_s = seconds(lambda: MetricsFile(path, step=count, mark=mark))
        curves_s = seconds(lambda: read_history(path, monitor="val/loss", mode="min", most=5000, aside=()))
        return {"a resume, ms": 1e3 * resume_s, "rows for the curves, ms": 1e3 * curves_s}


def of_runs(count: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "default", "run_0")
        short = ["trainer.max_epochs=null", "trainer.max_steps=20", "rehearse=false"]
        line = [sys.executable, str(ROOT / "train.py"), f"run.dir={first}", *short]
        subprocess.run(line, capture_output=True, check=True)
        for index in range(1, count):
            copy = first.with_name(f"run_{index}")
            copy.mkdir()
            for name in ("config.yaml", "metrics.jsonl", "provenance.json", "summary.json"):
                (copy / name).write_bytes((first / name).read_bytes())
        with contextlib.redirect_stdout(io.StringIO()):
            return {"mode=status, s": seconds(lambda: start(["mode=status", f"run.root={folder}"]))}


def along(sizes: Iterable[int], measure: Callable[[int], Figures]) -> list[tuple[int, Figures]]:
    return [(size, measure(size)) for size in sizes]


GROWTH: dict[str, Callable[[], list[tuple[int, Figures]]]] = {
    "processes": lambda: along((1, 2, 4, 8), of_processes),
    "ranks": lambda: along((8, 64, 512, 1024), of_ranks),
    "samples": lambda: along((10**power for power in range(3, 10)), of_samples),
    "parameters": lambda: [of_parameters(*sizes) for sizes in ((64, 2), (128, 4), (512, 4), (1024, 8), (2048, 20))],
    "rows": lambda: along((10**3, 10**4, 10**5, 10**6), of_rows),
    "runs": lambda: along((1, 10, 100, 1000), of_runs),
}


def draw(found: dict[str, list[tuple[int, Figures]]], picture: Path) -> None:
    figure = Figure(figsize=(15, 8), layout="constrained")
    for number, (kind, measured) in enumerate(found.items(), 1):
        axes = figure.add_subplot(2, 3, number)
        for name in measured[0][1]:
            axes.plot([size for size, _ in measured], [figures[name] for _, figures in measured], marker="o", label=name)
        axes.set(xlabel=kind, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(picture, dpi=100)


def main() -> None:
    found = {}
    for kind, measure in GROWTH.items():
        found[kind] = measured = measure()
        print(f"\n| {kind} | " + " | ".join(f"{size:,}" for size, _ in measured) + " |\n| --- |" + " --- |" * len(measured))
        for name in measured[0][1]:
            print(f"| {name} | " + " | ".join(f"{figures[name]:.3g}" for _, figures in measured) + " |", flush=True)
    if len(sys.argv) > 1:
        draw(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
