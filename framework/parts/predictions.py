"""The model's predictions for a few samples, in a small table: for the report, and for loggers that can show it."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from framework.engine.seam import MicroBatch
from framework.runtime.log import LOGGER
from framework.tasks.outputs import written_outputs
from framework.training.loop import Loop
from framework.training.predictions_file import PredictionsFile
from framework.training.stored_samples import stored_samples, write_picture

_MOST_NUMBERS = 1024  # of one sample in one tensor: the logits of a text would be gigabytes


class Predictions:
    """A part that writes the predictions of the first `count` samples after each evaluation of `split`, with numeric targets.

    The files are predictions/first_SPLIT.jsonl, .safetensors and, for images, .png, in the format of mode=predict. The task's
    `written(outputs)` decides what is written. A tensor with more than 1,024 numbers a sample is left out.
    """

    def __init__(self, *, split: Literal["val", "test"] = "val", count: int = 8) -> None:
        if count < 1:
            raise ValueError(f"count={count} is out of range (at least 1)")
        self.split, self.count = split, count
        self._is_answered = False
        self._rows: dict[str, Tensor] = {}  # of this rank, by NUMBER OF THE MICRO-BATCH/NAME

    def begun(self, loop: Loop) -> None:
        self._loop = loop

    def observe(self, outputs: Any, micro_batch: MicroBatch) -> None:
        # a micro-batch's number grows with the samples of the split, and is never above the number of its first sample
        if self._loop.split != self.split or micro_batch.number >= self.count:
            return
        size, targets = micro_batch.num_samples, micro_batch.targets
        rows = written_outputs(self._loop.task, outputs, num_samples=size)
        if isinstance(targets, Tensor) and targets.shape == (size,):
            rows["target"] = targets
        small = {name: value for name, value in rows.items() if value.numel() <= size * _MOST_NUMBERS}
        self._rows |= {f"{micro_batch.number}/{name}": value[: self.count].cpu() for name, value in small.items()}

    def evaluated(self, loop: Loop, split: str, row: dict[str, Any]) -> None:
        if split != self.split:
            return
        mine, self._rows = self._rows, {}
        if found := loop.on_main(mine):
            self._write(_in_order(found, count=self.count), loop)
        elif loop.is_main and not self._is_answered:
            self._is_answered = True
            LOGGER.warning("part.predictions: the task has no tensor of at most %d numbers a sample, so nothing is written; "
                           "its written(outputs) can return smaller ones", _MOST_NUMBERS)  # fmt: skip

    def _write(self, table: dict[str, Tensor], loop: Loop) -> None:
        folder = loop.directory / "predictions"
        folder.mkdir(exist_ok=True)
        path, (num_samples, *_) = folder / f"first_{self.split}", map(len, table.values())
        with PredictionsFile(path, num_samples=num_samples, names=[], facts={"step": str(loop.step)}) as file:
            if fault := file.add({f"0/{name}": value for name, value in table.items()}):
                raise ValueError(f"task: {fault}")
            file.commit()
        source = loop.splits.loader(self.split).source
        write_picture(stored_samples(source, loop.dataset, count=num_samples), Path(f"{path}.png"))
        self._is_answered = True


def _in_order(found: dict[str, Tensor], *, count: int) -> dict[str, Tensor]:
    """Return the first samples' tensors by name; the keys of `found` are NUMBER OF THE MICRO-BATCH/NAME."""
    parts: dict[str, dict[int, Tensor]] = {}
    for key, value in found.items():
        number, _, name = key.partition("/")
        parts.setdefault(name, {})[int(number)] = value
    return {name: torch.cat([of[number] for number in sorted(of)])[:count] for name, of in parts.items()}
