"""Tokens: memory-mapped token ids that a tokenizer has written to a flat binary file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from framework.data.source import SPLITS, AtLeastOne, Split, TokenSequences, Windows, contiguous_split, num_windows

NUM_CHECKED = 2**20  # tokens at each end of each file that the preflight checks, in milliseconds


@dataclass(kw_only=True, eq=False)
class Tokens(TokenSequences):
    """A dataset of token ids. `root` is a folder with train.bin, val.bin and optionally test.bin, or one file, cut 90/5/5 %.

    Without test.bin, val is the first half of val.bin and test is the second half. Ids are unsigned integers in the machine's
    byte order, without a header. They must be below `vocab_size`: the first and last million ids of each file are checked
    before the start, and every batch is checked when it is read.
    """

    root: str = "data"
    source: str | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    vocab_size: AtLeastOne | None = None

    @property
    def info(self) -> Mapping[str, int]:
        return {"seq_len": self.seq_len} | ({} if self.vocab_size is None else {"vocab_size": self.vocab_size})

    def problems(self) -> list[str]:
        problems = ["dataset.vocab_size: is null (the number of the tokenizer's tokens)"] if self.vocab_size is None else []
        paths = sorted({self._part(split)[0] for split in SPLITS})
        if missing := [str(path) for path in paths if not path.is_file()]:
            source = f"; {self.source}" if self.source else ""
            return [*problems, f"dataset.root: {', '.join(missing)} not found (train.bin and val.bin, or one file{source})"]
        for path in paths:
            problems += self._file_problems(path)
        for split in SPLITS:
            _, start, stop = self._part(split)
            if not num_windows(stop - start, seq_len=self.seq_len):
                what = f"the {stop - start} tokens of {split} hold no sample of seq_len={self.seq_len}"
                problems.append(f"dataset.root: {what} (more tokens, or a smaller dataset.seq_len)")
        return problems

    def load(self, split: Split) -> Windows:
        path, start, stop = self._part(split)
        return Windows(np.memmap(path, self.dtype, mode="r")[start:stop], self.seq_len, self.vocab_size)

    def _part(self, split: Split) -> tuple[Path, int, int]:
        """Return the split's file, and the split's start and end in the file, in tokens."""
        root = Path(self.root)
        if root.is_file():
            part = contiguous_split(self._num_tokens(root), split)
            return root, part.start, part.stop
        if split == "train" or (root / "test.bin").is_file():
            return root / f"{split}.bin", 0, self._num_tokens(root / f"{split}.bin")
        num_tokens = self._num_tokens(root / "val.bin")
        bounds = (0, num_tokens // 2) if split == "val" else (num_tokens // 2, num_tokens)
        return root / "val.bin", *bounds

    def _num_tokens(self, path: Path) -> int:
        return path.stat().st_size // np.dtype(self.dtype).itemsize if path.is_file() else 0

    def _file_problems(self, path: Path) -> list[str]:
        size = path.stat().st_size
        if size == 0 or size % np.dtype(self.dtype).itemsize:
            return [f"dataset.dtype: {path} has {size} bytes, which is not a whole number of {self.dtype} (another dtype?)"]
        tokens = np.memmap(path, self.dtype, mode="r")
        largest = max(tokens[:NUM_CHECKED].max(), tokens[-NUM_CHECKED:].max())
        if self.vocab_size is not None and largest >= self.vocab_size:
            return [f"dataset.vocab_size: {self.vocab_size}, but {path} has id {largest} (or another dataset.dtype)"]
        return []
