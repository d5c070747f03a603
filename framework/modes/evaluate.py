"""mode=eval: measure a run's model again, with any strategy and any number of processes. The run is only read."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from framework.build.training import Builder
from framework.config.folders import option_of
from framework.config.frozen_file import recall
from framework.config.identity import flat
from framework.data.fingerprint import changes, fingerprint
from framework.data.loader import Loader
from framework.distributed.world import World
from framework.engine.seam import Step
from framework.engine.sums import means
from framework.modes.load_run import load_run
from framework.runs.metrics_file import numbers_of
from framework.runs.provenance import Provenance
from framework.runtime.exits import REMARK, Exit, Unfit, lacks_memory
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import shown
from framework.training.evaluation import measure, measured_by_task, totals, until_asked
from framework.training.metrics import finite
from framework.training.tracking import combined


def evaluate(build: Builder) -> Exit:
    """Measure the split that `eval.split` names, print the result and add it to `evaluations.jsonl`. Collective."""
    config, directory, world = build.config, build.directory, build.world
    model = load_run(build)
    engine = build.engine(model.module)
    splits = build.splits(dp_rank=engine.dp_rank, dp_size=engine.dp_size)
    try:
        loader = splits.loader(config.eval.split)
        own = recall(directory.path)["dataset"]
        is_own = {**own, "num_workers": 0} == {**config.dataset, "num_workers": 0}
        before = Provenance(directory.path).data(config.eval.split) if world.rank == 0 and is_own else {}
        if before and (lines := changes(before, fingerprint(loader.source, seed=config.seed), but_for_rounding=True)):
            LOGGER.warning("the data of %s have changed since the run: %s", config.eval.split, "; ".join(lines))
        world.at("evaluation", step=model.step or 0)
        try:
            sums = measure(engine, until_signal(loader, world))
        except Exception as error:
            if is_own or lacks_memory(error) or not hasattr(error, REMARK):  # a remark names the samples of a batch that failed
                raise
            before, now = Provenance(directory.path).data(config.eval.split), fingerprint(loader.source, seed=config.seed)
            raise Unfit(f"dataset: {_misfit(error, changes(before, now, but_for_rounding=True))}") from error
        values = means(totals(sums, world=world), num_samples=len(loader.source))
        columns = build.tracker().columns(config.eval.split, values, step=model.step)
        row = combined(*columns, ("task", measured_by_task(engine)), ("metric", build.metrics.compute(world=world)))
        facts = {
            "samples": len(loader.source),
            "checkpoint": model.path.name if model.path.is_relative_to(directory.path) else str(model.path),
            "precision": config.precision.name,
            "parallel": option_of("parallel", config.parallel),
            "world_size": world.world_size,
            **({} if is_own else {"dataset": _other(own, config.dataset)}),
        }
        row |= {f"eval_{name}" if name in row else name: fact for name, fact in facts.items()}  # a metric may be a `precision`
        if world.rank == 0:
            print(_table(numbers_of(row)), flush=True)
        world.agreement.on_rank_0(lambda: _append(directory.evaluations, row), what="the result not written")
    finally:
        splits.close()
    if world.rank == 0:
        LOGGER.info("added to %s", directory.evaluations)
    return Exit.FINISHED


def _misfit(error: Exception, differences: Sequence[str]) -> str:
    """Return why other data than those of a run cannot be measured, from the error of their first batch."""
    what = f"the run's model or task does not take these samples: {' '.join(str(error).split())[:200]}"
    kinds = [line for line in differences if not line.startswith("length ")]
    return f"{what} (samples as those of the run{''.join(f'; {line}' for line in kinds[:3])})"


def _other(own: dict[str, Any], given: dict[str, Any]) -> str:
    """Return what data these are: the option's name, or the keys that are not those of the run."""
    if own["_target_"] != given["_target_"]:
        return option_of("dataset", given)
    ours, theirs = flat(own), flat(given)
    return " ".join(f"{key}={shown(value)}" for key, value in theirs.items() if value != ours.get(key) and key != "num_workers")


def until_signal(loader: Loader, world: World) -> Iterator[Step]:
    """Yield the batches until any rank receives a signal; then raise Interrupted on all ranks before the same batch."""
    return until_asked(loader.evaluate(), lambda: any(world.agreement.any_flags(PREEMPTION.requested)))


def _table(row: dict[str, Any]) -> str:
    columns = [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in row.items()]
    aligned = [(name.ljust(len(text)), text.ljust(len(name))) for name, text in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned))


def _append(path: Path, row: dict[str, Any]) -> None:
    plain = {name: finite(value) for name, value in row.items()}
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(plain) + "\n").encode())  # JSON has no infinity
        os.fsync(file.fileno())
