"""The parts of tensors that ranks hold: the place of each part in the whole tensor, and the rank that writes it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass
class WritePlan:
    """A plan that distributes chunks: one rank writes each chunk, and shared chunks are distributed as evenly as possible."""

    world: World
    _held: set[Chunk] = field(default_factory=set, init=False)
    _mine: set[str] = field(default_factory=set, init=False)  # names are enough: a rank has one chunk of a tensor

    def mine(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with a part that this rank writes. Collective.

        The ranks exchange what they hold only if this has changed since the last call.
        """
        held = chunks_of(tensors)
        if any(self.world.agreement.distinct(held.keys() != self._held).values()):
            self._held = set(held)
            table = {chunk: part.numel() * part.element_size() for chunk, part in held.items()}
            self._mine = {chunk.name for chunk in self.world.agreement.scatter_plan(table, deal)}
        return {name: tensor for name, tensor in tensors.items() if name in self._mine}


def deal(tables: list[dict[Chunk, int]]) -> list[set[Chunk]]:
    """Return the chunks that each rank writes. `tables` has the bytes of each rank's chunks."""
    holders: dict[Chunk, list[int]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for chunk in table:
            holders[chunk].append(rank)
    loads, dealt = [0] * len(tables), [set[Chunk]() for _ in tables]
    # first what only one rank has, then what several ranks have, the largest first
    order = sorted(holders, key=lambda chunk: (len(holders[chunk]) > 1, -tables[holders[chunk][0]][chunk], chunk))
    for chunk in order:
        writer = min(holders[chunk], key=lambda rank: (loads[rank], rank))
        loads[writer] += tables[writer][chunk]
        dealt[writer].add(chunk)
    return dealt
