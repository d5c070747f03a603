"""Whole trainings in forked ranks: straight, and with a stop in the middle, for tests/test_product.py."""

import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from framework.build.training import Builder
from framework.checkpoint.canonical import gathered, state_of
from framework.cli.run import checked_line
from framework.config.schema import RunConfig
from framework.distributed.world import World
from framework.modes.train import _continue
from framework.preflight.dry_build import dry_build
from framework.runs.metrics_file import MACHINE
from framework.runtime.preemption import PREEMPTION
from tests.ranks import on_ranks

STOP = 3  # optimizer steps before the stop


@dataclass
class Trained:
    """The results of a training: its rows without what a clock has measured, and its final weights on rank 0."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # that parts have written


def trained(line: list[str], *, ranks: int, root: Path, stops: Sequence[int | None] = (None, STOP)) -> list[Trained]:
    """Train on so many ranks; return the results without a stop (None), or with a stop after some steps and a new start.

    AssertionError with the refusal's text if the line is refused.
    """
    results = []
    for stop in stops:
        config = configured(*line, f"launch.nproc_per_node={ranks}", f"run.dir={root}/{stop}")
        rows = on_ranks(ranks, partial(_train, config=config, stop=stop), scratch=_new(root))[0].rows if stop else []
        results.append(on_ranks(ranks, partial(_train, config=config, stop=None), scratch=_new(root))[0])
        results[-1].rows[:0] = rows
        results[-1].weights = {name: torch.from_numpy(array) for name, array in results[-1].weights.items()}
    return results


def _new(root: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=root))


def configured(*line: str) -> RunConfig:
    found = checked_line([*line, "rehearse=false"])
    problems = dry_build(Builder(found.config, world=World.alone()))[0] if found.config is not None else found.problems
    assert found.config is not None and not problems, [str(problem) for problem in problems]
    Path(found.config.run.dir).mkdir(parents=True)
    return found.config


def _train(world: World, config: RunConfig, stop: int | None) -> Trained:
    """Train to the end, or until the checkpoint after `stop` steps. A run with a checkpoint continues from it."""
    torch.set_num_threads(1)
    result, build = Trained(), Builder(config, world=world)
    trainer = build.trainer()
    _continue(trainer, build)
    trainer.recorder.log = lambda row: result.rows.append({key: row[key] for key in row if key not in MACHINE})
    take = trainer.train_step

    def train_step(*arguments: Any, **named: Any) -> Any:
        PREEMPTION.signum = signal.SIGTERM if trainer.progress.step + 1 == stop else PREEMPTION.signum
        return take(*arguments, **named)

    trainer.train_step = train_step
    assert trainer.fit() == (stop is None), f"ended after {trainer.progress.step} steps"
    trainer.saver.close()
    with trainer.update.averaged():
        found = gathered(state_of(trainer.engine.module), world=world)
        result.weights = {name: tensor.double().numpy().copy() for name, tensor in zip(*found)}
    samples = Path(config.run.dir, "samples")
    result.texts = {path.name: path.read_text() for path in samples.glob("*.txt")} if world.rank == 0 else {}
    return result
