"""Bitwise invariance: gradients whose bits do not depend on how many processes there are."""

import torch
from torch import Tensor, nn

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import MicroBatch, Step, Sums
from framework.modules.nested import map_tensors
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable
from framework.parallel.tree_sum import TreeSum


def invariant(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    micro_batch_size: int,
    make_optimizer: MakeOptimizer | None = None,
) -> "InvariantEngine":
    """Return the Engine of a model that every rank of the world holds whole. Collective."""
    model.to(world.device)
    if world.device.type == "cpu":
        torch.set_num_threads(1)  # with another number a matrix product has other bits
    plain = DataParallelEngine(
        model,
        model=model,
        forward=forward,
        mesh=world.mesh(replicate=None) if world.world_size > 1 else None,
        dp_rank=world.rank,
        dp_size=world.world_size,
        broadcast=world.broadcast,
        make_optimizer=make_optimizer,
    )
    return InvariantEngine(plain, micro_batch_size=micro_batch_size)


class InvariantEngine:
    """An Engine that sums the gradients of the global batch's micro-batches along one binary tree, whoever has run them.

    Source: Li et al. 2023, "EasyScale: elastic training with consistent accuracy", which calls them logical workers.
    """

    def __init__(self, engine: DataParallelEngine, *, micro_batch_size: int) -> None:
        self.module = engine.module
        self.mesh = engine.mesh
        self.dp_rank = engine.dp_rank
        self.dp_size = engine.dp_size
        self._engine = engine
        self._micro_batch_size = micro_batch_size
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        bounds = self._bounds(step.num_samples)
        gradients, others = TreeSum(bounds, rank=self.dp_rank), TreeSum(bounds, rank=self.dp_rank)
        names: list[str] = []
        for micro_batch in step.micro_batches:
            for parameter in self._parameters:
                parameter.grad = None
            # the plain engine undoes a mean over ranks that nobody takes here: this quotient is exact in every world
            alone = step._replace(num_samples=step.num_samples * self.dp_size, micro_batches=[_realigned(micro_batch)])
            sums = self._engine.forward_backward(alone, index=index, loss_scale=loss_scale, measure=measure)
            names = list(sums)
            if not micro_batch.is_padding:
                gradients.add(micro_batch.number, self._flat_gradient())
                others.add(micro_batch.number, self._flat_others(sums))
        like = self._flat_gradient(), self._flat_others(sums)
        return self._take(gradients.total(like[0]), others.total(like[1]), names)

    def _bounds(self, num_samples: int) -> list[int]:
        """Return the numbers of each rank's first micro-batches, and of all (framework.data.order.parts deals them so)."""
        count = -(-num_samples // self._micro_batch_size)
        return [-(-rank * count // self.dp_size) for rank in range(self.dp_size + 1)]

    def _flat_gradient(self) -> Tensor:
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self._parameters])

    def _flat_others(self, sums: Sums) -> Tensor:
        """Return the sums, and for each parameter whether it has a gradient."""
        used = [p.grad is not None for p in self._parameters]
        return torch.cat(
            [torch.stack([*sums.values()]).double(), torch.tensor(used, device=self._parameters[0].device).double()]
        )

    def _take(self, gradient: Tensor, others: Tensor, names: list[str]) -> Sums:
        """Set `.grad` on every rank; return the sums, on rank 0 alone: the loop adds them up."""
        used = others[len(names) :].tolist()
        parts = gradient.split([p.numel() for p in self._parameters])
        for parameter, part, count in zip(self._parameters, parts, used):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if count else None
        return {name: value * (self.dp_rank == 0) for name, value in zip(names, others)}

    def forward(self, micro_batch: MicroBatch) -> Sums:
        """Evaluate: sums rounded to multiples of 2^-24, whose own sums are exact, and so the same in any order."""
        sums = self._engine.forward(_realigned(micro_batch))
        return {name: torch.round(value.double() * 2**24) / 2**24 for name, value in sums.items()}

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return self._engine.clip_grad_norm(max_norm)

    def warm_up(self, step: Step) -> None:
        self._engine.warm_up(step)

    def sync_buffers(self) -> None:
        self._engine.sync_buffers()

    def can_pause(self, step: int) -> bool:
        return True

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        return self._engine.make_optimizer(build, trained)


def _realigned(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch in memory of its own: a part of a larger batch begins at any address, which kernels look at."""
    return micro_batch._replace(
        inputs=map_tensors(Tensor.clone, micro_batch.inputs), targets=map_tensors(Tensor.clone, micro_batch.targets)
    )
