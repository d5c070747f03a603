"""The media of a run: pictures, sounds, tables and texts, as files `media/NAME/step_STEP.SUFFIX` in the run's directory."""

import csv
import io
import math
import re
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
    """Remove the media of the steps after a step, because the run continues from there."""
    for item in list_media(folder):
        if item.step > after:
            item.path.unlink()


# --- the bytes of a file: the same for the same content


def png_of_pixels(pixels: np.ndarray) -> bytes:
    """Return an image as PNG: (H, W), (C, H, W) or (H, W, C), with C 1, 3 or 4. Floats are from 0 to 1, and others are cut."""
    from PIL import Image  # a run that logs no images need not import it

    shape, buffer = list(pixels.shape), io.BytesIO()
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    pixels = np.moveaxis(pixels, 0, -1) if pixels.ndim == 3 and len(pixels) in (1, 3, 4) else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        remedy = "torchvision.utils.make_grid makes one image of a batch"
        raise ValueError(f"an image of shape {shape} ((H, W), (C, H, W) or (H, W, C), with C 1, 3 or 4; {remedy})")
    if pixels.dtype != np.uint8:
        pixels = (_floats(pixels, least=0, what="an image") * 255).round().astype(np.uint8)
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels)).save(buffer, format="PNG")
    return buffer.getvalue()


def png_of_figure(figure: Any) -> bytes:
    """Return a figure of matplotlib as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # no version of matplotlib in the file
    return buffer.getvalue()


def wav_of_samples(samples: np.ndarray, *, rate: int) -> bytes:
    """Return sound as WAV in 16 bits: (T,), or (C, T) with C 1 or 2. Floats are from -1 to 1, and others are cut."""
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and len(samples) > 2):
        raise ValueError(f"sound of shape {list(samples.shape)} ((T,), or (C, T) with C 1 or 2)")
    if samples.dtype != np.int16:
        samples = (_floats(samples, least=-1, what="sound") * 32767).round()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(samples) if samples.ndim == 2 else 1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.T.astype("<i2").tobytes())
    return buffer.getvalue()


def _floats(values: np.ndarray, *, least: int, what: str) -> np.ndarray:
    if not np.issubdtype(values.dtype, np.floating):
        kind = "uint8" if least == 0 else "int16"
        raise ValueError(f"{what} of {values.dtype} ({kind}, or floats from {least} to 1)")
    return np.nan_to_num(values).clip(least, 1)


def csv_of_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """Return a table as CSV: a line of names, then a line for each row."""
    if wrong := [number for number, row in enumerate(rows) if len(row) != len(columns)]:
        raise ValueError(f"row {wrong[0]} of a table has {len(rows[wrong[0]])} values, and there are {len(columns)} columns")
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows([columns, *rows])
    return buffer.getvalue().encode()


def read_table(path: Path) -> list[list[str]]:
    """Return the lines of a table; the first has the names of the columns."""
    with open(path, newline="") as file:
        return list(csv.reader(file))
