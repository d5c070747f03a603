"""Predictions on disk: the tensors in a safetensors file, and for each sample a line of JSON with its single numbers."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from framework.runtime.files import flush_to_disk, replacing

CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
           torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
_Kinds = dict[str, tuple[torch.dtype, torch.Size]]  # by name: the dtype and the shape of one sample's part


class PredictionsFile:
    """PATH.jsonl and PATH.safetensors, written batch by batch: they need not fit into memory. They appear after `commit`.

    `names` are the samples' file names, if they have any. `facts` go into the metadata.
    """

    def __init__(self, path: Path, *, num_samples: int, names: list[str], facts: dict[str, str]) -> None:
        self._path, self._num_samples, self._names, self._facts = path, num_samples, names, facts
        self._ends = ExitStack()
        self._files: tuple[IO[bytes], IO[str]] | None = None  # for tensors, for lines
        self._kinds: _Kinds = {}
        self._begins: dict[str, int] = {}  # the offset of each tensor in the file
        self._next = 0  # the next sample

    def __enter__(self) -> "PredictionsFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    @property
    def content(self) -> str:
        """A description of the values of each sample."""
        return _described(self._kinds)

    def add(self, rows: dict[str, Tensor]) -> str:
        """Write the rows of a batch, by `FIRST SAMPLE IN IT/NAME`. Return why this is not possible, or an empty text."""
        begin, parts = self._next, dict[int, dict[str, Tensor]]()
        for key, value in rows.items():
            number, _, name = key.partition("/")
            parts.setdefault(int(number), {})[name] = value
        for first, part in sorted(parts.items()):
            kinds = {name: (value.dtype, value.shape[1:]) for name, value in part.items()}
            if self._files is None:
                if not all(dtype in CODES for dtype, _ in kinds.values()):
                    return f"{_described(kinds)}: a type that safetensors does not have"
                self._files = self._begin(kinds)
            if kinds != self._kinds:
                return f"some samples have {_described(self._kinds)}, and others {_described(kinds)}"
            assert begin + first == self._next
            self._append(part, *self._files)
        return ""

    def commit(self) -> None:
        """Make both files appear under their names."""
        self._ends.close()
        flush_to_disk(self._path.parent)

    def _begin(self, kinds: _Kinds) -> tuple[IO[bytes], IO[str]]:
        self._kinds = kinds
        header: dict[str, Any] = {"__metadata__": self._facts}
        stop = 0
        for name, (dtype, shape) in kinds.items():
            self._begins[name], stop = stop, stop + self._num_samples * shape.numel() * dtype.itemsize
            offsets = [self._begins[name], stop]
            header[name] = {"dtype": CODES[dtype], "shape": [self._num_samples, *shape], "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the format aligns the tensors
        self._begins = {name: 8 + len(text) + begin for name, begin in self._begins.items()}
        tensors, lines = (self._ends.enter_context(replacing(Path(f"{self._path}.{end}"))) for end in ("safetensors", "jsonl"))
        files = self._ends.enter_context(open(tensors, "wb")), self._ends.enter_context(open(lines, "w"))
        files[0].write(len(text).to_bytes(8, "little") + text)
        return files

    def _append(self, part: dict[str, Tensor], tensors: IO[bytes], lines: IO[str]) -> None:
        count = len(next(iter(part.values())))
        for name, value in part.items():
            tensors.seek(self._begins[name] + self._next * (value.nbytes // count))
            tensors.write(value.reshape(-1).view(torch.uint8).numpy().data)
        numbers = {name: value.reshape(count).tolist() for name, value in part.items() if value.numel() == count}
        for row in range(count):
            record: dict[str, Any] = {"sample": self._next + row}
            if self._names:
                record["file"] = self._names[self._next + row]
            record |= {name: _finite(of[row]) for name, of in numbers.items()}
            lines.write(json.dumps(record) + "\n")
        self._next += count


def _described(kinds: _Kinds) -> str:
    return ", ".join(f"{name} {list(shape)}" if shape.numel() > 1 else name for name, (_, shape) in kinds.items())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity
