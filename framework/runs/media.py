"""The media of a run: pictures, sounds, tables and texts, as files `media/NAME/step_STEP.SUFFIX` in the run's directory."""

import math
import re
from pathlib import Path
from typing import NamedTuple

from framework.runtime.files import make_directory, replacing

_KINDS = {".png": "image", ".wav": "audio", ".csv": "table", ".txt": "text"}
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_FILE = re.compile(r"step_(\d{8,})(\.png|\.wav|\.csv|\.txt)")


class Media(NamedTuple):
    """One file of media. `kind` is image, audio, table or text."""

    step: int
    name: str  # with / for groups
    kind: str
    path: Path


def write_media(folder: Path, name: str, content: bytes, *, suffix: str, step: int) -> Media:
    """Write a file of media atomically. A file of the same name, step and kind is replaced."""
    path = folder / name / f"step_{step:08d}{suffix}"
    make_directory(path.parent)
    with replacing(path) as new:
        new.write_bytes(content)
    return Media(step, name, _KINDS[suffix], path)


def list_media(folder: Path, *, until: float = math.inf) -> list[Media]:
    """Return the media in a folder `media` until a step, in the order of the steps."""
    found = [
        Media(int(match[1]), str(path.parent.relative_to(folder)), _KINDS[match[2]], path)
        for path in folder.rglob("step_*")
        if (match := _FILE.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
    ]
    return sorted(item for item in found if item.step <= until)


def remove_media(folder: Path, *, after: int) -> None:
    """Remove the media of the steps after a step, and what a kill has left unfinished: the run continues from there."""
    for part in folder.rglob(".step_*"):
        part.unlink()
    for item in list_media(folder):
        if item.step > after:
            item.path.unlink()
