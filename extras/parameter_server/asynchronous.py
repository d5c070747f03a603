"""The asynchronous parameter server: it takes a step with each gradient that arrives. NOT equal to one process."""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_

from extras.rpc.rpc import Gradients, call_remote, gradients_of, join_rpc, new_server, on_cpu, serve
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Step
from framework.engine.sums import Sums
from framework.optim.optimizers import BuildOptimizer, Trainable, stand_in
from framework.optim.update import group_values


class Hogwild(Engine):
    """An Engine with ranks that never wait for each other's gradients: pull, compute, push, and the server takes a step.

    A rank's gradient is the mean over its own samples, at parameters that other ranks may have changed meanwhile. The ranks
    meet only where the loop needs one number for all ranks (a row, an evaluation, a checkpoint, the flags that end a run).
    Sources: Recht et al. 2011, "Hogwild!"; Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD).
    """

    def __init__(self, model: nn.Module, *, forward: Forward, mesh: DeviceMesh, world: World) -> None:
        super().__init__(
            module=model,
            forward=forward,
            mesh=mesh,
            dp_rank=world.rank,
            dp_size=world.world_size,
            broadcast=world.broadcast,
            meet_in_steps=False,
            alone=lambda index: True,
            warm_up=self._begin,
            make_optimizer=self._pushing,
        )
        self._world = world
        self._held = [p for p in nn.Module.parameters(model) if p.requires_grad]
        self._server: ParameterStore | None = None  # only on rank 0
        self._optimizer: torch.optim.Optimizer  # set by _pushing
        self._num_samples = 0  # of this rank, in the current step
        self._is_measured = False
        self._pushed: Gradients = []
        self._number = new_server()
        join_rpc(world)

    def train(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        self._pull()
        self._is_measured, self._num_samples = measure, step.num_own_samples
        return super().train(step, index=index, loss_scale=loss_scale, measure=measure)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by this rank's own norm. In a measured step and before a checkpoint, return the root mean square of the norms of
        all ranks. In other steps the ranks do not wait to compute it.
        """
        if max_norm is not None and not self._is_measured:
            return clip_grad_norm_(self._held, max_norm)
        return super().clip_grad_norm(max_norm)

    def _begin(self) -> None:
        """Start from the values of the module and the optimizer, which may come from a checkpoint. Collective."""
        if self._server is not None:
            self._server.begin(self._held, self._optimizer.state, group_values(self._optimizer))
        self._world.agreement.barrier()

    def sync_buffers(self) -> None:
        """Give all ranks the server's parameters. Collective. No rank pushes again before all ranks have them."""
        self._world.agreement.barrier()  # a push returns after its step: after the barrier, all steps are taken
        super().sync_buffers()
        self._pull()
        if self._server is not None:
            self._optimizer.state.update(self._server.state_by(self._held))
            take_over(self._optimizer, self._server.groups())

    def _pushing(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        """Return an optimizer with a step that pushes the gradients. On rank 0 it shows the server's state."""
        if self.dp_rank == 0:
            self._server = ParameterStore(build, trained)
            serve(self._server, number=self._number)
            self._optimizer = build(trained)
        else:
            self._optimizer = build(stand_in(self._world.device))
            for group in self._optimizer.param_groups:
                group["lr"] = 1.0  # the loop multiplies this by the schedule's factor
        self._optimizer.register_step_pre_hook(self._push)
        self._optimizer.register_step_post_hook(self._put_back)
        return self._optimizer

    @torch.no_grad()
    def _pull(self) -> None:
        values = self._server.current() if self._server is not None else call_remote(self._number, "current")
        for parameter, value in zip(self._held, values):
            parameter.copy_(value)

    def _push(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        sent = gradients_of(self._held) if self._server is None else []
        self._pushed = [p.grad for p in self._held]
        for parameter in self._held:
            parameter.grad = None  # the replica takes no step: it pulls the parameters
        if self._num_samples == 0:  # a short batch; momentum and decay must not act for a rank without samples
            return
        if self._server is not None:
            self._server.update(self._pushed, [group["lr"] for group in optimizer.param_groups])
        else:
            call_remote(self._number, "update_by_factor", sent, optimizer.param_groups[0]["lr"])

    def _put_back(self, *_: object) -> None:
        for parameter, gradient in zip(self._held, self._pushed):
            parameter.grad = gradient  # a checkpoint checks whether the gradient is finite


def take_over(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Copy the values of another optimizer's groups into the groups of this optimizer."""
    for group, values in zip(optimizer.param_groups, groups):
        group.update(values)


class ParameterStore:
    """The server's parameters and optimizer, in rank 0's process, separate from the replica that this process trains.

    Updates come from the threads of RPC handlers and from rank 0's own thread. A lock completes each update before the next.
    """

    def __init__(self, build: BuildOptimizer, trained: list[Trainable]) -> None:
        self._parameters = [nn.Parameter(item.parameter.detach().clone()) for item in trained]
        self._optimizer = build([item._replace(parameter=p) for item, p in zip(trained, self._parameters)])
        self._peak_lrs = [group["lr"] for group in self._optimizer.param_groups]
        self._lock = threading.Lock()

    @torch.no_grad()
    def begin(self, parameters: list[nn.Parameter], state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        """Copy the parameters' values, the optimizer state, and the values in the optimizer's groups."""
        with self._lock:
            for mine, theirs in zip(self._parameters, parameters):
                mine.copy_(theirs)
                if theirs in state:
                    self._optimizer.state[mine] = state[theirs]
            take_over(self._optimizer, groups)

    def state_by(self, parameters: list[nn.Parameter]) -> dict[Tensor, Any]:
        """Return the optimizer's state, with the parameters of a replica as keys."""
        state = self._optimizer.state
        return {theirs: state[mine] for mine, theirs in zip(self._parameters, parameters) if mine in state}

    def groups(self) -> list[dict[str, Any]]:
        """Return the values that the optimizer keeps in its groups."""
        return group_values(self._optimizer)

    def current(self) -> list[Tensor]:
        """Return the current parameters, all after the same number of updates."""
        with self._lock:
            return [on_cpu(parameter) for parameter in self._parameters]

    def update_by_factor(self, gradients: Gradients, factor: float) -> None:
        """Take an optimizer step with `factor` times the peak learning rates."""
        self.update(gradients, [peak * factor for peak in self._peak_lrs])

    def update(self, gradients: Gradients, lrs: list[float]) -> None:
        """Take an optimizer step. `lrs` has the learning rate of each parameter group."""
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            for group, lr in zip(self._optimizer.param_groups, lrs):
                group["lr"] = lr
            self._optimizer.step()
