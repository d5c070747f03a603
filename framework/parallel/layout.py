"""What each axis of a mesh does to a model, in one fixed order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import MicroBatch
from framework.modules.parts import blocks_of, description, experts_of
from framework.optim.optimizers import stand_in
from framework.parallel import context as contexts
from framework.parallel import expert as experts
from framework.parallel import pipeline as pipelines
from framework.parallel import replica, shard, tensor, zero
from framework.parallel.dealing import dealing
from framework.parallel.first_weights import fill
from framework.parallel.pipelining.passes import Pipeline
from framework.parallel.pipelining.schedules import Balance, ScheduleName
from framework.parallel.pipelining.sent import SendDtype
from framework.parallel.shard import Trail
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER

DATA_AXES = ("replicate", "shard", "expert")  # ranks along them have other samples


class Options(replica.ReplicaOptions, shard.ShardOptions, total=False):
    """What the axes take: `zero` and the options of DistributedDataParallel for `replicate`, FSDP's for `shard`, ..."""

    zero: bool
    sequence: bool | None
    attention: contexts.Attention | None
    schedule: ScheduleName
    send_dtype: SendDtype
    balance: Balance
    num_devices: int | None


OF_AXES: dict[str, tuple[str, ...]] = {
    "replicate": ("zero", *replica.ReplicaOptions.__annotations__),
    "shard": tuple(shard.ShardOptions.__annotations__),
    "tensor": ("sequence",),
    "context": ("attention",),
    "pipeline": ("schedule", "send_dtype", "balance"),
}


def group_over(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup | None:
    """Return the group of the ranks that differ only along these axes; None if the mesh has none of them. Collective."""
    found = over(mesh, *axes)
    return found.get_group() if found is not None else None


def over(mesh: DeviceMesh, *axes: str) -> DeviceMesh | None:
    """Return the part of the mesh along these axes, as one axis; None if the mesh has none of them. Collective."""
    names = [axis for axis in mesh.mesh_dim_names or () if axis in axes]
    if len(names) < 2:
        return mesh[names[0]] if names else None
    return mesh[tuple(names)]._flatten("_".join(names))


class Layout:
    """A model on a mesh: `engine` changes the model, axis by axis."""

    def __init__(self, model: nn.Module, *, world: World, forward: Forward, mesh: DeviceMesh, options: Options) -> None:
        self.model, self.world, self.forward, self.mesh, self.options = model, world, forward, mesh, options
        self.axes = mesh.mesh_dim_names or ()
        self.sharding: Any = {name: value for name, value in options.items() if name in OF_AXES["shard"]}
        self.dp_rank, self.dp_size = 0, 1
        for axis in self.axes:
            if axis in DATA_AXES:
                self.dp_rank = self.dp_rank * mesh[axis].size() + mesh.get_local_rank(axis)
                self.dp_size *= mesh[axis].size()
        self.is_counted = "tensor" not in self.axes or mesh.get_local_rank("tensor") == 0
        self.slice: Callable[[MicroBatch], MicroBatch] | None = None

    def engine(self) -> Engine:
        """Cut the layers and the tokens; then cut the model into stages, or shard or replicate it. Collective."""
        model, mesh, options = self.model, self.mesh, self.options
        if "pipeline" in self.axes:
            return self._pipeline()
        if "tensor" in self.axes:
            tensor.cut_layers(model, mesh=mesh["tensor"], sequence=options.get("sequence"), evenly="shard" in self.axes,
                              keeps_cut=tensor.stays_cut(self.forward.task))  # fmt: skip
        if "expert" in self.axes:
            experts.cut_experts(model, mesh=mesh["expert"])
        self._cut_tokens()
        if "shard" in self.axes:
            return self._sharded()
        if {"tensor", "expert"} & {*self.axes}:
            fill(model, device=self.world.device)
            return self._plain(finish=self._sums())
        if "num_devices" not in options:
            model.to(self.world.device)
        if self.forward.trains_by_step:  # DDP needs one forward pass for each backward pass, and every weight used in it
            return self._plain(finish=self._sums())
        return self._replicated()

    def _cut_tokens(self) -> None:
        if "context" in self.axes:
            group, attention = self.mesh.get_group("context"), self.options.get("attention")
            self.slice = contexts.cut_tokens(self.model, forward=self.forward, group=group, attention=attention).of

    def _engine(self, **how: Any) -> Engine:
        common = {"dp_rank": self.dp_rank, "dp_size": self.dp_size, "is_counted": self.is_counted, "slice": self.slice}
        return Engine(module=self.model, forward=self.forward, mesh=self.mesh, **common | how)

    def _plain(self, **how: Any) -> Engine:
        """Return the Engine of a model that each rank calls as it is."""
        owners = zero.owned(self.world) if self.options.get("zero") else dealing(self.world)
        return self._engine(
            broadcast=self.world.broadcast, data_group=group_over(self.mesh, *DATA_AXES), make_optimizer=owners, **how
        )

    def _sums(self) -> Callable[[], None]:
        """Return what sums the gradients over the ranks with other samples or tokens; those of experts over fewer ranks."""
        trained = [p for p in nn.Module.parameters(self.model) if p.requires_grad]
        modules = experts_of(self.model) if "expert" in self.axes else []
        divided = {id(p) for module in modules for p in nn.Module.parameters(module)}
        plain, of_experts = [p for p in trained if id(p) not in divided], [p for p in trained if id(p) in divided]
        parts = [(plain, group_over(self.mesh, "replicate", "expert", "context"))]
        parts += [(of_experts, group_over(self.mesh, "replicate", "context"))] if of_experts else []

        def finish() -> None:
            for parameters, group in parts:
                if group is not None:
                    replica.sum_gradients(parameters, group=group)

        return finish

    def _replicated(self) -> Engine:
        given: Any = {name: value for name, value in self.options.items() if name in replica.ReplicaOptions.__annotations__}
        wrapped, hook = replica.Replica(self.model, **given), given.get("hook")
        return self._plain(
            model=wrapped,
            averaged_over=1 if hook is None else self.world.world_size,
            set_sync=wrapped.set_sync,
            warm_up=wrapped.settle,
            parts={"hook": replica.SavedAtEnd()} if hook is not None and replica.keeps_state(hook) else {},
            finish=wrapped.require_sums,
        )

    def _shard_mesh(self, *inner: str) -> DeviceMesh:
        """Return the mesh over which parameters are sharded, with the replicas as an outer axis."""
        flat = over(self.mesh, "shard", *inner)
        assert flat is not None
        if "replicate" not in self.axes:
            return flat
        joined: DeviceMesh = DeviceMesh._concatenate([self.mesh["replicate"], flat])
        return joined

    def _sharded(self) -> Engine:
        model, forward, blocks = self.model, self.forward, blocks_of(self.model)
        divided = experts_of(model) if "expert" in self.axes else []
        if self.world.rank == 0:
            LOGGER.info("gathered at a time: %s", description(blocks, model))
        frees = self.options.get("reshard_after_forward", True)
        keeps = forward.trains_by_step and not frees  # its step may differentiate the model before its last backward pass
        is_on_cpu = self.options.get("cpu_offload")
        shard.shard_model(
            model, blocks, mesh=self._shard_mesh("expert", "context"), whole=model, experts=divided,
            expert_mesh=self._shard_mesh("context") if divided else None, on=self.world.device, options=self.sharding,
        )  # fmt: skip
        fill(model, device=self.world.device, parameters_on=torch.device("cpu") if is_on_cpu else None)
        trail = Trail([*blocks, model], model)
        scalars = [parameter for parameter in shard.scalars_of(model) if parameter.requires_grad]
        group = group_over(self.mesh, *DATA_AXES, "context") if scalars else None
        model.set_reshard_after_backward(not keeps)  # type: ignore[operator]

        def finish() -> None:
            if keeps:
                shard.reshard(model)
            replica.sum_gradients(scalars, group=group)
            trail.end_step()

        is_each = self.options.get("reduce_every") is not None
        return self._plain(
            set_sync=model.set_requires_all_reduce if is_each else model.set_requires_gradient_sync,
            finish=finish,
            trail=lambda: trail.number,
            forget=partial(shard.reshard, model),
            explain=_frees_weights if forward.trains_by_step and frees else None,
        )

    def _pipeline(self) -> Engine:
        self._cut_tokens()
        layers, styles = self.mesh["tensor"] if "tensor" in self.axes else None, dict[str, Any]()
        if layers is not None:
            keeps_cut = tensor.stays_cut(self.forward.task)
            styles = tensor.styles_of(self.model, num_parts=layers.size(), keeps_cut=keeps_cut, evenly=True)
        cut = partial(
            pipelines.cut_and_shard, self.model, styles=styles, tensor=layers, on=self.world.device,
            mesh=self._shard_mesh("context") if "shard" in self.axes else None, options=self.sharding,
        )  # fmt: skip
        summed = () if "shard" in self.axes else ("replicate", "context")
        passes = Pipeline(
            self.model,
            mesh=self.mesh,
            world=self.world,
            forward=self.forward,
            schedule=self.options.get("schedule", "1f1b"),
            send_dtype=self.options.get("send_dtype"),
            cut_stage=cut if styles or "shard" in self.axes else None,
            same_stages=group_over(self.mesh, "replicate", "shard", "context"),
            summed_over=group_over(self.mesh, *summed),
        )
        return self._engine(
            passes=passes,
            is_counted=self.is_counted and passes.has_outputs,
            broadcast=passes.broadcast,
            finish=passes.sum_gradients,
            norm_over=passes.group,
            uncounted=passes.uncounted,
            make_optimizer=lambda build, trained: build(trained or stand_in(self.world.device)),  # all may be frozen
        )


def _frees_weights(error: Exception) -> None:
    """Say why a task's own step cannot differentiate the model twice."""
    if "setStorage" in str(error):
        what = "the task's step differentiates the model itself, which frees the gathered weights that the loss still needs"
        raise Unfit(f"parallel.reshard_after_forward: true, but {what} (false)") from error
