"""A model of a file system that loses power: what was not flushed may be there, or not, or in part.

A directory is a mapping of names to nodes. A change of it (a name made, renamed, removed) may reach the disk at any time, in
any order, until the directory is flushed, which brings all of them there; a rename is one change. A file's content is
whole only once the file was flushed; before, it may be cut short anywhere.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Node:
    """A file or directory, under whatever name: what the program sees of it, and what has reached the disk."""

    def __init__(self, *, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.names: dict[str, Node] = {}
        self.on_disk: dict[str, Node] = {}
        self.changes: list[dict[str, Node | None]] = []  # that are not flushed; None removes a name
        self.content = b""
        self.is_flushed = False

    def change(self, change: "dict[str, Node | None]") -> None:
        _apply(change, self.names)
        self.changes.append(change)

    def flush(self) -> None:
        self.on_disk, self.changes, self.is_flushed = dict(self.names), [], True

    def write_after_power_cut(self, path: Path, rng: random.Random) -> None:
        """Make `path` what may be left of this."""
        if not self.is_directory:
            cut = len(self.content) if self.is_flushed else rng.randrange(len(self.content) + 1)
            path.write_bytes(self.content[:cut])
            return
        path.mkdir()
        names = dict(self.on_disk)
        for change in self.changes:
            if rng.random() < 0.5:
                _apply(change, names)
        for name, node in names.items():
            node.write_after_power_cut(path / name, rng)


def _apply(change: dict[str, Node | None], names: dict[str, Node]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class RecordedDisk:
    """Follows what a program does below `root`, by wrapping the calls through which it does it.

    `at_each` is called after every operation. It runs in the middle of the program: it may look, or raise.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, at_each: Callable[[], None]) -> None:
        self.root = root
        self.top = Node(is_directory=True)
        self._at_each = at_each
        self._depth = 0
        for owner, name in [(os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "fsync"),
                            (shutil, "rmtree"), (Path, "write_text"), (Path, "write_bytes")]:  # fmt: skip
            monkeypatch.setattr(owner, name, self._followed(getattr(owner, name), getattr(self, f"_{name}")))

    def _followed(self, original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            if self._depth == 1:
                note(*args)  # before: what is about to be removed can still be listed
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._at_each()

        return call

    def _find(self, path: Path) -> Node | None:
        node: Node | None = self.top
        for part in path.relative_to(self.root).parts:
            node = node.names.get(part) if node is not None else None
        return node

    def _parent(self, path: Path) -> Node | None:
        return self._find(path.parent) if path != self.root and path.is_relative_to(self.root) else None

    def _mkdir(self, path: Any, *_: Any) -> None:
        self._make(Path(path), is_directory=True)

    def _make(self, path: Path, *, is_directory: bool) -> Node | None:
        parent = self._parent(path)
        if parent is None or path.name in parent.names:
            return self._find(path) if parent is not None else None
        parent.change({path.name: (node := Node(is_directory=is_directory))})
        return node

    def _rename(self, old: Any, new: Any) -> None:
        old, new = Path(old), Path(new)
        parent, node = self._parent(old), self._find(old) if self._parent(old) else None
        if parent is not None and node is not None:
            assert old.parent == new.parent, "the model knows renames within a directory"
            parent.change({old.name: None, new.name: node})

    _replace = _rename

    def _unlink(self, path: Any, *_: Any) -> None:
        path = Path(path)
        parent = self._parent(path)
        if parent is not None and path.name in parent.names:
            parent.change({path.name: None})

    def _rmtree(self, path: Any, *_: Any) -> None:
        node = self._find(Path(path)) if self._parent(Path(path)) else None
        if node is not None:
            for name in list(node.names):
                node.change({name: None})
            self._unlink(path)

    def _write_bytes(self, path: Path, content: bytes) -> None:
        if (node := self._make(path, is_directory=False)) is not None:
            node.content, node.is_flushed = content, False

    def _write_text(self, path: Path, text: str) -> None:
        self._write_bytes(path, text.encode())

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(self.root) and (node := self._find(path)) is not None:
            node.flush()
