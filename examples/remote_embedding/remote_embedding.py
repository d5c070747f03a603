"""An embedding table in one process, and replicas of the dense layers in all: RPC, RRef, distributed autograd.

Sources: PyTorch's "Combining distributed DataParallel with distributed RPC framework"; Li et al. 2014 (parameter server).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from extras.rpc.rpc import join_rpc, name_of
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.sums import add
from framework.parallel.replica import sum_gradients


class BagOfTokens(nn.Module):
    """Logits of the next token (B, T, V) from a token's embedding and the mean of all embeddings up to it (B, T)."""

    def __init__(self, *, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dense = nn.Sequential(nn.Linear(2 * dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, vocab_size))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        count_T = torch.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype, device=x_BTD.device)
        return self.dense(torch.cat([x_BTD, x_BTD.cumsum(1) / count_T[:, None]], dim=-1))


class Table:
    """The table, in the process of rank 0. Rank 0's optimizer and checkpoints treat it like any parameter."""

    def __init__(self, module: nn.Module) -> None:
        self.lookup, self.parameters = module.forward, [*module.parameters()]
        self.gradients: dict[int, dict[Tensor, Tensor]] = {}  # gradients of the step's micro-batches, by number

    def __call__(self, indices: Tensor) -> Tensor:
        return self.lookup(indices)

    def keep(self, context: int, number: int) -> None:
        """Keep a micro-batch's gradient, which distributed autograd has left in this process. It is never sent."""
        self.gradients[number] = dist_autograd.get_gradients(context)

    def add_up(self) -> None:
        """Add the gradients in the order of the micro-batches, not in the order of arrival, so that the bits repeat."""
        for parameter in self.parameters:
            parts = [found[parameter] for _, found in sorted(self.gradients.items()) if parameter in found]
            parameter.grad = torch.stack(parts).sum(0) if parts else torch.zeros_like(parameter)
        self.gradients.clear()


_TABLES: list[Table] = []  # on rank 0


def _table() -> Table:
    return _TABLES[0]


class RemoteEmbedding(DataParallelEngine):
    """An Engine that reads its table in the process of rank 0. Every rank has the other layers."""

    def __init__(self, module: nn.Module, *, world: Any, forward: Any, mesh: Any, table: str) -> None:
        join_rpc(world)
        part = module.get_submodule(table)
        if world.rank == 0:
            _TABLES[:] = [Table(part)]
        else:
            for name, _ in [*part.named_parameters(recurse=False)]:
                setattr(part, name, None)
        self._dense = [p for name, p in module.named_parameters() if not name.startswith(f"{table}.") and p.requires_grad]
        world.agreement.barrier()  # now rank 0 has the table
        self._table = rpc.remote(name_of(0), _table)
        part.forward = lambda indices: self._table.rpc_sync().__call__(indices)  # type: ignore[method-assign]
        world.groups.at_end(leave=self._let_go, abandon=self._let_go)  # RRefs must end before rpc
        self._world = world
        super().__init__(
            module, forward=forward, mesh=mesh, dp_rank=world.rank, dp_size=world.world_size, averaged_over=1,
            broadcast=world.broadcast,
        )  # fmt: skip

    def _let_go(self) -> None:
        self._table = None

    def forward_backward(self, step: Any, *, index: int, loss_scale: float, measure: bool) -> Any:
        factor, sums = self._factor(step, loss_scale, num_samples=step.num_samples), dict[str, Tensor]()
        for micro_batch in step.micro_batches:
            if micro_batch.is_padding:  # only the ends are collective here
                continue
            self._forward.seed_draws(step=index, micro_batch=micro_batch.number, turn=step.turn)
            with dist_autograd.context() as context:
                loss, more = self._forward(self.module, micro_batch, measure=measure)
                dist_autograd.backward(context, [loss * factor])
                gradients = dist_autograd.get_gradients(context)
                for parameter in self._dense:
                    if parameter in gradients:
                        parameter.grad = gradients[parameter] + (0 if parameter.grad is None else parameter.grad)
                self._table.rpc_sync().keep(context, micro_batch.number)
            add(sums, more)
        if not sums:  # a short batch has no samples for this rank, but every rank must know the names of the sums
            with torch.no_grad():
                _, more = self._forward(self.module, step.micro_batches[0], measure=measure)
            sums = {name: torch.zeros_like(value) for name, value in more.items()}
        sum_gradients(self._dense)
        self._world.agreement.barrier()  # now every gradient of the table has arrived
        if self.dp_rank == 0:
            _table().add_up()
        self._forward.settle(self.module, sums, num_samples=step.num_samples)
        return sums

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by the norm of rank 0, because only rank 0 has all gradients."""
        norm = get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        dist.broadcast(norm, src=0)
        if max_norm is not None:
            clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    def make_optimizer(self, build: Any, trained: Any) -> torch.optim.Optimizer:
        optimizer = build(trained)
        optimizer.register_step_post_hook(lambda *_: self._world.agreement.barrier())  # no look-up before rank 0's step
        return optimizer


def remote_embedding(model: nn.Module, *, world: Any, forward: Any, replicate: int | None, table: str) -> Any:
    """Leave the module `table` to rank 0, and replicate the other layers. Collective."""
    return RemoteEmbedding(model, world=world, forward=forward, mesh=world.mesh(replicate=replicate), table=table)


def problems(model: nn.Module, *, demands: Any, table: str, **others: object) -> list[str]:
    """Return why a run cannot have its table in another process."""
    if table not in dict(model.named_modules()):
        return [f"table={table}: the model has no such module; it has {', '.join(name for name, _ in model.named_children())}"]
    at_odds = {"the task has its own step": demands.own_step, "the weights are averaged": demands.averages,
               "optimizer.turns": demands.turns}  # fmt: skip
    return [f"table={table}: {what}, which this strategy does not do; parallel=ddp" for what, asked in at_odds.items() if asked]
