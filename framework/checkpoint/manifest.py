"""The commit protocol of a checkpoint directory: a manifest with checksums, one rename, and what tells a good one."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from framework.files import flush_directory, write_atomically

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step_(\d{8,})")


class Invalid(Exception):
    """A directory that is not a valid checkpoint; the message says why."""


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's directory name, or None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def digest(path: Path) -> dict[str, Any]:
    """Return a file's size and checksum (BLAKE2b, which `b2sum` prints too)."""
    checksum, size = hashlib.blake2b(), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
            size += len(block)
    return {"size": size, "blake2b": checksum.hexdigest()}


def commit(directory: Path, *, target: Path, files: dict[str, Any]) -> None:
    """Turn a directory of flushed files into the checkpoint `target`: manifest, flush, one rename, flush. Rank 0 only.

    A damaged checkpoint that stands at `target` is moved out of the way first; it has been passed over already.
    """
    write_atomically(directory / MANIFEST, _manifest_text(step_of(target), files))
    flush_directory(directory)
    if target.exists():
        discard(target)
    os.rename(directory, target)
    flush_directory(target.parent)


def _manifest_text(step: int | None, files: dict[str, Any]) -> str:
    return json.dumps({"format": 1, "step": step, "files": files}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return {file name: size and checksum}, having checked all but the checksums. Raises Invalid."""
    try:
        text = (path / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"no readable {MANIFEST} ({type(error).__name__})") from None
    try:
        manifest = json.loads(text)
        step, files = manifest["step"], manifest["files"]
        # written by us, a manifest is exactly what we would write again: any flipped bit shows
        intact = text == _manifest_text(step, files)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise Invalid(f"{MANIFEST} is damaged")
    if step != step_of(path):
        raise Invalid(f"{MANIFEST} is of step {step}")
    present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    if missing := sorted(files.keys() - present):
        raise Invalid(f"{missing[0]} is missing")
    if unknown := sorted(present - files.keys()):
        raise Invalid(f"{unknown[0]} is not in the manifest")
    for name, entry in files.items():
        if (size := (path / name).stat().st_size) != entry["size"]:
            raise Invalid(f"{name} has {size} bytes instead of {entry['size']}")
    return files


def verify_file(path: Path, entry: dict[str, Any]) -> None:
    """Check one file against its manifest entry. Raises Invalid."""
    try:
        actual = digest(path)
    except OSError as error:
        raise Invalid(f"{path.name} cannot be read ({error.strerror})") from None
    if actual != entry:
        raise Invalid(f"{path.name} does not match its checksum")


def candidates(directory: Path) -> list[Path]:
    """Return what looks like a checkpoint, the newest first. Nothing is verified."""
    found = [path for path in directory.glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def discard(path: Path) -> None:
    """Delete a checkpoint so that a crash in between leaves no half of one: renamed first."""
    trash = path.with_name(f".trash_{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what crashed saves and deletions left behind. Only for the holder of the run's lock."""
    for leftover in [*directory.glob(".tmp_*"), *directory.glob(".trash_*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def checkpoints_of(path: Path) -> Path:
    """Return the folder of checkpoints that `path`, a run or one of its checkpoints, names."""
    return path.parent if step_of(path) is not None else path / "checkpoints"
