"""The conversion of an image file into an array."""

from pathlib import Path

import numpy as np

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def decode_image(path: str | Path, *, image_size: int, in_channels: int) -> np.ndarray:
    """Read an image as uint8 (C, image_size, image_size): its centre square, resized bilinearly."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = file.convert("L" if in_channels == 1 else "RGB")
    except (OSError, Image.DecompressionBombError) as error:  # not all of PIL's errors about content name the file
        raise ValueError(f"{path} cannot be read as an image: {error} (remove or replace it)") from error
    pixels = np.asarray(ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR))
    return pixels[None] if in_channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
