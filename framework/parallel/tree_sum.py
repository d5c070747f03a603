"""A sum along a binary tree over numbered leaves: its bits do not depend on which rank has which leaf."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Node = tuple[int, int]  # the leaves from the first to before the second


def halves(node: Node) -> tuple[Node, Node]:
    """Return the two nodes below one of several leaves: the left has the largest power of two of them that leaves some."""
    start, stop = node
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


class TreeSum:
    """The sum of one tensor from each leaf. Rank r has the leaves from bounds[r] to before bounds[r + 1], rank 0 the first.

    A rank keeps the sums of the complete subtrees among its leaves, log2 of their number at most; only such sums travel.
    """

    def __init__(self, bounds: Sequence[int], *, rank: int) -> None:
        self._rank = rank
        self._num_ranks = len(bounds) - 1
        self._owners = [r for r in range(len(bounds) - 1) for _ in range(bounds[r], bounds[r + 1])]
        self._beside: dict[Node, Node] = {}
        self._sums: dict[Node, Tensor] = {}
        self._root = (0, bounds[-1])
        self._find_beside(self._root)

    def _find_beside(self, node: Node) -> None:
        if node[1] - node[0] > 1:
            left, right = halves(node)
            self._beside[left], self._beside[right] = right, left
            self._find_beside(left)
            self._find_beside(right)

    def add(self, leaf: int, value: Tensor) -> None:
        """Take in a leaf of this rank's; `value` may be changed. Every leaf comes once, in any order."""
        node = (leaf, leaf + 1)
        while node != self._root and self._beside[node] in self._sums:
            other = self._beside[node]
            value = self._sums.pop(other).add_(value)  # a + b is b + a, to the last bit
            node = min(node, other)[0], max(node, other)[1]
        self._sums[node] = value

    def total(self, like: Tensor) -> Tensor:
        """Return the sum over all ranks' leaves, on every rank; it is shaped like `like`. Collective."""
        self._gather(self._root, like)
        total = self._sums.get(self._root)
        if total is None:
            total = torch.empty_like(like)
        if self._num_ranks > 1:
            dist.broadcast(total, src=0)
        return total

    def _gather(self, node: Node, like: Tensor) -> None:
        """Bring a node's sum to the owner of its first leaf."""
        if self._owners[node[0]] == self._owners[node[1] - 1]:
            return  # it is there
        left, right = halves(node)
        self._gather(left, like)
        self._gather(right, like)
        receiver, sender = self._owners[left[0]], self._owners[right[0]]
        if self._rank == sender != receiver:
            dist.send(self._sums.pop(right), dst=receiver)
        elif self._rank == receiver:
            value = self._sums.pop(right) if sender == receiver else torch.empty_like(like)
            if sender != receiver:
                dist.recv(value, src=sender)
            self._sums[node] = self._sums.pop(left).add_(value)
