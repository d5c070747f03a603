"""Local copies of objects in an object store: complete or absent, fetched once, and again after a change in the store."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from framework.runtime.environment import variables
from framework.runtime.files import locked, make_directory, replacing_directory
from framework.runtime.log import LOGGER
from framework.runtime.objects import ObjectFacts, Objects, StoreFailed, inside


class Copy(NamedTuple):
    """A copy of the content of a URL."""

    path: str
    version: str  # changes with the content in the store


@cache  # one process and its forks see one version, even if the store changes
def local_copy(url: str) -> Copy:
    """Return a copy of the content of a URL: an object, a folder of objects, or a pattern of names (`*.tar`) in a folder.

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
    return Copy(str(folder / last if pattern or "" in found else folder), version=folder.name)


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
