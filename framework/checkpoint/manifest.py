"""The commit protocol of a checkpoint directory: a manifest with checksums, one rename, and the checks of both."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from xxhash import xxh3_128_hexdigest

from framework.checkpoint.hashed import digest
from framework.checkpoint.state import STATE, Natural, checked_state
from framework.runtime.files import checksum, flush_directory, write_atomically
from framework.runtime.plain import Invalid, Plain, first_fault, read_json, require_directory, require_file
from framework.runtime.problem import shown

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_([0-9]{8,18})")


class _Entry(Plain):
    size: Natural
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class _Manifest(Plain):
    """Only the names that we give are allowed: no other kind of file, and no path that leads out of the checkpoint."""

    format: Literal[2]
    step: Natural
    files: dict[Annotated[str, Field(pattern=r"^shard-\d+\.safetensors$")], _Entry]
    state: dict[str, Any]
    xxh3_128: str  # of all the others


class _OldEntry(Plain):
    size: Natural
    blake2b: str = Field(pattern="^[0-9a-f]{128}$")


class _OldManifest(Plain):
    """Format 1, which is still read: the state was in a file of its own."""

    format: Literal[1]
    step: Natural
    files: dict[Annotated[str, Field(pattern=r"^(state\.json|shard-\d+-model-\d+-of-\d+\.safetensors)$")], _OldEntry]


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's directory name, or None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def commit(directory: Path, *, target: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
    """Turn a directory of flushed files into the checkpoint `target`: manifest, flush, one rename, flush. Rank 0 only.

    A damaged checkpoint at `target`, which has been passed over already, is deleted first.
    """
    content = {"format": 2, "step": step_of(target), "files": files, "state": state}
    write_atomically(directory / MANIFEST, manifest_text(content))
    flush_directory(directory)
    if os.path.lexists(target):
        discard(target)
    os.rename(directory, target)
    flush_directory(target.parent)


def manifest_text(content: dict[str, Any]) -> str:
    """Return a manifest's text, to which format 2 adds a checksum of itself."""
    if content["format"] == 1:
        return json.dumps(content, indent=1, sort_keys=True) + "\n"
    content = {name: value for name, value in content.items() if name != "xxh3_128"}
    own = xxh3_128_hexdigest(json.dumps(content).encode())
    return json.dumps(content | {"xxh3_128": own}, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return {file name: size and checksum}, after checking all but the files' contents and the state. Raises Invalid.

    A manifest proves that nothing has changed since it was written; it does not prove who wrote it. The checks here and
    in `state` and `tensors` hold also for a directory that was made to do harm.
    """
    require_directory(path)
    content = _content(path)
    try:
        model = _OldManifest if content.get("format") == 1 else _Manifest
        manifest = model.model_validate(content)
    except ValidationError as error:
        raise Invalid(f"{MANIFEST} is damaged: {first_fault(error)}") from None
    if manifest.step != step_of(path):
        raise Invalid(f"{MANIFEST} is of step {manifest.step}")
    present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    if missing := sorted({*([STATE] if model is _OldManifest else []), *manifest.files} - present):
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
    # our own manifest is exactly what we would write again: any flipped bit is found
    if not isinstance(content, dict) or "format" not in content or text != manifest_text(content):
        raise Invalid(f"{MANIFEST} is damaged")
    return content


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's plain state. Raises Invalid if it is not what a run writes."""
    content = _content(path)
    return checked_state(content["state"] if "state" in content else read_json(path / STATE)[1])


def verify_file(path: Path, entry: dict[str, Any]) -> None:
    """Check one file against its manifest entry. Raises Invalid."""
    try:
        actual = digest(path) if "blake2b" not in entry else dict(zip(("size", "blake2b"), checksum(path)))
    except OSError as error:
        raise Invalid(f"{path.name} cannot be read ({error.strerror})") from None
    if actual != entry:
        raise Invalid(f"{path.name} does not match its checksum")


def candidates(directory: Path) -> list[Path]:
    """Return the paths that look like checkpoints, the newest first. Nothing is verified."""
    found = [path for path in directory.glob("step_*") if step_of(path) is not None and os.path.isdir(path)]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def discard(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a crash does not leave half of it."""
    trash = path.with_name(f".trash_{path.name}")
    remove(trash)
    os.rename(path, trash)
    remove(trash)


def remove_unfinished(directory: Path) -> None:
    """Remove what crashed saves and deletions left. Only for the process that holds the run's lock."""
    for leftover in [*directory.glob(".tmp_*"), *directory.glob(".trash_*")]:
        remove(leftover)


def remove(path: Path) -> None:
    """Delete a directory, or a file; a link itself, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoints_of(path: Path) -> Path:
    """Return the folder of checkpoints of `path`, a run or one of its checkpoints."""
    return path.parent if step_of(path) is not None else path / "checkpoints"
