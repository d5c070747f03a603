"""The inputs of two samples, by which a model's forward is followed without numbers."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

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
    known: Tree | None = components.example(dataset.info, dtype=dtype)
    with suppress(Exception):
        return known if known is not None else _first_inputs(dataset, load(), dtype=dtype)
    return None


def _first_inputs(dataset: Dataset, source: Source, *, dtype: torch.dtype) -> Tree:
    two, device = Selected(source, np.arange(min(2, len(source)))), torch.device("cpu")
    order = Order(num_samples=len(two), global_batch_size=2, seed=0, drop_last=False)
    loader = Loader(dataset, two, order=order, micro_batch_size=2, dp_rank=0, dp_size=1, device=device, dtype=dtype)
    loader.num_workers = 0
    with seeded(0):  # the samples may draw
        (batch, *_) = next(loader.evaluate()).micro_batches

    def without_storage(tensor: Tensor) -> Tensor:
        return tensor.to("meta") if tensor.is_floating_point() else tensor

    return map_tensors(without_storage, batch.inputs)
