"""How many nodes `launch.nnodes` allows."""

import re
from typing import Any


def node_counts(nnodes: Any) -> range | None:
    """Return the numbers of nodes that `launch.nnodes`, a number or MIN:MAX, allows; None if it says something else."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", str(nnodes))
    counts = range(int(match[1]), int(match[2] or match[1]) + 1) if match is not None else range(0)
    return counts or None
