"""A check that the ranks run the same blocks and use the same weights, which FSDP needs and does not check."""

from collections.abc import Sequence
from functools import partial

from torch import nn

_BITS = 52  # so that a float64 holds the number


class Trail:
    """What this rank has done since its start, as a number: the order of its blocks' calls, and the weights with gradients.

    FSDP pairs the messages of the ranks by their order. If ranks call other blocks, or have gradients of other weights, and the
    sizes happen to be equal, then the gathered weights or the summed gradients are wrong, without a message.
    """

    def __init__(self, units: Sequence[nn.Module], model: nn.Module) -> None:
        self.number = 0
        self._parameters = [p for p in nn.Module.parameters(model) if p.requires_grad]
        for place, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._called, place))

    def _called(self, place: int, *_: object) -> None:
        self._add(place)

    def end_step(self) -> None:
        """Note which weights have a gradient. Call it after a step's last backward pass."""
        self._add(hash(tuple(p.grad is not None for p in self._parameters)))

    def _add(self, value: int) -> None:
        self.number = hash((self.number, value)) % 2**_BITS
