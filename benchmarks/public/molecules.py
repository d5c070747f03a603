"""Graphs of torch-geometric, joined into one."""

from typing import Any

from torch import Tensor
from torch_geometric.data import Batch


def joined(graphs: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    batch = Batch.from_data_list(graphs)
    return {name: batch[name] for name in ("x", "edge_index", "edge_attr", "batch")}, batch.y
