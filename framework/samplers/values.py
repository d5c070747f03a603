"""A number for each sample; samplers choose by these numbers."""

from typing import Any

import numpy as np


def values_of(source: Any, where: str, *, key: str) -> np.ndarray:
    """Return a number for each sample, shape (N,), from a numpy file (`.npy`) or from the samples' value with this name.

    Of a part of a dataset (a share, a fold), the file may have numbers for the samples of the whole dataset. ValueError that
    names the key of the configuration, if there are no such numbers.
    """
    try:
        if where.endswith(".npy"):
            values, whole = np.load(where, allow_pickle=False), getattr(source, "num_stored", len(source))
            values = values[source.stored(np.arange(len(source)))] if len(values) == whole != len(source) else values
        else:
            values = np.asarray(source.column(where) if hasattr(source, "column") else getattr(source, where))
        values = values.astype(np.int64) if values.dtype == np.bool_ else values
        if values.shape != (len(source),) or not np.issubdtype(values.dtype, np.number):
            raise ValueError(f"has {values.dtype} of shape {list(values.shape)}, but there are {len(source)} samples")
    except (OSError, ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        expected = "a .npy file with a number for each sample, or the name of a number in the samples"
        raise ValueError(f"{key}={where}: {type(error).__name__}: {error} ({expected})") from error
    return values
