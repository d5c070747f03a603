"""The commit protocol of a checkpoint directory: a manifest with checksums, one rename, and the checks of both."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from xxhash import xxh3_128_hexdigest

from framework.checkpoint.format import digest
from framework.checkpoint.state import Natural, checked_state
from framework.runtime.files import flush_to_disk, write_atomically
from framework.runtime.plain import Invalid, Plain, first_fault, read_json, require_directory, require_file
from framework.runtime.problem import shown

MANIFEST = "manifest.json"
_ASIDE = ".aside_"  # before the name of a checkpoint, while a new checkpoint of the same step replaces it
_NAME = re.compile(r"step_([0-9]{8,18})")


class _Entry(Plain):
    size: Natural
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class _Manifest(Plain):
    """A manifest. It allows only the framework's file names: no other kind of file, and no path out of the checkpoint."""

    format: Literal[2]
    step: Natural
    files: dict[Annotated[str, Field(pattern=r"^shard-\d+\.safetensors$")], _Entry]
    state: dict[str, Any]
    xxh3_128: str  # of all other fields


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's directory name. Return None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def commit(directory: Path, *, target: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
    """Turn a directory of flushed files into the checkpoint `target`: manifest, flush, one rename, flush. Rank 0 only.

    An earlier checkpoint at `target` is put aside first, and deleted last: `put_back` mends a crash in between.
    """
    content = {"format": 2, "step": step_of(target), "files": files, "state": state}
    write_atomically(directory / MANIFEST, manifest_text(content))
    flush_to_disk(directory)
    aside = target.with_name(_ASIDE + target.name)
    if is_replaced := os.path.lexists(target):
        remove(aside)
        os.rename(target, aside)
    os.rename(directory, target)
    flush_to_disk(target.parent)
    if is_replaced:
        remove(aside)


def manifest_text(content: dict[str, Any]) -> str:
    """Return a manifest's text, which contains its own checksum."""
    content = {name: value for name, value in content.items() if name != "xxh3_128"}
    own = xxh3_128_hexdigest(json.dumps(content).encode())
    return json.dumps(content | {"xxh3_128": own}, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return {file name: size and checksum}. Check everything except the files' contents and the state. Raise Invalid.

    A manifest proves that nothing has changed since it was written. It does not prove who wrote it. The checks here, in
    `state` and in `format` also work for a directory that was made to do harm.
    """
    require_directory(path)
    content = _content(path)
    try:
        manifest = _Manifest.model_validate(content)
    except ValidationError as error:
        raise Invalid(f"{MANIFEST} is damaged: {first_fault(error)}") from None
    if manifest.step != step_of(path):
        raise Invalid(f"{MANIFEST} is of step {manifest.step}")
    present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    if missing := sorted(manifest.files.keys() - present):
        raise Invalid(f"{missing[0]} is missing")
    if unknown := sorted(present - manifest.files.keys()):
        raise Invalid(f"{shown(unknown[0])} is not in the manifest")
    for name, entry in manifest.files.items():
        if (size := require_file(path / name)) != entry.size:
            raise Invalid(f"{name} has {size} bytes instead of {entry.size}")
    return content["files"]


def _content(path: Path) -> dict[str, Any]:
    try:
        text, content = read_json(path / MANIFEST)
    except OSError as error:
        raise Invalid(f"no readable {MANIFEST} ({type(error).__name__})") from None
    # the framework's own manifest is exactly the text that it would write again, so any flipped bit is found
    if not isinstance(content, dict) or text != manifest_text(content):
        raise Invalid(f"{MANIFEST} is damaged")
    return content


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's plain state. Raise Invalid if it does not have the form that a run writes."""
    return checked_state(_content(path).get("state"))


def verify_file(path: Path, entry: dict[str, Any]) -> None:
    """Check one file against its manifest entry. Raise Invalid if they differ."""
    try:
        actual = digest(path)
    except OSError as error:
        raise Invalid(f"{path.name} cannot be read ({error.strerror})") from None
    if actual != entry:
        raise Invalid(f"{path.name} does not match its checksum")


def candidates(directory: Path) -> list[Path]:
    """Return the paths that look like checkpoints, newest first. This verifies nothing."""
    found = [path for path in directory.glob("step_*") if step_of(path) is not None and os.path.isdir(path)]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def discard(path: Path) -> None:
    """Delete a checkpoint. Rename it first, so that a crash does not leave a half-deleted checkpoint."""
    trash = path.with_name(f".trash_{path.name}")
    remove(trash)
    os.rename(path, trash)
    remove(trash)


def put_back(directory: Path) -> None:
    """Rename checkpoints back that were put aside, if a crash came before the rename of their successors. See `commit`.

    Only the process that holds the run's lock may call this, as `remove_unfinished`.
    """
    for aside in directory.glob(f"{_ASIDE}*"):
        target = aside.with_name(aside.name.removeprefix(_ASIDE))
        if os.path.lexists(target):
            flush_to_disk(directory)  # the successor's name, before the old checkpoint is deleted
            remove(aside)
        else:
            os.rename(aside, target)


def remove_unfinished(directory: Path) -> None:
    """Remove the remains of crashed saves and deletions. Only the process that holds the run's lock may call this."""
    put_back(directory)
    for leftover in [*directory.glob(".tmp_*"), *directory.glob(".trash_*")]:
        remove(leftover)


def remove(path: Path) -> None:
    """Delete a directory or a file. For a link, delete the link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoints_of(path: Path) -> Path:
    """Return the folder of checkpoints for `path`, which is a run or one of its checkpoints."""
    return path.parent if step_of(path) is not None else path / "checkpoints"
