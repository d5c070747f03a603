"""Objects in a store that fsspec supports (s3://, gs://, file://, ...): list, read, put, exclusive creation, local copies."""

import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from framework.runtime.environment import variables
from framework.runtime.exits import Interrupted
from framework.runtime.files import locked, make_directory, replacing_directory
from framework.runtime.forks import start_in_thread
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem, extra_with, install_command

Answer = TypeVar("Answer")
_PATIENCE_S = 60.0
_SLOWEST = 250_000  # bytes per second
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated")  # by protocol


class StoreFailed(OSError):
    """A request to a store failed. `is_wrong`: it will fail again, because the place or the credentials are wrong."""

    def __init__(self, what: str, *, is_wrong: bool = False) -> None:
        super().__init__(what)
        self.is_wrong = is_wrong


class ObjectFacts(NamedTuple):
    """One object in a listing. `version` changes with the object's content."""

    size: int
    version: str


def is_url(text: object) -> bool:
    """Return whether a text is the URL of a place in a store."""
    return isinstance(text, str) and "://" in text


def url_problems(key: str, url: str) -> list[Problem]:
    """Return why no store can have this place: the protocol is unknown or needs a missing package. This reads nothing."""
    from fsspec.registry import known_implementations, registry  # late: a run without a store does not need it

    protocol, _, path = url.partition("://")
    known = (known_implementations.keys() | registry.keys()) - {"memory"}  # which ends with the process
    if protocol not in known or not path.strip("/"):
        return [Problem(key, f"{url!r} is not valid", "PROTOCOL://PLACE, as in s3://BUCKET/FOLDER; any protocol of fsspec")]
    if protocol not in known_implementations:  # the user has registered this protocol
        return []
    module = known_implementations[protocol]["class"].partition(".")[0]
    if importlib.util.find_spec(module) is not None:
        return []
    extra = extra_with(module)
    return [Problem(key, f"{module} not installed", install_command(extra) if extra else f"pip install {module}")]


class Objects:
    """The objects below a URL. Their names are paths relative to the URL.

    Any method may raise StoreFailed, also if a store gives no answer and moves no byte for a minute. With `heeds_signals`,
    raise Interrupted if a signal arrives. Do not use an instance in a process that was forked later.
    """

    def __init__(self, url: str, *, heeds_signals: bool = False) -> None:
        from fsspec.asyn import AsyncFileSystem
        from fsspec.core import url_to_fs

        self.url, self._heeds_signals = url.rstrip("/"), heeds_signals
        self._fs, self._root = self._answer("opened", lambda _: url_to_fs(self.url, use_listings_cache=False))
        self._has_folders = not isinstance(self._fs, AsyncFileSystem)  # a file system, which can rename

    def listing(self, folder: str = "") -> dict[str, ObjectFacts]:
        """Return the objects below a folder, by name; those with names that match, if it is a pattern (`*.tar`)."""
        find = "glob" if "*" in folder else "find"
        what = f"listed{folder and f': {folder}'}"
        found = self._answer(what, lambda _: getattr(self._fs, find)(self._path(folder), detail=True))
        files = {name: info for name, info in found.items() if info["type"] == "file" and not name.endswith("/")}
        named = {name.removeprefix(self._root).strip("/"): info for name, info in files.items()}
        return {name: ObjectFacts(info["size"], _version(info)) for name, info in sorted(named.items())}

    def read(self, name: str) -> bytes | None:
        """Return an object's content, or None if the object does not exist."""
        try:
            return bytes(self._answer(f"read: {name}", lambda _: self._fs.cat_file(self._path(name))))
        except StoreFailed as failure:
            if isinstance(failure.__cause__, FileNotFoundError):
                return None
            raise

    def write(self, name: str, content: bytes) -> None:
        """Write an object. The object may exist already."""
        self._answer(f"written: {name}", lambda _: self._whole(name, lambda path: self._fs.pipe_file(path, content)))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that must not exist. If several processes try together, one succeeds. Return whether this one did.

        The store decides (S3: If-None-Match). A store without this function overwrites the object: test the store first.
        """
        path = self._path(name)

        def create(_: Any) -> None:
            if self._has_folders:
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
                with self._fs.open(path, "xb") as file:  # its pipe_file looks first and then writes
                    file.write(content)
            else:
                self._fs.pipe_file(path, content, mode="create")

        try:
            self._answer(f"created: {name}", create)
            return True
        except StoreFailed as failure:  # not all stores report an existing object; a repeated request finds its own object
            there = self.read(name) if isinstance(failure.__cause__, OSError) else None
            if there is None:
                raise
            return there == content

    def put(self, path: Path, name: str) -> None:
        """Copy a file into an object. The object may exist already."""
        num_bytes = path.stat().st_size  # a store may take a file as one request, without reports
        self._answer(f"written: {name}", lambda transfer: self._whole(
            name, lambda target: self._fs.put_file(str(path), target, callback=transfer)), num_bytes=num_bytes)  # fmt: skip

    def get(self, name: str, path: Path) -> None:
        """Copy an object into a new file."""
        self._heed_signals()
        self._answer(f"read: {name}", lambda transfer: self._fs.get_file(self._path(name), str(path), callback=transfer))

    def move(self, name: str, to: "Objects", *, num_bytes: int) -> None:
        """Move an object to another place in the same store."""
        self._answer(f"moved: {name}", lambda _: to._whole(name, lambda target: self._fs.mv(self._path(name), target)),
                     num_bytes=num_bytes)  # fmt: skip

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        try:
            self._answer(f"removed: {name}", lambda _: self._fs.rm_file(self._path(name)))
        except StoreFailed as failure:
            if not isinstance(failure.__cause__, FileNotFoundError):
                raise

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _whole(self, name: str, write: Callable[[str], object]) -> None:
        """Write an object. On a file system, write a temporary path beside the object and rename it at the end."""
        path = self._path(name)
        if not self._has_folders:
            write(path)
            return
        self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        write(f"{path}.part")
        self._fs.mv(f"{path}.part", path)

    def _heed_signals(self) -> None:
        if self._heeds_signals and PREEMPTION.requested:
            raise Interrupted("stopped before everything was fetched; the same command continues")

    def _answer(self, what: str, work: Callable[[Any], Answer], *, num_bytes: int = 0) -> Answer:
        """Return the store's answer. Ask in a separate thread, because a silent store would block this thread forever.

        `work` gets fsspec's callback of a transfer, which notes when the store last moved a byte.
        """
        from fsspec.callbacks import Callback

        moved_at, patience_s = time.monotonic(), _PATIENCE_S + num_bytes / _SLOWEST

        def move(*_: Any, **__: Any) -> None:
            nonlocal moved_at
            moved_at = time.monotonic()

        answer = start_in_thread(lambda: work(Callback(hooks={"moved": move})), name="store", daemon=True)
        while not wait([answer], timeout=0.1).done:
            self._heed_signals()
            if time.monotonic() - moved_at > patience_s:
                raise StoreFailed(f"{self.url} cannot be {what}: no answer in {patience_s:.0f} s")
        if (error := answer.exception()) is not None:  # of botocore, aiohttp, google.auth, ...
            said = " ".join(str(error).split())[:300] or type(error).__name__
            lacks_right = "Credentials" in type(error).__name__
            is_wrong = lacks_right or isinstance(error, (FileNotFoundError, PermissionError, ValueError, ImportError))
            raise StoreFailed(f"{self.url} cannot be {what}: {said}", is_wrong=is_wrong) from error
        return answer.result()


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")


def inside(folder: Path, name: str) -> Path:
    """Return the path of an object's file in a folder. Raise StoreFailed if the name leads out of the folder."""
    path = Path(os.path.normpath(folder / name))
    if folder not in path.parents:
        raise StoreFailed(f"an object is called {name!r}, which leads out of the folder", is_wrong=True)
    return path


# --- local copies


@cache  # one process and its forks see one version, even if the store changes
def local_copy(url: str) -> str:
    """Return the path of a copy of a URL's content: an object, a folder of objects, or a pattern (`*.tar`) in a folder.

    Raise StoreFailed if nothing exists, or if it cannot be fetched. Raise Interrupted if a signal arrives during the copy.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    place, pattern = (parent, last) if "*" in last else (url, "")
    there = Objects(place, heeds_signals=True)
    if not (found := there.listing(pattern)):
        raise StoreFailed(f"{url} holds no object", is_wrong=True)

    def is_whole(folder: Path) -> bool:
        paths = {inside(folder, name or last): facts.size for name, facts in found.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())

    def fetch(folder: Path) -> None:
        LOGGER.info("fetching %s: %d files, %.2f GiB", url, len(found), sum(facts.size for facts in found.values()) / 2**30)
        for name in found:
            path = inside(folder, name or last)  # no name: the URL names an object, not a folder
            path.parent.mkdir(parents=True, exist_ok=True)
            there.get(name, path)
        if there.listing(pattern) != found or not is_whole(folder):
            raise StoreFailed(f"{url} has changed during the download; give the command again")

    folder = fetched_once([url, found], fetch, is_whole=is_whole)
    return str(folder / last if pattern or "" in found else folder)


def fetched_once(
    key: list[str | dict[str, ObjectFacts]], fetch: Callable[[Path], None], *, is_whole: Callable[[Path], bool] = lambda _: True
) -> Path:
    """Return the folder of the cache for this key (JSON). `fetch` fills it, unless it exists and `is_whole` accepts it.

    If several processes ask at the same time, one process fetches, and the others wait.
    """
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    make_directory(folder.parent)
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir() or not is_whole(folder):
            with replacing_directory(folder) as beside:
                fetch(beside)
    return folder


def cache_folder() -> Path:
    """Return the folder of the copies: STEADFAST_CACHE, or `steadfast` in the user's folder for caches."""
    named = variables().get("STEADFAST_CACHE")
    return Path(named) if named else Path(variables().get("XDG_CACHE_HOME") or Path.home() / ".cache", "steadfast")
