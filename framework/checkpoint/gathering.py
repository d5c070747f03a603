"""Tensors of all ranks on rank 0, one after the other, for a file. No rank has all tensors in memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.checkpoint.format import Kinds
from framework.distributed.world import World
from framework.modules.tensors import whole


@dataclass(frozen=True)
class OnRank0:
    """Tensors of all ranks, plain or sharded, by name: their kinds, and on rank 0 the whole tensors one by one.

    Every rank must iterate over `tensors` to the end, because the iteration is collective.
    """

    kinds: Kinds  # in the order of `tensors`
    tensors: Iterator[Tensor]  # on the CPU; empty on the other ranks

    def drain(self) -> None:
        for _ in self.tensors:
            pass


def gathered(own: Mapping[str, Tensor], *, world: World) -> OnRank0:
    """Gather tensors, each from the first rank that has it. Collective."""
    agreement, found = world.agreement, dict[str, tuple[torch.dtype, Sequence[int], int]]()
    for rank, table in enumerate(agreement.to_rank_0({name: (value.dtype, value.shape) for name, value in own.items()})):
        for name, kind in table.items():
            found.setdefault(name, (*kind, rank))
    found = agreement.from_rank_0(dict(sorted(found.items(), key=lambda item: (-item[1][0].itemsize, item[0]))))

    def stream() -> Iterator[Tensor]:
        for name, (dtype, shape, sender) in found.items():
            value = whole(own[name]).detach().to("cpu").contiguous() if name in own else torch.empty(shape, dtype=dtype)
            if world.rank == sender != 0:
                dist.send(value, dst=0, group=agreement.group)
            elif world.rank == 0:
                if sender:
                    dist.recv(value, src=sender, group=agreement.group)
                yield value

    return OnRank0({name: (dtype, shape) for name, (dtype, shape, _) in found.items()}, stream())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors under all their names, without the modules' other state."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
