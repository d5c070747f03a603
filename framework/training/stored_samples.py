"""The first samples of a split as they are stored: for the loggers, and as a picture next to the predictions."""

from pathlib import Path
from typing import Any

import numpy as np

from framework.data.source import Source
from framework.loggers.sink import Samples
from framework.runtime.files import replacing

_PIXELS = 64  # of the longer side of an image in a picture


def stored_samples(source: Source, dataset: Any, *, count: int = 8) -> Samples:
    """Return the first samples, as images or texts if they are images or texts. Not collective."""
    inputs, _ = source.gather(np.arange(min(count, len(source))))
    if not isinstance(inputs, np.ndarray):
        return Samples(images=None, texts=None)
    if np.issubdtype(inputs.dtype, np.integer) and inputs.ndim == 2:
        decode = getattr(dataset, "decode", lambda tokens: " ".join(map(str, tokens)))
        return Samples(images=None, texts=[decode(tokens) for tokens in inputs])
    is_image = inputs.dtype == np.uint8 and inputs.ndim == 4 and inputs.shape[1] in (1, 3)
    return Samples(images=inputs.tolist() if is_image else None, texts=None)


def write_picture(samples: Samples, target: Path) -> None:
    """Write images side by side as a PNG, each in a square of 64 pixels; without images, remove the file. Not collective."""
    if samples.images is None:
        target.unlink(missing_ok=True)
        return
    from PIL import Image  # a run that only trains need not import it

    picture = Image.new("RGB", (_PIXELS * len(samples.images), _PIXELS))
    for number, image in enumerate(samples.images):
        pixels_HWC = np.array(image, dtype=np.uint8).transpose(1, 2, 0)
        one = Image.fromarray(pixels_HWC.repeat(3 // pixels_HWC.shape[2], axis=2))
        scale = _PIXELS / max(one.size)
        size = max(1, round(one.width * scale)), max(1, round(one.height * scale))
        picture.paste(one.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX), (_PIXELS * number, 0))
    with replacing(target) as new, open(new, "wb") as file:
        picture.save(file, format="PNG")
