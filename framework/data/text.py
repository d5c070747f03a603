"""Text: the bytes of any text files; by default the Python standard library's own sources."""

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from framework.data.source import Split, TokenSequences, Windows, contiguous_split, num_windows, require_at_least

# In the standard library: what is not its own, not meant to be read, or not installed everywhere.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(kw_only=True, eq=False)
class Text(TokenSequences):
    """One token is one byte. The files are joined in the order of their names; the stream is cut 90 % / 5 % / 5 %.

    With `root: null`, the text is the running Python's standard library: another version is another text.
    """

    bytes_per_token = 1.0

    root: str | None = None
    pattern: str | list[str] = "*.py"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "max_bytes")
        self.patterns = [self.pattern] if isinstance(self.pattern, str) else list(self.pattern)

    @property
    def info(self) -> Mapping[str, int]:
        return {"vocab_size": 256, "seq_len": self.seq_len}

    def problems(self) -> list[str]:
        folder = self._folder()
        if not folder.is_dir():
            return [f"dataset.root: {folder} is no folder (give one with text files)"]
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
        if problems := self.problems():
            raise ValueError(problems[0])
        content = bytearray()
        for path in self._files():
            content += path.read_bytes()
            if self.max_bytes is not None and len(content) >= self.max_bytes:
                del content[self.max_bytes :]
                break
        # a copy, so that the rest of the text is freed
        part = np.frombuffer(content, dtype=np.uint8)[contiguous_split(len(content), split)].copy()
        return Windows(part, self.seq_len)

    def decode(self, tokens: np.ndarray) -> str:
        """Return a sample's tokens as text."""
        return bytes(tokens.tolist()).decode(errors="replace")

    def _folder(self) -> Path:
        return Path(sysconfig.get_path("stdlib") if self.root is None else self.root)

    def _files(self) -> list[Path]:
        skipped = SKIPPED if self.root is None else set()
        found = []
        for folder, folders, names in os.walk(self._folder()):
            folders[:] = [name for name in folders if name not in skipped]  # os.walk enters the others
            found += [Path(folder, name) for name in names if any(fnmatch(name, p) for p in self.patterns)]
        return sorted(found)
