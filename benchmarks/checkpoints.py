"""How long a save stops training: beside the steps, between them, and a bare torch.save.

    python benchmarks/checkpoints.py             models of several sizes, in one process

All three save the same state (an MLP and its AdamW moments) on the same disk, in turn, several times; medians are compared.
"checkpoint" is the whole protocol: DCP, flushed files, checksums, manifest, rename. torch.save is neither flushed nor checked.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DIMS = [64, 256, 768, 1536, 3072]  # of the MLP's three hidden layers
NUM_ROUNDS = 7


def trainer_of(dim: int, *, is_async: bool, folder: Path) -> Any:
    """Return a trainer that has taken a few steps, so that there is a state to save."""
    from framework import compose
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.loggers.sink import RunInfo
    from framework.runtime.environment import Environment

    model = ["model=mlp", f"model.dim={dim}", "model.num_layers=3"]
    saving = [f"checkpoint.async_save={str(is_async).lower()}", "checkpoint.keep_last=1"]
    config = compose(*model, *saving, f"run.dir={folder}")
    world = World.start(Environment.read(), backend="auto", timeout_s=60.0, scratch=None)
    trainer: Any = Builder(config, world=world).trainer()
    folder.mkdir()
    trainer.recorder._sinks = {}
    trainer.recorder.open(RunInfo(folder, "id", "name", 0, 100, config.plain()))
    step, trainer.steps = trainer.begin()
    trainer.train_step(step, measure=False)
    return trainer


def steps_s(trainer: Any, *, while_saving: bool, at_most: int = 40) -> list[float]:
    """Return the seconds of each step, of as many as fit beside a save if that is asked for."""
    seconds: list[float] = []
    while len(seconds) < at_most and not (while_saving and trainer.saver._running.done()):
        begun = time.perf_counter()
        trainer.train_step(next(trainer.steps), measure=False)
        seconds.append(time.perf_counter() - begun)
    return seconds


def bare_save_s(trainer: Any, path: Path) -> float:
    import torch

    begun = time.perf_counter()
    torch.save({"model": trainer.engine.module.state_dict(), "optimizer": trainer.update.optimizer.state_dict()}, path)
    return time.perf_counter() - begun


def report() -> None:
    import torch

    print(f"torch {torch.__version__}; milliseconds, medians of {NUM_ROUNDS} saves\n")
    print(f"{'state MiB':>10} {'torch.save':>11} | {'checkpoint: between steps':>26} {'ratio':>6} | "
          f"{'beside: stall':>14} {'ratio':>6} {'commit after':>13} | {'a step':>7} {'meanwhile':>10}")  # fmt: skip
    for dim in DIMS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            between = trainer_of(dim, is_async=False, folder=folder / "between")
            beside = trainer_of(dim, is_async=True, folder=folder / "beside")
            times: dict[str, list[float]] = {key: [] for key in ("bare", "between", "stall", "commit", "step", "meanwhile")}
            for number in range(NUM_ROUNDS + 1):
                measured = {"bare": [bare_save_s(between, folder / "bare.pt")], "between": [seconds_of(between.commit)]}
                measured["step"] = steps_s(beside, while_saving=False, at_most=5)
                begun = time.perf_counter()
                measured["stall"] = [seconds_of(beside.commit)]
                measured["meanwhile"] = steps_s(beside, while_saving=True)
                beside.saver.settle()
                measured["commit"] = [time.perf_counter() - begun]
                between.train_step(next(between.steps), measure=False)
                for key, seconds in measured.items() if number else []:  # the first fills the caches
                    times[key] += seconds
            beside.saver.close()
            size = sum(t.numel() * t.element_size() for t in beside.saver._copies.values()) / 2**20
        ms = {key: 1e3 * statistics.median(seconds or [0.0]) for key, seconds in times.items()}
        print(f"{size:10.1f} {ms['bare']:11.1f} | {ms['between']:26.1f} {ms['between'] / ms['bare']:6.2f} | {ms['stall']:14.1f} "
              f"{ms['stall'] / ms['bare']:6.2f} {ms['commit']:13.1f} | {ms['step']:7.1f} {ms['meanwhile']:10.1f}")  # fmt: skip


def seconds_of(action: Any) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    report()
