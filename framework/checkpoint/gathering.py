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

    kinds: Kinds  # in the order of `tensors`; on other ranks, only the rank's own tensors
    tensors: Iterator[Tensor]  # on the CPU; empty on the other ranks

    def drain(self) -> None:
        for _ in self.tensors:
            pass


def gathered(own: Mapping[str, Tensor], *, world: World) -> OnRank0:
    """Gather tensors, each from the first rank that has it. Collective. Only rank 0 gets all names."""
    kinds: dict[str, tuple[torch.dtype, Sequence[int]]] = {name: (value.dtype, value.shape) for name, value in own.items()}
    senders: dict[str, int] = {}

    def deal(tables: list[Kinds]) -> list[set[str]]:
        for rank, table in enumerate(tables):
            for name, kind in table.items():
                kinds.setdefault(name, kind)
                senders.setdefault(name, rank)
        return [{name for name, sender in senders.items() if sender == rank} for rank in range(len(tables))]

    sent = world.agreement.scatter_plan(dict(kinds), deal)
    order = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))  # the same order for all names and for a subset

    def stream() -> Iterator[Tensor]:
        for name in order:
            if name in own:
                value = whole(own[name]).detach().to("cpu").contiguous()
                if world.rank == 0:
                    yield value
                elif name in sent:
                    dist.send(value, dst=0, group=world.agreement.group)
            else:
                dtype, shape = kinds[name]
                received = torch.empty(shape, dtype=dtype)
                dist.recv(received, src=senders[name], group=world.agreement.group)
                yield received

    return OnRank0({name: kinds[name] for name in order}, stream())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors under all their names, without the modules' other state."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
