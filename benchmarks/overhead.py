"""What the framework costs over a bare PyTorch loop: per step, and from the command to the first step.

    python benchmarks/overhead.py            both, on this machine
    python benchmarks/overhead.py steps      only the cost of a step
    python benchmarks/overhead.py start      only the cost of starting

Both sides of each ratio are measured in this run, in turn, several times; the medians are compared.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_STEPS = {"cnn": 400, "almost nothing": 3000}
OVERRIDES = {"cnn": ["model=cnn"], "almost nothing": ["model=mlp", "model.num_layers=1", "model.dim=1", "optimizer=sgd"]}
NUM_ROUNDS = 5
WARM_UP = 100


class StepTimes:
    """A sink that notes when rows come: the loop is timed as it is, from the outside."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}

    def open(self, run: Any) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        if row["split"] == "train":
            self.times[row["step"]] = time.perf_counter()

    def close(self, summary: dict[str, Any]) -> None: ...


def framework_step_s(overrides: list[str], *, num_steps: int) -> float:
    """Return the seconds a step takes in the framework's own loop: metrics.jsonl, rows every 10 steps and all."""
    from framework import compose
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.loggers.sink import RunInfo
    from framework.runtime.environment import Environment

    with tempfile.TemporaryDirectory() as folder:
        total = WARM_UP + num_steps
        overrides = [*overrides, f"run.dir={folder}", f"trainer.max_steps={total}", "trainer.max_epochs=null"]
        config = compose(*overrides, "trainer.eval_every=null", "checkpoint.every=null")
        world = World.start(Environment.read(), backend="auto", timeout_s=60.0, scratch=None)
        trainer = Builder(config, world=world).trainer()
        sink = StepTimes()
        trainer.recorder._sinks = {"times": sink}
        trainer.recorder.open(RunInfo(Path(folder), "id", "name", 0, total, config.plain()))
        trainer.fit()
        trainer.recorder.close()
    return (sink.times[total - 10] - sink.times[WARM_UP]) / (total - 10 - WARM_UP)


def bare_step_s(overrides: list[str], *, num_steps: int, fused: bool) -> float:
    """Return the seconds a step takes in the loop that one writes by hand: the same model, data, optimizer and rate."""
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


BARE_FIRST_STEP = """
import time
import torch
imported = time.time()
import torch.nn.functional as F
torch.manual_seed(0)
def layer(i, o, stride): return torch.nn.Sequential(torch.nn.Conv2d(i, o, 3, stride, 1), torch.nn.GroupNorm(8, o), torch.nn.ReLU())
model = torch.nn.Sequential(layer(1, 32, 1), layer(32, 32, 2), layer(32, 64, 1), layer(64, 64, 1),
                            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
images, labels = torch.rand(1258, 1, 8, 8), torch.randint(10, (1258,))
F.cross_entropy(model(images[:64]), labels[:64]).backward()
optimizer.step()
print(imported, time.time())
"""

FRAMEWORK_FIRST_STEP = """
import os, sys, time
PARENT = os.getpid()
marks = [("interpreter", time.time())]
sys.path.insert(0, ROOT)
from framework.cli import run
marks.append(("import hydra, pydantic, numpy", time.time()))
def mark_after(owner, attribute, name):
    original = getattr(owner, attribute)
    def call(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            marks.append((name, time.time()))
    setattr(owner, attribute, call)
mark_after(run, "compose_line", "compose")
def import_torch(composed, world_size):
    import torch
    marks.append(("import torch", time.time()))
    return check(composed, world_size=world_size)
def check_components(composed, world_size):
    try:
        return import_torch(composed, world_size)
    finally:
        marks.append(("components checked", time.time()))
        import_rest()
def import_rest():
    import framework.modes.train
    from framework.preflight import child
    from framework.build.training import Builder
    from framework.preflight import rehearsal
    from framework.training.trainer import Trainer
    mark_after(child, "problems_in_child", "model and optimizer checked, in a process of its own")
    mark_after(rehearsal, "rehearse", "rehearsal")
    mark_after(Builder, "trainer", "data, model, optimizer")
    original = Trainer.train_step
    def first_step(*args, **kwargs):  # in a forked worker: its marks would be lost
        original(*args, **kwargs)
        with open(FOLDER + "/marks", "a") as file:
            print(*(f"{name}={when}" for name, when in [*marks, ("first step", time.time())]), sep=chr(10), file=file)
        os._exit(0) if os.environ.get("WORLD_SIZE", "1") == "1" else os.kill(PARENT, 9)
    Trainer.train_step = first_step
    marks.append(("import the rest", time.time()))
check, run.check = run.check, check_components
run.start(["run.root=" + FOLDER, *OVERRIDES])
"""


def bare_first_step() -> dict[str, float]:
    """Return when a bare script had imported torch and taken its first step, in seconds from its start."""
    start = time.time()
    done = subprocess.run([sys.executable, "-c", BARE_FIRST_STEP], capture_output=True, text=True, check=True)
    imported, ended = map(float, done.stdout.split())
    return {"import torch": imported - start, "to its first step": ended - start}


def framework_first_step(overrides: list[str]) -> dict[str, float]:
    """Return the seconds that each cause took on the way from the command to rank 0's first step, and their sum."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"ROOT": str(ROOT), "FOLDER": folder, "OVERRIDES": overrides}
        header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        start = before = time.time()
        subprocess.run([sys.executable, "-c", header + FRAMEWORK_FIRST_STEP], capture_output=True)
        lines = Path(folder, "marks").read_text().splitlines()
    causes = {}
    for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("first step")) + 1]:
        name, _, when = line.rpartition("=")
        causes["  " + name] = float(when) - before
        before = float(when)
    return causes | {"to its first step": before - start}


def median_of(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    rounds = [measure() for _ in range(NUM_ROUNDS)]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def report_start() -> None:
    print(f"\nfrom the command to the end of the first step, seconds (medians of {NUM_ROUNDS} rounds)")
    bare = median_of(bare_first_step)
    sides = {"bare": bare, "python train.py": median_of(lambda: framework_first_step([]))}
    for count in (2, 4):
        overrides = ["parallel=ddp", f"launch.nproc_per_node={count}"]
        sides["python train.py " + " ".join(overrides)] = median_of(functools.partial(framework_first_step, overrides))
    for name, causes in sides.items():
        print(f"\n{name}")
        for cause, seconds in causes.items():
            print(f"  {cause:32} {seconds:6.2f}")
        print(f"  {'ratio':32} {causes['to its first step'] / bare['to its first step']:6.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["steps", "start", "all"], default="all")
    what = parser.parse_args().what
    if what in ("steps", "all"):
        report_steps()
    if what in ("start", "all"):
        report_start()
