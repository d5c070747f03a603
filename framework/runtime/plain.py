"""Reading files that a stranger may have written: only our own files, only plain files, only strict JSON of limited size."""

import json
import os
import pwd
import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from framework.runtime.problem import shown

_LARGEST_JSON = 16 << 20  # bytes; enough for the manifest of a checkpoint in 50,000 files


class Invalid(Exception):
    """A file or a directory that does not have the expected content. The message, one line, says why."""


class Plain(BaseModel):
    """A model of JSON that the framework has written: no other keys, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def require_directory(path: Path) -> None:
    """Raise Invalid unless `path` is a directory (not a link to a directory) and belongs to the current user or to root."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Invalid(f"is {_kind(status)} instead of a directory")
    _require_ours(status, "belongs")


def require_file(path: Path) -> int:
    """Return the size of a file, without opening it. Raise Invalid unless it is a plain file of this user or of root."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise Invalid(f"{shown(path.name)} is {_kind(status)} instead of a file")
    _require_ours(status, f"{shown(path.name)} belongs")
    disk = os.statvfs(path)
    if 0 < disk.f_blocks * disk.f_frsize < status.st_size:
        raise Invalid(f"{shown(path.name)} claims {status.st_size} bytes, more than its disk has")
    return status.st_size


def _require_ours(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise Invalid(f"{what} to {_user(status.st_uid)}, who can change it at any moment; if you trust them, copy the "
                      "directory (cp -r) and name the copy")  # fmt: skip


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"another user (uid {uid})"


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device or a pipe")


def read_json(path: Path) -> tuple[str, Any]:
    """Return a file's text and its data. Raise Invalid unless it is a plain, small file of strict JSON."""
    if require_file(path) > _LARGEST_JSON:
        raise Invalid(f"{path.name} is too large")
    try:
        text = path.read_bytes().decode()
        return text, parse_json(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else shown(str(error))
        raise Invalid(f"{path.name} is damaged: {reason}") from None


def parse_json(text: str) -> Any:
    """Parse JSON in which each key occurs once. Raise ValueError or RecursionError for anything else."""
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def first_fault(error: ValidationError) -> str:
    """Return the first fault that pydantic found, as in `progress.step: Input should be a valid integer`."""
    item = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in item["loc"])
    return f"{place[:60]}: {item['msg'][:200]}" if place.isprintable() else item["msg"][:200]
