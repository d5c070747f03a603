"""The cost of the framework compared with a bare PyTorch loop, per step.

    python benchmarks/overhead.py            everything
    python benchmarks/overhead.py steps      only the cost of a step
    python benchmarks/overhead.py ddp        the cost of a step that does almost nothing, under ddp on 2, 4 and 8 processes

Both sides of each ratio are measured in this run, in turn, several times. The medians are compared.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_STEPS = {"cnn": 400, "almost nothing": 3000}
OVERRIDES = {"cnn": ["model=cnn"], "almost nothing": ["model=mlp", "model.num_layers=1", "model.dim=1", "optimizer=sgd"]}
NUM_ROUNDS = 5
WARM_UP = 100


class StepTimes:
    """A sink that records the times of the rows, so that the loop is timed unchanged, from the outside."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}

    def open(self, run: Any) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        if row["split"] == "train":
            self.times[row["step"]] = time.perf_counter()

    def close(self, summary: dict[str, Any]) -> None: ...


def framework_step_s(overrides: list[str], *, num_steps: int) -> float:
    """Return the seconds per step in the framework's own loop, which includes metrics.jsonl and rows every 10 steps."""
    sink, total = StepTimes(), WARM_UP + num_steps
    train_with(sink, overrides, num_steps=total)
    return (sink.times[total - 10] - sink.times[WARM_UP]) / (total - 10 - WARM_UP)


def train_with(sink: Any, overrides: list[str], *, num_steps: int, device: str = "cpu") -> None:
    """Train in this process, without evaluations and checkpoints until the end. `sink` gets the rows too."""
    from framework import compose
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.loggers.sink import RunInfo
    from framework.runtime.environment import Environment

    with tempfile.TemporaryDirectory() as folder:
        overrides = [*overrides, f"run.dir={folder}", f"trainer.max_steps={num_steps}", "trainer.max_epochs=null"]
        config = compose(*overrides, "trainer.eval_every=null", "checkpoint.every=null")
        world = World.start(Environment.read(), backend="auto", timeout_s=60.0, scratch=None, device=device)
        trainer = Builder(config, world=world).trainer()
        trainer.recorder._sinks["times"] = sink  # in addition to the sink of every run, the console
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.recorder.open(RunInfo(Path(folder), "id", "name", 0, num_steps, config.plain()))
            trainer.fit()
            trainer.recorder.close()


def bare_step_s(overrides: list[str], *, num_steps: int, fused: bool) -> float:
    """Return the seconds per step in a handwritten loop: the same model, data, optimizer and rate."""
    import torch
    import torch.nn.functional as F

    from framework import compose
    from framework.build import components

    config = compose(*overrides)
    dataset = components.dataset(config.dataset)
    source: Any = dataset.load("train")
    images, labels = dataset.transform(torch.from_numpy(source.inputs), torch.from_numpy(source.targets), keys=None)
    model = components.model(config.model, seed=config.seed)
    options = {key: value for key, value in config.optimizer.items() if key != "_target_"}
    kind: Any = torch.optim.SGD if "momentum" in options else torch.optim.AdamW
    optimizer = kind(model.parameters(), **options, **({"fused": True} if fused else {}))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WARM_UP + num_steps)
    step, start = 0, 0.0
    while step < WARM_UP + num_steps:
        order = torch.randperm(len(images))
        for first in range(0, len(images), 64):
            samples = order[first : first + 64]
            loss = F.cross_entropy(model(images[samples]), labels[samples])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 10 == 0:
                loss.item()
            if step == WARM_UP:
                start = time.perf_counter()
            if step == WARM_UP + num_steps:
                break
    return (time.perf_counter() - start) / num_steps


def report_steps() -> None:
    import torch

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; seconds are medians of {NUM_ROUNDS} rounds\n")
    print(f"{'model':16} {'bare us':>9} {'bare, fused':>12} {'framework':>10} {'ratio':>7} {'extra us':>9}")
    for name, overrides in OVERRIDES.items():
        rounds: dict[str, list[float]] = {"bare": [], "fused": [], "framework": []}
        for _ in range(NUM_ROUNDS):
            rounds["bare"].append(bare_step_s(overrides, num_steps=NUM_STEPS[name], fused=False))
            rounds["fused"].append(bare_step_s(overrides, num_steps=NUM_STEPS[name], fused=True))
            rounds["framework"].append(framework_step_s(overrides, num_steps=NUM_STEPS[name]))
        bare, fused, ours = (statistics.median(rounds[side]) * 1e6 for side in ("bare", "fused", "framework"))
        print(f"{name:16} {bare:9.0f} {fused:12.0f} {ours:10.0f} {ours / bare:7.3f} {ours - bare:9.1f}")


BARE_DDP = """
import statistics, time
import torch, torch.distributed as dist
import torch.nn.functional as F
from framework import compose
from framework.build import components
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, size = dist.get_rank(), dist.get_world_size()
config = compose(*OVERRIDES)
dataset = components.dataset(config.dataset)
source = dataset.load("train")
images, labels = dataset.transform(torch.from_numpy(source.inputs), torch.from_numpy(source.targets), keys=None)
model = torch.nn.parallel.DistributedDataParallel(components.model(config.model, seed=0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
step, marks = 0, []
while step < STEPS:
    order = torch.randperm(len(images))
    for first in range(0, len(images) - 63, 64):
        samples = order[first : first + 64].chunk(size)[rank]
        loss = F.cross_entropy(model(images[samples]), labels[samples])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step % 10 == 0:
            loss.item()
            marks.append(time.perf_counter())
        if step == STEPS:
            break
if rank == 0:
    spans = [(after - before) / 10 for before, after in zip(marks, marks[1:])]
    print(statistics.median(spans[len(spans) // 2:]))
dist.destroy_process_group()
"""


def bare_ddp_s(overrides: list[str], *, count: int, num_steps: int) -> float:
    """Return the seconds per step in a script with DistributedDataParallel and torchrun: the median of groups of ten."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bare.py")
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nOVERRIDES, STEPS = {overrides}, {num_steps}\n{BARE_DDP}"
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", str(script)]
        for _ in range(3):  # torchrun's store sometimes ends before a process has left it
            done = subprocess.run(torchrun, capture_output=True, text=True)
            if done.stdout:
                return float(done.stdout)
    raise RuntimeError(done.stderr)


def framework_ddp_s(overrides: list[str], *, count: int, num_steps: int) -> float:
    """Return the seconds per step of `python train.py parallel=ddp`, which includes the console and rows every ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        line = [*overrides, "parallel=ddp", f"launch.nproc_per_node={count}", "trainer.max_epochs=null", f"run.dir={folder}/run",
                f"trainer.max_steps={num_steps}", "trainer.eval_every=null", "checkpoint.every=null", "rehearse=false"]  # fmt: skip
        subprocess.run([sys.executable, str(ROOT / "train.py"), *line], capture_output=True, check=True)
        rows = [json.loads(text) for text in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    spans = [row["step_s"] for row in rows if row["split"] == "train"]
    return statistics.median(spans[len(spans) // 2 :])


def report_ddp() -> None:
    print(f"\nunder ddp, almost nothing, us a step; ours / bare: medians of {NUM_ROUNDS} rounds [quartiles]")
    for count in (2, 4, 8):
        kind: dict[str, Any] = {"overrides": OVERRIDES["almost nothing"], "count": count, "num_steps": 600}
        pairs = [(bare_ddp_s(**kind), framework_ddp_s(**kind)) for _ in range(NUM_ROUNDS)]
        bare, ours = (statistics.median(side) * 1e6 for side in zip(*pairs))
        low, middle, high = statistics.quantiles([one / other for other, one in pairs], n=4)
        print(f"{count} processes {bare:9.0f} {ours:9.0f}  {middle:.2f} [{low:.2f}..{high:.2f}]", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["steps", "ddp", "all"], default="all")
    what = parser.parse_args().what
    if what in ("steps", "all"):
        report_steps()
    if what in ("ddp", "all"):
        report_ddp()
