"""Objects in a store that fsspec reaches (s3://, gs://, file://, ...): listed, read, put, and created exclusively."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from framework.runtime.exits import Interrupted
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem, extra_with, install_command

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
    """The objects below a URL, by their names: paths relative to it. Any method may raise StoreFailed.

    Not to be used in a process that was forked later.
    """

    def __init__(self, url: str) -> None:
        from fsspec.asyn import AsyncFileSystem
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        with self._reached("opened"):
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
        self._has_folders = not isinstance(self._fs, AsyncFileSystem)  # a file system, with renames

    def listing(self, folder: str = "") -> dict[str, ObjectFacts]:
        """Return what is below a folder, by name."""
        with self._reached(f"listed{folder and f': {folder}'}"):
            return self._named(self._fs.find(self._path(folder), detail=True))

    def _named(self, found: dict[str, dict[str, Any]]) -> dict[str, ObjectFacts]:
        files = {name: info for name, info in found.items() if info["type"] == "file" and not name.endswith("/")}
        named = {name.removeprefix(self._root).strip("/"): info for name, info in files.items()}
        return {name: ObjectFacts(info["size"], _version(info)) for name, info in sorted(named.items())}

    def matching(self, pattern: str) -> dict[str, ObjectFacts]:
        """Return the objects in the URL's own folder whose names match a pattern, as in `*.tar`."""
        with self._reached(f"listed: {pattern}"):
            return self._named(self._fs.glob(self._path(pattern), detail=True))

    def read(self, name: str) -> bytes | None:
        """Return an object's content; None if there is no such object."""
        with self._reached(f"read: {name}"):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, which may exist."""
        with self._reached(f"written: {name}"), self._whole(name) as path:
            self._fs.pipe_file(path, content)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that must not exist; of several processes that try at once, one succeeds. Return whether this one.

        The store decides (S3: If-None-Match). A store that does not know how writes over the object: try it out first.
        """
        path = self._path(name)
        with self._reached(f"created: {name}"):
            try:
                if self._has_folders:
                    self._fs.makedirs(self._fs._parent(path), exist_ok=True)
                    with self._fs.open(path, "xb") as file:
                        file.write(content)
                else:
                    self._fs.pipe_file(path, content, mode="create")
                return True
            except OSError:  # not every store says that it exists; and a request that was sent twice meets its own object
                there = self.read(name)
                if there is None:
                    raise
                return there == content

    def put(self, path: Path, name: str) -> None:
        """Copy a file into an object, which may exist."""
        with self._reached(f"written: {name}"), self._whole(name) as target:
            self._fs.put_file(str(path), target)

    def get(self, name: str, path: Path) -> None:
        """Copy an object into a new file. Interrupted if a signal comes meanwhile."""
        with self._reached(f"read: {name}"):
            _stop_if_asked()  # a file system does not ask while it copies
            self._fs.get_file(self._path(name), str(path), callback=_callback())

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._reached(f"removed: {name}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """Yield the path to write: on a file system a path beside it, which is renamed at the end."""
        path = self._path(name)
        if not self._has_folders:
            yield path
            return
        self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        yield f"{path}.part"
        self._fs.mv(f"{path}.part", path)

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StoreFailed, Interrupted):
            raise
        except Exception as error:  # of botocore, aiohttp, google.auth, ...
            said = " ".join(str(error).split())[:300] or type(error).__name__
            lacks_right = "Credentials" in type(error).__name__
            is_wrong = lacks_right or isinstance(error, (FileNotFoundError, PermissionError, ValueError, ImportError))
            raise StoreFailed(f"{self.url} cannot be {what}: {said}", is_wrong=is_wrong) from error


def _callback() -> Any:
    """Return what stops a transfer when a signal has come."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"signal": lambda *_, **__: _stop_if_asked()})


def _stop_if_asked() -> None:
    if PREEMPTION.requested:
        raise Interrupted("stopped before all was fetched; the same command goes on")


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")


def inside(folder: Path, name: str) -> Path:
    """Return the path of an object's file in a folder. StoreFailed for a name that leads out of it."""
    path = Path(os.path.normpath(folder / name))
    if folder not in path.parents:
        raise StoreFailed(f"an object is called {name!r}, which leads out of a folder", is_wrong=True)
    return path
