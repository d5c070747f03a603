"""mode=predict: write a run's predictions for each sample of a split, or of a folder of files. The run is only read."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.build.training import Builder
from framework.checkpoint.canonical import gathered
from framework.data.source import Source
from framework.distributed.world import World
from framework.engine.seam import MicroBatch
from framework.modes.evaluate import until_signal
from framework.modes.load_run import load_run
from framework.modules.structure import in_eval_mode
from framework.runtime.exits import Exit, Unfit
from framework.runtime.files import make_directory
from framework.tasks.outputs import written_outputs
from framework.training.predictions_file import PredictionsFile
from framework.training.stored_samples import stored_samples, write_picture


def predict(build: Builder) -> Exit:
    """Write `predictions/` of the run: one record for each sample, in the split's order. Collective."""
    world, directory, wanted = build.world, build.directory.predictions, build.config.predict
    model, predicting = load_run(build), build.altered()
    recording = OwnPredictions(build.task) if hasattr(build.task, "predict") else Outputs(build.task)
    predicting.task = recording  # type: ignore[assignment]  # one of its two forms
    predicting.observers = [recording.observe] if isinstance(recording, Outputs) else []
    engine = predicting.engine(model.module)
    names, source = _samples(build)
    loader = predicting.loader(source, wanted.split, dp_rank=engine.dp_rank, dp_size=engine.dp_size)
    path = directory / ("files" if wanted.files is not None else wanted.split)
    file = PredictionsFile(path, num_samples=len(source), names=names, facts=model.facts(build)) if world.rank == 0 else None
    try:
        world.at("prediction", step=model.step or 0)
        world.agreement.all_or_fail(lambda: make_directory(directory), what=f"{directory} not made")
        engine.sync_buffers()
        with file or nullcontext(), in_eval_mode(engine.module):
            for step in until_signal(loader, world):
                engine.evaluate(step)
                _write(recording, file, world)

            def finish() -> None:
                if file is not None:
                    file.commit()
                    write_picture(stored_samples(source, build.dataset), Path(f"{path}.png"))

            world.agreement.on_rank_0(finish, what="the predictions not written")
    finally:
        loader.close()
    if file is not None:
        print(f"{len(source)} predictions ({file.content}): {path}.jsonl, {path}.safetensors", flush=True)
    return Exit.FINISHED


def _samples(build: Builder) -> tuple[list[str], Source]:
    """Return the names of the samples' files (empty for a split), and the samples. Collective."""
    wanted = build.config.predict
    if wanted.files is None:
        return [], build.source(wanted.split)
    names, source = build.dataset.read_folder(Path(wanted.files))  # type: ignore[attr-defined]  # the preflight has checked it
    if len(build.world.agreement.distinct(names)) > 1:
        raise Unfit("predict.files: the folder changes while it is listed")
    return names, source


def _write(recording: "_Kept", file: PredictionsFile | None, world: World) -> None:
    """Let rank 0 write the records of a batch from all ranks. Collective. Unfit on every rank if this is not possible."""
    rows = dict(zip(*gathered(recording.taken(), world=world)))
    fault = next(filter(None, world.agreement.distinct(recording.fault).values()), "")
    if not fault:
        add = (lambda: file.add(rows)) if file is not None else (lambda: "")
        fault = world.agreement.on_rank_0(add, what="the predictions not written")
    if fault:
        raise Unfit(f"task: {fault}; its written(outputs) can return what mode=predict writes: tensors by name, samples first")


class _Kept:
    """The values to write, of each micro-batch."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._rows: dict[str, Tensor] = {}
        self.fault = ""

    def keep(self, outputs: Any, *, start: int, num_samples: int) -> None:
        try:
            for name, value in written_outputs(self._task, outputs, num_samples=num_samples).items():
                self._rows[f"{start}/{name}"] = value.cpu().contiguous()
        except (ValueError, TypeError, AttributeError) as error:  # raised when all ranks know the error
            self.fault = str(error)

    def taken(self) -> dict[str, Tensor]:
        """Return the values recorded since the last call, as `FIRST SAMPLE IN THE BATCH/NAME`."""
        rows, self._rows = self._rows, {}
        return rows


class Outputs(_Kept):
    """A stand-in for the task: it measures nothing, and keeps the model's outputs."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return torch.zeros(())

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {}

    def observe(self, outputs: Any, micro_batch: MicroBatch) -> None:
        self.keep(outputs, start=micro_batch.start, num_samples=micro_batch.num_samples)


class OwnPredictions(_Kept):
    """A stand-in for a task with `predict(call, batch, context)`: it keeps what this returns."""

    def step(self, call: Any, batch: Any, context: Any) -> dict[str, Any]:
        outputs = self._task.predict(call, batch, context)
        if not context.is_padding:
            self.keep(outputs, start=context.start, num_samples=context.size)
        return {"loss": torch.zeros(())}
