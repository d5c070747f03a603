"""The objects of a run with state that a checkpoint keeps."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from framework.optim.update import Average


class PartsState(Protocol):
    """The state of a run's parts, by paths: tensors, and other values in encoded form.

    Tensors are loaded in place. `late` contains the tensors that a new part does not have yet, or has with another shape.
    """

    def tensors(self) -> dict[str, Tensor]: ...

    def plain(self) -> dict[str, Any]: ...

    def give_back(self, plain: Mapping[str, Any], late: Mapping[str, Tensor]) -> None: ...


class TrainingState(NamedTuple):
    """The objects of a run with state that a checkpoint keeps."""

    module: nn.Module
    optimizer: Optimizer
    average: Average | None
    task: nn.Module | None = None  # its buffers are kept
    parts: PartsState | None = None
