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
from framework.engine.buffers import Buffers
from framework.engine.engine import Engine
from framework.engine.forward import WholeModel, counted, scaled
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


class Passes(WholeModel):
    """Passes with a distributed backward each, which leaves the gradient of the table in the process of rank 0."""

    table: Any  # a remote reference
    dense: list[nn.Parameter]

    def train(self, micro_batches: Any, step: Any, *, index: int, factor: Any, measure: bool) -> Any:
        (micro_batch,) = micro_batches
        self.forward.seed_draws(step=index, micro_batch=micro_batch.number, turn=step.turn)
        with dist_autograd.context() as context:
            loss, sums = self.forward(self.model, micro_batch, measure=measure)
            if not micro_batch.is_padding:  # only the end of a step is collective here
                dist_autograd.backward(context, [scaled(loss, factor, micro_batch)])
                gradients = dist_autograd.get_gradients(context)
                for parameter in self.dense:
                    if parameter in gradients:
                        parameter.grad = gradients[parameter] + (0 if parameter.grad is None else parameter.grad)
                self.table.rpc_sync().keep(context, micro_batch.number)
        return counted(sums, micro_batch)


class RemoteEmbedding(Engine):
    """An Engine that reads its table in the process of rank 0. Every rank has the other layers."""

    def __init__(self, module: nn.Module, *, world: Any, forward: Any, mesh: Any, table: str) -> None:
        join_rpc(world)
        part = module.get_submodule(table)
        if world.rank == 0:
            _TABLES[:] = [Table(part)]
        else:
            for name, _ in [*part.named_parameters(recurse=False)]:
                setattr(part, name, None)
        passes = Passes(forward, module, [Buffers(module)])
        passes.dense = [p for name, p in module.named_parameters() if not name.startswith(f"{table}.") and p.requires_grad]
        world.agreement.barrier()  # now rank 0 has the table
        passes.table = rpc.remote(name_of(0), _table)
        part.forward = lambda indices: passes.table.rpc_sync().__call__(indices)  # type: ignore[method-assign]
        let_go = lambda: setattr(passes, "table", None)  # noqa: E731
        world.groups.at_end(leave=let_go, abandon=let_go)  # RRefs must end before rpc

        def finish() -> None:
            sum_gradients(passes.dense)
            world.agreement.barrier()  # now every gradient of the table has arrived
            if world.rank == 0:
                _table().add_up()

        def make_optimizer(build: Any, trained: Any) -> torch.optim.Optimizer:
            optimizer = build(trained)
            optimizer.register_step_post_hook(lambda *_: world.agreement.barrier())  # no look-up before rank 0's step
            return optimizer

        super().__init__(
            module=module, passes=passes, forward=forward, mesh=mesh, dp_rank=world.rank, dp_size=world.world_size,
            broadcast=world.broadcast, finish=finish, make_optimizer=make_optimizer,
        )  # fmt: skip

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by the norm of rank 0, because only rank 0 has all gradients."""
        norm = get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        dist.broadcast(norm, src=0)
        if max_norm is not None:
            clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm


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
