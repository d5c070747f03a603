"""What a run holds that a checkpoint keeps."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from framework.optim.update import Average


class HeldParts(Protocol):
    """The state of a run's parts, by paths: tensors, and the rest, encoded.

    Tensors are loaded in place; those that a new part does not have yet, or has of another shape, are given `late`.
    """

    def tensors(self) -> dict[str, Tensor]: ...

    def plain(self) -> dict[str, Any]: ...

    def give_back(self, plain: Mapping[str, Any], late: Mapping[str, Tensor]) -> None: ...


class Held(NamedTuple):
    """What a run holds that a checkpoint keeps."""

    module: nn.Module
    optimizer: Optimizer
    average: Average | None
    task: nn.Module | None = None  # its buffers
    parts: HeldParts | None = None
