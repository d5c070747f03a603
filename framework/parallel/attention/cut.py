"""The tokens of a sample that a process has under context parallelism, and the share of their loss in the sample's loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from framework.engine.seam import MicroBatch, Task
from framework.engine.sums import Value


@dataclass(kw_only=True)
class Cut:
    """The cut of the current samples: runs of tokens, with sizes that differ by at most one; each rank has some runs."""

    rank: int
    runs: Sequence[Sequence[int]]  # the numbers of each rank's runs, by their places in a sample
    sizes: list[int] = field(default_factory=list)  # the number of tokens of each run
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def contiguous(cls, *, rank: int, size: int) -> "Cut":
        """Return the cut in which each of `size` ranks has one run."""
        return cls(rank=rank, runs=[(r,) for r in range(size)])

    @classmethod
    def zigzag(cls, *, rank: int, size: int) -> "Cut":
        """Return the cut in which each rank has an early and a late run, so that each has as much work in causal attention."""
        return cls(rank=rank, runs=[(r, 2 * size - 1 - r) for r in range(size)])

    @property
    def size(self) -> int:
        return len(self.runs)

    @property
    def counts(self) -> list[int]:
        """The number of each rank's tokens in a sample."""
        return [sum(self.sizes[run] for run in runs) for runs in self.runs]

    @property
    def share(self) -> float:
        return self.counts[self.rank] / sum(self.sizes)

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens in a sample, (T,), increasing."""
        return torch.cat(self._own(torch.arange(sum(self.sizes), device=self.device), dim=0))

    def of(self, whole: MicroBatch) -> MicroBatch:
        """Return this rank's tokens; inputs and targets are (B, T)."""
        num_runs, self.device = sum(map(len, self.runs)), whole.inputs.device
        self.sizes = [run.shape[1] for run in whole.inputs.tensor_split(num_runs, dim=1)]
        inputs, targets = (torch.cat(self._own(tensor, dim=1), dim=1) for tensor in (whole.inputs, whole.targets))
        return whole._replace(inputs=inputs, targets=targets)

    def _own(self, whole: Tensor, *, dim: int) -> list[Tensor]:
        ends = list(accumulate(self.sizes))
        return [whole.narrow(dim, ends[run] - self.sizes[run], self.sizes[run]) for run in self.runs[self.rank]]


class OfSlices:
    """A task for slices of samples.

    A value with its own weight is a sum over tokens. Any other value is a sum over samples of a mean over the tokens of the
    sample, so a slice adds its share.
    """

    def __init__(self, task: Task, cut: Cut) -> None:
        self._task, self._cut = task, cut

    def loss(self, outputs: Any, targets: Any) -> Value:
        return self._of_slice(self._task.loss(outputs, targets))

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Value]:
        return {name: self._of_slice(value) for name, value in self._task.metrics(outputs, targets).items()}

    def _of_slice(self, value: Value) -> Value:
        return value if isinstance(value, tuple) else value * self._cut.share
