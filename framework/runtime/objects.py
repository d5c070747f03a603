"""Objects in a store that fsspec reaches (s3://, gs://, file://, ...): listed, read, put, and created exclusively."""

import importlib.util
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple, TypeVar

from framework.runtime.exits import Interrupted
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem, extra_with, install_command

Answer = TypeVar("Answer")
_PATIENCE_S = 60.0
_SLOWEST = 250_000  # bytes a second
_STOPPED = "stopped before all was fetched; the same command goes on"
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated")  # by protocol


class StoreFailed(OSError):
    """A store does not do what it is asked. `is_wrong`: nor will it later; the place or the credentials are wrong."""

    def __init__(self, what: str, *, is_wrong: bool = False) -> None:
        super().__init__(what)
        self.is_wrong = is_wrong


class ObjectFacts(NamedTuple):
    """One object in a listing. `version` changes with its content."""

    size: int
    version: str


def is_url(text: object) -> bool:
    """Return whether a text names a place in a store."""
    return isinstance(text, str) and "://" in text


def url_problems(key: str, url: str) -> list[Problem]:
    """Return why a place cannot be in any store from here: its protocol is unknown, or needs a package. Reads nothing."""
    from fsspec.registry import known_implementations, registry  # not spent by a run without a store

    protocol, _, path = url.partition("://")
    if protocol not in known_implementations.keys() | registry.keys() or not path.strip("/"):
        return [Problem(key, f"{url!r} is not valid", "PROTOCOL://PLACE, as in s3://BUCKET/FOLDER; any protocol of fsspec")]
    if protocol not in known_implementations:  # the user's own
        return []
    module = known_implementations[protocol]["class"].partition(".")[0]
    if importlib.util.find_spec(module) is not None:
        return []
    extra = extra_with(module)
    return [Problem(key, f"{module} not installed", install_command(extra) if extra else f"pip install {module}")]


class Objects:
    """The objects below a URL, by their names: paths relative to it. Any method may raise StoreFailed: also where a store gives
    no answer for a minute, and moves no byte.

    With `heeds_signals`, Interrupted if a signal comes meanwhile. Not to be used in a process that was forked later.
    """

    def __init__(self, url: str, *, heeds_signals: bool = False) -> None:
        self.url, self._heeds_signals = url.rstrip("/"), heeds_signals

        def opened() -> tuple[Any, str, bool]:
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import url_to_fs

            file_system, root = url_to_fs(self.url, use_listings_cache=False)
            return file_system, root, not isinstance(file_system, AsyncFileSystem)  # a file system, with renames

        self._fs, self._root, self._has_folders = self._asked("opened", opened)

    def listing(self, folder: str = "") -> dict[str, ObjectFacts]:
        """Return what is below a folder, by name."""
        what = f"listed{folder and f': {folder}'}"
        return self._named(self._asked(what, lambda: self._fs.find(self._path(folder), detail=True)))

    def _named(self, found: dict[str, dict[str, Any]]) -> dict[str, ObjectFacts]:
        files = {name: info for name, info in found.items() if info["type"] == "file" and not name.endswith("/")}
        named = {name.removeprefix(self._root).strip("/"): info for name, info in files.items()}
        return {name: ObjectFacts(info["size"], _version(info)) for name, info in sorted(named.items())}

    def matching(self, pattern: str) -> dict[str, ObjectFacts]:
        """Return the objects in the URL's own folder whose names match a pattern, as in `*.tar`."""
        return self._named(self._asked(f"listed: {pattern}", lambda: self._fs.glob(self._path(pattern), detail=True)))

    def read(self, name: str) -> bytes | None:
        """Return an object's content; None if there is no such object."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(self._fs.cat_file(self._path(name)))
            return None

        return self._asked(f"read: {name}", read)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, which may exist."""
        self._asked(f"written: {name}", lambda: self._whole(name, lambda path: self._fs.pipe_file(path, content)))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that must not exist; of several processes that try at once, one succeeds. Return whether this one.

        The store decides (S3: If-None-Match). A store that does not know how writes over the object: try it out first.
        """
        path = self._path(name)

        def create() -> None:
            if self._has_folders:
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
                with self._fs.open(path, "xb") as file:
                    file.write(content)
            else:
                self._fs.pipe_file(path, content, mode="create")

        try:
            self._asked(f"created: {name}", create)
            return True
        except StoreFailed as failure:  # not every store says that it exists; and a request sent twice meets its own object
            there = self.read(name) if isinstance(failure.__cause__, OSError) else None
            if there is None:
                raise
            return there == content

    def put(self, path: Path, name: str) -> None:
        """Copy a file into an object, which may exist."""

        progress = _Progress(path.stat().st_size)  # a store may take all of it as one request, and say nothing meanwhile

        def put() -> None:
            self._whole(name, lambda target: self._fs.put_file(str(path), target, callback=progress.callback()))

        self._asked(f"written: {name}", put, progress)

    def get(self, name: str, path: Path) -> None:
        """Copy an object into a new file."""
        if self._heeds_signals and PREEMPTION.requested:
            raise Interrupted(_STOPPED)
        progress = _Progress()
        get = lambda: self._fs.get_file(self._path(name), str(path), callback=progress.callback())  # noqa: E731
        self._asked(f"read: {name}", get, progress)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._asked(f"removed: {name}", remove)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _whole(self, name: str, write: Callable[[str], object]) -> None:
        """Write an object; on a file system into a path beside it, which is renamed at the end."""
        path = self._path(name)
        if not self._has_folders:
            write(path)
            return
        self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        write(f"{path}.part")
        self._fs.mv(f"{path}.part", path)

    def _asked(self, what: str, work: Callable[[], Answer], progress: "_Progress | None" = None) -> Answer:
        """Return what the store answers: asked in a thread, since a store that is silent would hold this one for ever."""
        answers: Queue[tuple[Answer | None, Exception | None]] = Queue()

        def ask() -> None:
            try:
                answers.put((work(), None))
            except Exception as error:  # of botocore, aiohttp, google.auth, ...
                answers.put((None, error))

        progress = progress or _Progress()
        threading.Thread(target=ask, daemon=True).start()
        while True:
            with suppress(Empty):
                answer, error = answers.get(timeout=0.1)
                break
            if self._heeds_signals and PREEMPTION.requested:
                raise Interrupted(_STOPPED)
            if progress.is_silent:
                raise StoreFailed(f"{self.url} cannot be {what}: no answer in {progress.patience_s:.0f} s")
        if error is not None:
            said = " ".join(str(error).split())[:300] or type(error).__name__
            lacks_right = "Credentials" in type(error).__name__
            is_wrong = lacks_right or isinstance(error, (FileNotFoundError, PermissionError, ValueError, ImportError))
            raise StoreFailed(f"{self.url} cannot be {what}: {said}", is_wrong=is_wrong) from error
        return answer  # type: ignore[return-value]


class _Progress:
    """When the store has last moved a byte, and how long it may be silent."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.patience_s = _PATIENCE_S + num_bytes / _SLOWEST
        self._moved_at = time.monotonic()

    def callback(self) -> Any:
        """Return what a transfer tells that bytes have moved."""
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": lambda *_, **__: setattr(self, "_moved_at", time.monotonic())})

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self._moved_at > self.patience_s


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")


def inside(folder: Path, name: str) -> Path:
    """Return the path of an object's file in a folder. StoreFailed for a name that leads out of it."""
    path = Path(os.path.normpath(folder / name))
    if folder not in path.parents:
        raise StoreFailed(f"an object is called {name!r}, which leads out of a folder", is_wrong=True)
    return path
