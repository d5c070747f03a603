"""Text: the bytes of any text files, or their tokens; the default is the source code of Python's standard library."""

import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from framework.data.source import AtLeastOne, Split, TokenSequences, Windows, contiguous_split, num_windows

# folders in the standard library that are not part of it, not meant to be read, or not installed everywhere
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_IGNORED = -100  # the target of a token that does not count


@dataclass(kw_only=True, eq=False)
class Text(TokenSequences):
    """The joined text files, in the order of their names; the stream of bytes is cut 90 % / 5 % / 5 %.

    A token is one byte. With a `tokenizer` of Hugging Face, a file (tokenizer.json) or a folder with one, the tokens are those
    of each line, without special tokens. With `root: null`, the text is the standard library of the running Python: another
    version has another text.
    """

    root: str | None = None
    pattern: str | list[str] = "*.py"
    max_bytes: AtLeastOne | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        self.patterns = [self.pattern] if isinstance(self.pattern, str) else list(self.pattern)

    @property
    def info(self) -> Mapping[str, int]:
        try:
            vocab_size = 256 if self._tokenizer is None else self._tokenizer.vocab_size
        except ValueError:  # `problems` reports it
            return {"seq_len": self.seq_len}
        return {"vocab_size": vocab_size, "seq_len": self.seq_len}

    @property
    def bytes_per_token(self) -> float | None:
        return 1.0 if self.tokenizer is None else None

    def problems(self) -> list[str]:
        try:
            _ = self._tokenizer
        except ValueError as error:
            return [f"dataset.{error}"]
        folder = self._folder()
        if not folder.is_dir():
            return [f"dataset.root: {folder} is not a folder (give one with text files)"]
        size = sum(path.stat().st_size for path in self._files())
        if size == 0:
            return [f"dataset.root: no text in {folder} in files {self.patterns} (see dataset.pattern)"]
        size = min(size, self.max_bytes or size)
        test = contiguous_split(size, "test")
        if not num_windows(test.stop - test.start, seq_len=self.seq_len):
            remedy = "more text, a smaller dataset.seq_len or a larger dataset.max_bytes"
            return [f"dataset.root: 5 % of {size} bytes hold no sample of seq_len={self.seq_len} ({remedy})"]
        return []

    def load(self, split: Split) -> Windows:
        content = bytearray()
        for path in self._files():
            content += path.read_bytes()
            if self.max_bytes is not None and len(content) >= self.max_bytes:
                del content[self.max_bytes :]
                break
        # a copy, so that the memory of the other text is freed
        part = np.frombuffer(content, dtype=np.uint8)[contiguous_split(len(content), split)].copy()
        if self._tokenizer is not None:
            part = self._tokenizer.encode(part.tobytes().decode(errors="replace"))
            if not num_windows(len(part), seq_len=self.seq_len):
                what = f"the {len(part)} tokens of {split} hold no sample of seq_len={self.seq_len}"
                raise ValueError(f"dataset.root: {what} (more text, or a smaller dataset.seq_len)")
        return Windows(part, self.seq_len)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8) if self._tokenizer is None else self._tokenizer.encode(text)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of a sample's tokens."""
        if self._tokenizer is not None:
            return self._tokenizer.decode(tokens)
        return bytes(tokens.tolist()).decode(errors="replace")

    @cached_property
    def _tokenizer(self) -> "Tokenizer | None":
        return None if self.tokenizer is None else Tokenizer(self.tokenizer)

    def _folder(self) -> Path:
        return Path(sysconfig.get_path("stdlib") if self.root is None else self.root)

    def _files(self) -> list[Path]:
        skipped = SKIPPED if self.root is None else set()
        found = []
        for folder, folders, names in os.walk(self._folder()):
            folders[:] = [name for name in folders if name not in skipped]  # os.walk enters the remaining folders
            found += [Path(folder, name) for name in names if any(fnmatch(name, p) for p in self.patterns)]
        return sorted(found)


class Tokenizer:
    """A tokenizer of Hugging Face, from its file (tokenizer.json) or a folder with this file. Nothing is loaded from a hub."""

    def __init__(self, path: str) -> None:
        """Load the tokenizer. ValueError that names `tokenizer` if the path is not a tokenizer."""
        try:
            import tokenizers
        except ImportError:
            raise ValueError(f"tokenizer: {path} needs the package tokenizers (pip install 'steadfast[data]')") from None
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(f"tokenizer: {file} does not exist (a tokenizer.json of Hugging Face, or a folder with one)")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no own error class
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"tokenizer: {file} is not a tokenizer of Hugging Face ({why})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # ids may have gaps
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text's tokens, line by line: the ids of a line do not depend on other lines."""
        lines = (self._tokenizer.encode(line, add_special_tokens=False).ids for line in text.splitlines(keepends=True))
        return np.fromiter((number for ids in lines for number in ids), dtype=self._dtype)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


class TokenizedRecords:
    """A `collate` for records with text (dataset=map_style): it makes language-modelling samples of them.

    Inputs and targets are int64 (B, length). A longer text is cut; after the end of a shorter text, the targets do not count.
    """

    def __init__(self, *, tokenizer: str, length: int, field: str = "text") -> None:
        self._tokenizer, self.length, self.field = Tokenizer(tokenizer), length, field

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(records), self.length)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, _IGNORED, np.int64)
        for number, record in enumerate(records):
            ids = self._tokenizer.encode(record[self.field])[: self.length + 1].astype(np.int64)
            known = max(0, len(ids) - 1)
            inputs[number, :known], targets[number, :known] = ids[:-1], ids[1:]
        return inputs, targets
