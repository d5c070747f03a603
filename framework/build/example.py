"""The inputs of two samples, by which a model's forward is followed without numbers."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from framework.build import components
from framework.data.loader import Loader
from framework.data.order import Order
from framework.data.source import Dataset, Selected, Source
from framework.modules.tensors import Tree, map_tensors
from framework.randomness import seeded


def example_inputs(dataset: Dataset, load: Callable[[], Source], *, dtype: torch.dtype) -> Tree | None:
    """Return the inputs of two samples: by the dataset's facts, or as `load()` has them. Only integers have storage.

    None if they cannot be loaded: the rehearsal names the reason, and an existing run may have no training data any more.
    """
    if (known := components.example(dataset.info, dtype=dtype)) is not None:
        return known
    with suppress(Exception):
        source, device = load(), torch.device("cpu")
        two = Selected(source, np.arange(min(2, len(source))))
        order = Order(num_samples=len(two), global_batch_size=2, seed=0, drop_last=False)
        loader = Loader(dataset, two, order=order, micro_batch_size=2, dp_rank=0, dp_size=1, device=device, dtype=dtype)
        loader.num_workers = 0
        with seeded(0):  # the samples may draw
            (batch, *_) = next(loader.evaluate()).micro_batches
        return map_tensors(lambda tensor: tensor.to("meta") if tensor.is_floating_point() else tensor, batch.inputs)
    return None
