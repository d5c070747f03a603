"""Bitwise invariance: gradients with bits that do not depend on the number of processes."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.world import World
from framework.engine.engine import Engine, RunPass
from framework.engine.forward import Forward
from framework.engine.seam import MicroBatch, Step
from framework.engine.sums import Sums
from framework.modules.tensors import moved
from framework.optim.optimizers import MakeOptimizer

Subtree = tuple[int, int]  # of a tree: its leaves are range(start, stop)


def inner_nodes(root: Subtree) -> Iterator[tuple[Subtree, Subtree, Subtree]]:
    """Yield each node that has several leaves, with its left and right child; children come before their parent.

    The left child has the largest power of two below the number of leaves.
    """
    start, stop = root
    if stop - start > 1:
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        left, right = (start, middle), (middle, stop)
        yield from inner_nodes(left)
        yield from inner_nodes(right)
        yield root, left, right


class TreeSum:
    """The sum of one tensor from each leaf. Rank r has the leaves range(bounds[r], bounds[r + 1]).

    A rank keeps the sums of the complete subtrees among its leaves: at most log2 of their number. Ranks send only these sums.
    """

    def __init__(self, bounds: Sequence[int], *, rank: int) -> None:
        self._rank = rank
        self._num_ranks = len(bounds) - 1
        self._owners = [r for r in range(len(bounds) - 1) for _ in range(bounds[r], bounds[r + 1])]
        self._sums: dict[Subtree, Tensor] = {}
        self._root = (0, bounds[-1])
        self._inner = list(inner_nodes(self._root))
        self._above = {one: (node, other) for node, *pair in self._inner for one, other in (pair, pair[::-1])}

    def add(self, leaf: int, value: Tensor) -> None:
        """Add one of this rank's leaves; `value` may be changed. Every leaf must be added once, in any order."""
        node = (leaf, leaf + 1)
        while node in self._above and self._above[node][1] in self._sums:
            node, sibling = self._above[node]
            value = self._sums.pop(sibling).add_(value)  # a + b has the same bits as b + a
        self._sums[node] = value

    def total(self, like: Tensor) -> Tensor:
        """Return the sum over all ranks' leaves, in the shape of `like`, on every rank. Collective."""
        for node, left, right in self._inner:  # send each node's sum to the owner of its first leaf
            receiver, sender = self._owners[left[0]], self._owners[right[0]]
            if receiver == self._owners[right[1] - 1]:
                continue  # the owner already has the sum
            if self._rank == sender != receiver:
                dist.send(self._sums.pop(right), dst=receiver)
            elif self._rank == receiver:
                value = self._sums.pop(right) if sender == receiver else torch.empty_like(like)
                if sender != receiver:
                    dist.recv(value, src=sender)
                self._sums[node] = self._sums.pop(left).add_(value)
        total = self._sums[self._root] if self._root in self._sums else torch.empty_like(like)
        if self._num_ranks > 1:
            dist.broadcast(total, src=0)
        return total


def invariant(
    model: nn.Module, *, world: World, forward: Forward, micro_batch_size: int, make_optimizer: MakeOptimizer | None = None
) -> Engine:
    """Return the Engine of a model that every rank of the world holds whole. Collective."""
    model.to(world.device)
    if world.device.type == "cpu":
        torch.set_num_threads(1)  # another number of threads changes the bits of a matrix product
    return Engine(
        module=model,
        forward=forward,
        mesh=world.mesh(replicate=None) if world.world_size > 1 else None,
        dp_rank=world.rank,
        dp_size=world.world_size,
        broadcast=world.broadcast,
        make_optimizer=make_optimizer,
        accumulate=TreeAccumulation(model, micro_batch_size=micro_batch_size, rank=world.rank, num_ranks=world.world_size),
        no_gather="invariance: bitwise, which runs each micro-batch alone",
    )


class TreeAccumulation:
    """Sums the gradients of the global batch's micro-batches along one binary tree, whichever ranks ran them.

    Source: Li et al. 2023, "EasyScale: elastic training with consistent accuracy", which calls them logical workers.
    """

    def __init__(self, module: nn.Module, *, micro_batch_size: int, rank: int, num_ranks: int) -> None:
        self._parameters = [p for p in nn.Module.parameters(module) if p.requires_grad]
        self._micro_batch_size, self._rank, self._num_ranks = micro_batch_size, rank, num_ranks

    def __call__(self, step: Step, passes: Sequence[Sequence[MicroBatch]], run: RunPass) -> Sums:
        """Run the passes, in a training step or an evaluation. Return the sums on rank 0, and zeros on the other ranks: the
        loop adds them up. Collective.
        """
        is_training, gradients, others = torch.is_grad_enabled(), self._tree(step), self._tree(step)
        for micro_batch in step.micro_batches:
            for parameter in self._parameters if is_training else ():
                parameter.grad = None
            # clone: a part of a batch can start at any address, and the address changes which kernels run
            sums = run([micro_batch.mapped(Tensor.clone)], True)
            values = torch.cat([torch.stack([*sums.values()]).double(), self._has_gradient()])
            gradient = self._flat_gradient() if is_training else values
            if not micro_batch.is_padding:
                leaf = micro_batch.start // self._micro_batch_size
                others.add(leaf, values)
                if is_training:
                    gradients.add(leaf, gradient)
        values = others.total(values)
        if is_training:
            self._set_gradients(gradients.total(gradient), values[len(sums) :].tolist())
        return {name: value * (self._rank == 0) for name, value in zip(sums, values)}

    def _tree(self, step: Step) -> TreeSum:
        # the number of each rank's first micro-batch, and the count: framework.data.order.parts distributes them in this way
        count = -(-step.num_samples // self._micro_batch_size)
        return TreeSum([-(-rank * count // self._num_ranks) for rank in range(self._num_ranks + 1)], rank=self._rank)

    def _flat_gradient(self) -> Tensor:
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self._parameters])

    def _has_gradient(self) -> Tensor:
        """Return for each parameter whether it has a gradient."""
        used = [p.grad is not None for p in self._parameters]
        return moved(torch.tensor(used, dtype=torch.double), self._parameters[0].device)

    def _set_gradients(self, total: Tensor, counts: Sequence[float]) -> None:
        parts = total.split([p.numel() for p in self._parameters])
        for parameter, part, count in zip(self._parameters, parts, counts):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if count else None
