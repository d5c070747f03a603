"""mode=eval: measure a run's model anew, under any strategy and on any number of processes. The run is only read."""

import gc
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.build import components, training
from framework.data.loader import Loader
from framework.distributed.world import World
from framework.engine.seam import MicroBatch
from framework.modes.load_run import restored
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Exit, Interrupted
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.training.evaluation import measure, totals


def evaluate(config: dict[str, Any], *, world: World) -> Exit:
    """Measure the split that `eval.split` names, print the result and add it to `evaluations.jsonl`. Collective."""
    directory = RunDirectory(Path(config["run"]["dir"]))
    model = restored(config, world=world)
    engine = training.engine(config, model.module, world=world)
    loaders = training.Loaders(config, world=world, engine=engine)
    try:
        loader = loaders[config["eval"]["split"]]
        world.at("evaluation", step=model.step or 0)
        sums = measure(engine, _Stoppable(loader, world=world))
        values = {name: total.item() / len(loader.source) for name, total in totals(sums, world=world).items()}
        row = {
            "step": model.step,
            "split": config["eval"]["split"],
            **values,
            **components.derived(config)(values),
            "samples": len(loader.source),
            "checkpoint": model.path.name if model.path.is_relative_to(directory.path) else str(model.path),
            "precision": config["precision"]["name"],
            "parallel": config["parallel"]["_target_"].rpartition(".")[2],
            "world_size": world.world_size,
        }
        if world.rank == 0:
            print(_table(row), flush=True)
        world.together(lambda: _append(directory.evaluations, row), what="the result not written", rank_0_only=True)
    finally:
        for loader in loaders.values():
            loader.close()
        # DDP's reducer and the shards must go before the process groups they use: exit can hang (pytorch#56297)
        del engine, loaders, model
        gc.collect()
    if world.rank == 0:
        LOGGER.info("added to %s", directory.evaluations)
    return Exit.FINISHED


class _Stoppable:
    """A loader that ends when a signal has come to any of the ranks: they all raise Interrupted before the same batch."""

    def __init__(self, loader: Loader, *, world: World) -> None:
        self.source = loader.source
        self._loader = loader
        self._world = world

    def evaluate(self) -> Iterator[MicroBatch]:
        for micro_batch in self._loader.evaluate():
            if any(self._world.any_flags(PREEMPTION.requested)):
                raise Interrupted("stopped; nothing was written")
            yield micro_batch


def _table(row: dict[str, Any]) -> str:
    """Return the row as two aligned lines: the names, and the values."""
    texts = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in row.items()}
    widths = {name: max(len(name), len(text)) for name, text in texts.items()}
    lines = [
        "  ".join(name.ljust(widths[name]) for name in texts),
        "  ".join(text.ljust(widths[name]) for name, text in texts.items()),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _append(path: Path, row: dict[str, Any]) -> None:
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(plain) + "\n").encode())  # JSON has no infinity
        os.fsync(file.fileno())
