"""Pictures, sounds and tables as the bytes of a file: the same bytes for the same content."""

import csv
import io
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def png_of_pixels(image: Any) -> bytes:
    """Return an image as PNG: (H, W), (C, H, W) or (H, W, C), or a batch (B, C, H, W) as a grid, with C 1, 3 or 4; or PIL's.

    The values are uint8, or floats from 0 to 1 (others are cut). If both ends of a shape may be C, an array has it last, and a
    tensor first.
    """
    from torchvision.utils import save_image  # type: ignore[import-untyped]  # unannotated; needed for images only

    given = (image if isinstance(image, torch.Tensor) else torch.from_numpy(np.array(image))).detach()
    buffer = io.BytesIO()
    is_array = not isinstance(image, torch.Tensor)
    is_last = given.ndim == 3 and (len(given) not in (1, 3, 4) or (is_array and given.shape[-1] in (1, 3, 4)))
    pixels = given.movedim(-1, 0) if is_last else given
    is_image = pixels.ndim == 2 or (pixels.ndim in (3, 4) and pixels.shape[-3] in (1, 3, 4))
    if not is_image or not pixels.numel() or not (pixels.dtype == torch.uint8 or pixels.is_floating_point()):
        rule = "(H, W), (C, H, W), (H, W, C) or (B, C, H, W), with C 1, 3 or 4; uint8, or floats from 0 to 1"
        raise ValueError(f"an image of shape {list(given.shape)} and {given.dtype} ({rule})")
    save_image((pixels.float() if pixels.is_floating_point() else pixels / 255).nan_to_num(), buffer, format="png")
    return buffer.getvalue()


def png_of_figure(figure: Any) -> bytes:
    """Return a figure of matplotlib as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # no version of matplotlib in the file
    return buffer.getvalue()


def wav_of_samples(samples: Any, *, rate: int) -> bytes:
    """Return sound as WAV in 16 bits: (T,), or (C, T) with C 1 or 2; int16, or floats from -1 to 1 (others are cut)."""
    values, buffer = torch.atleast_2d(torch.as_tensor(samples).detach().cpu()), io.BytesIO()
    if values.ndim > 2 or len(values) > 2 or not (values.dtype == torch.int16 or values.is_floating_point()):
        rule = "(T,), or (C, T) with C 1 or 2; int16, or floats from -1 to 1"
        raise ValueError(f"sound of shape {list(values.shape)} and {values.dtype} ({rule})")
    if values.is_floating_point():
        values = (values.double().nan_to_num().clamp(-1, 1) * 32767).round().short()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(values), 2, rate, 0, "NONE", ""))
        file.writeframes(values.T.numpy().astype("<i2").tobytes())
    return buffer.getvalue()


def csv_of_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """Return a table as CSV: a line of names, then a line for each row."""
    if wrong := [number for number, row in enumerate(rows) if len(row) != len(columns)]:
        raise ValueError(f"row {wrong[0]} of a table has {len(rows[wrong[0]])} values, and there are {len(columns)} columns")
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows([columns, *rows])
    return buffer.getvalue().encode()
