"""The parts of tensors that ranks hold: the place of each part in the whole tensor, and the rank that writes it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from framework.checkpoint.format import Chunk
from framework.distributed.world import World
from framework.modules.tensors import local
from framework.runtime.torch_internals import shard_offsets


def chunk_of(name: str, tensor: Tensor) -> Chunk:
    """Return the place of this rank's part of a tensor (plain or DTensor)."""
    offsets = shard_offsets(tensor) if hasattr(tensor, "device_mesh") else (0,) * tensor.ndim
    return Chunk(name, offsets, tuple(local(tensor).shape))


def chunks_of(tensors: Mapping[str, Tensor]) -> dict[Chunk, Tensor]:
    """Return this rank's parts, which share the tensors' memory. Skip an empty part, unless the whole tensor is empty."""
    parts = {chunk_of(name, tensor): local(tensor) for name, tensor in tensors.items()}
    return {chunk: part for chunk, part in parts.items() if part.numel() or not tensors[chunk.name].numel()}


class Holding(NamedTuple):
    """What one rank holds, in bytes: all that no other rank has, and each chunk that other ranks have too."""

    own: int
    shared: dict[Chunk, int]


@dataclass
class WritePlan:
    """A plan that distributes chunks: one rank writes each chunk, and shared chunks are distributed as evenly as possible."""

    world: World
    _held: set[Chunk] = field(default_factory=set, init=False)
    _mine: set[str] = field(default_factory=set, init=False)  # names are enough: a rank has one chunk of a tensor

    def mine(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with a part that this rank writes. Collective.

        The ranks exchange what they share only if what they hold has changed since the last call.
        """
        held = chunks_of(tensors)
        if any(self.world.agreement.distinct(held.keys() != self._held).values()):
            self._held = set(held)
            sizes = {chunk: part.numel() * part.element_size() for chunk, part in held.items()}
            own = self._own(tensors, held)
            shared = {chunk: size for chunk, size in sizes.items() if chunk.name not in own}
            holding = Holding(sum(sizes.values()) - sum(shared.values()), shared)
            self._mine = own | {chunk.name for chunk in self.world.agreement.scatter_plan(holding, deal)}
        return {name: tensor for name, tensor in tensors.items() if name in self._mine}

    def _own(self, tensors: Mapping[str, Tensor], held: Mapping[Chunk, Tensor]) -> set[str]:
        """Return the tensors of which no other rank has this rank's part: all parts are as large as the tensor. Collective."""
        names = sorted(set().union(*self.world.agreement.distinct(sorted(tensors)).values()))
        counts = dict.fromkeys(names, 0) | {chunk.name: part.numel() for chunk, part in held.items()}
        totals = dict(zip(names, self.world.agreement.sum(torch.tensor(list(counts.values()))).tolist()))
        return {name for name, tensor in tensors.items() if totals[name] == tensor.numel() > 0}


def deal(holdings: list[Holding]) -> list[set[Chunk]]:
    """Return the shared chunks that each rank writes."""
    holders: dict[Chunk, list[int]] = defaultdict(list)
    for rank, holding in enumerate(holdings):
        for chunk in holding.shared:
            holders[chunk].append(rank)
    loads, dealt = [holding.own for holding in holdings], [set[Chunk]() for _ in holdings]
    for chunk in sorted(holders, key=lambda chunk: (-holdings[holders[chunk][0]].shared[chunk], chunk)):  # the largest first
        writer = min(holders[chunk], key=lambda rank: (loads[rank], rank))
        loads[writer] += holdings[writer].shared[chunk]
        dealt[writer].add(chunk)
    return dealt
