"""The model's predictions for a few samples, in a small table: for the report, and for loggers that can show it."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from framework.engine.seam import MicroBatch
from framework.loggers.sink import Samples
from framework.runtime.log import LOGGER
from framework.tasks.outputs import written_outputs
from framework.training.loop_view import Loop
from framework.training.predictions_file import CODES, PredictionsFile
from framework.training.stored_samples import stored_samples, write_picture

_MOST_NUMBERS = 1024  # of one sample in one tensor: the logits of a text would be gigabytes
_MOST_IMAGES = 64


class Predictions:
    """A part that writes the predictions of the first `count` samples after each evaluation of `split`, with numeric targets.

    The files are predictions/first_SPLIT.jsonl, .safetensors and, for images, .png, in the format of mode=predict. The task's
    `written(outputs)` decides what is written. A tensor is left out, with a warning, if it has more than 1,024 numbers a
    sample, a type that safetensors does not have, or another shape in another micro-batch.
    """

    def __init__(self, *, split: Literal["val", "test"] = "val", count: int = 8) -> None:
        if count < 1:
            raise ValueError(f"count={count} is out of range (at least 1)")
        self.split, self.count = split, count
        self._has_warned = False
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
        # a tensor that is too large is only named: by a tensor of its shape without numbers
        kept = {name: value if value.numel() <= size * _MOST_NUMBERS else value[:0] for name, value in rows.items()}
        self._rows |= {f"{micro_batch.number}/{name}": value[: self.count].cpu() for name, value in kept.items()}
        self._rows[f"{micro_batch.number}/"] = torch.zeros(min(size, self.count))

    def evaluated(self, loop: Loop, split: str, row: dict[str, Any]) -> None:
        if split != self.split:
            return
        mine, self._rows = self._rows, {}
        found, source = loop.on_main(mine), loop.splits.loader(split).source
        if not found:
            return
        table, left_out = _in_order(found, count=self.count)
        if left_out and not self._has_warned:
            self._has_warned = True
            LOGGER.warning("part.predictions: left out: %s (a tensor needs at most %d numbers a sample, a type of safetensors, "
                           "and the same shape for all samples)", ", ".join(sorted(left_out)), _MOST_NUMBERS)  # fmt: skip
        if table:
            self._write(table, stored_samples(source, loop.dataset, count=min(self.count, _MOST_IMAGES)), loop)

    def _write(self, table: dict[str, Tensor], samples: Samples, loop: Loop) -> None:
        folder = loop.directory / "predictions"
        folder.mkdir(exist_ok=True)
        path, (num_samples, *_) = folder / f"first_{self.split}", map(len, table.values())
        with PredictionsFile(path, num_samples=num_samples, names=[], facts={"step": str(loop.step)}) as file:
            fault = file.add({f"0/{name}": value for name, value in table.items()})
            assert not fault, fault
            file.commit()
        write_picture(samples, Path(f"{path}.png"))


def _in_order(found: dict[str, Tensor], *, count: int) -> tuple[dict[str, Tensor], set[str]]:
    """Return the first samples' tensors by name, and the names of the tensors that cannot be in one table.

    The keys of `found` are NUMBER OF THE MICRO-BATCH/NAME; the tensor without a name is as long as the micro-batch.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    for key, value in found.items():
        number, _, name = key.partition("/")
        parts.setdefault(name, {})[int(number)] = value
    sizes = {number: len(value) for number, value in parts.pop("").items()}
    table = dict[str, Tensor]()
    for name, of in parts.items():
        kinds = {(value.dtype, value.shape[1:]) for value in of.values()}
        if {number: len(value) for number, value in of.items()} == sizes and len(kinds) == 1 and kinds.pop()[0] in CODES:
            table[name] = torch.cat([of[number] for number in sorted(of)])[:count]
    return table, parts.keys() - table.keys()
