"""The bytes that a rank keeps between steps: `mode=check` builds rank 0 of the strategy really, in a world without others."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.build import components
from framework.build.schedules import EACH_STEP
from framework.build.training import Builder
from framework.distributed.groups import Groups
from framework.distributed.world import World
from framework.modules.structure import freeze_parameters
from framework.modules.tensors import local
from framework.optim.optimizers import hidden_matrices, trainable
from framework.optim.turns import InTurns
from framework.optim.update import AveragedWeights
from framework.preflight.child import Found, in_child
from framework.runs.metrics_file import in_units
from framework.runtime.torch_internals import register_fake_backend

_COPIES = 5  # of the parameters, while a rank is built: two, the gradients, and two of the optimizer


def kept_memory(build: Builder, *, rank: int = 0) -> dict[str, int]:
    """Return a rank's bytes of parameters, buffers, gradients, optimizer state and averages. Activations are not among them.

    A gradient counts as large as its parameter; tensor parallelism can have a larger one.

    Raise ValueError if building a rank needs more memory than is free, or if the strategy cannot be built without the others.
    """
    model = components.shapes_of(build.config.model, seed=build.config.seed)
    needed = _COPIES * sum(parameter.nbytes for parameter in nn.Module.parameters(model))
    if needed > psutil.virtual_memory().available:
        raise ValueError(f"building a rank takes up to {in_gib(needed)}, which are not free here")
    found, fate = in_child(partial(_kept, build, rank), is_silent=True)
    if fate:
        raise ValueError(f"rank {rank} cannot be built without the other processes: {fate}")
    return dict(found[0])


def in_gib(num_bytes: int) -> str:
    return in_units(num_bytes, (" bytes", " KiB", " MiB", " GiB"), base=1024)


def _kept(build: Builder, rank: int) -> Found:
    """Build a rank, take a step of zeros, and return its bytes by kind. Do not compile, because that writes into a folder."""
    trainer = build.config.trainer.model_copy(update={"compile": False})
    build = build.altered(world=_world(build, rank=rank), trainer=trainer)
    module = build.model(on_meta=build.is_sent and rank > 0)
    module.train()
    freeze_parameters(module, build.config.trainer.freeze)
    engine = build.engine(module)
    trained = trainable(engine.module, hidden=hidden_matrices(module))
    update = build.update(engine, trained, total_steps=1, order=EACH_STEP)
    for name in [turn.name for turn in update.turns] or [""]:
        if isinstance(update.optimizer, InTurns):
            update.optimizer.turn = name
        for parameter in nn.Module.parameters(engine.module):
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        update.take(0, grad_norm=torch.zeros(()))
    parameters = [*nn.Module.parameters(engine.module)]
    return [{
        "parameters": _bytes(parameters),
        "buffers": _bytes(engine.module.buffers()),
        "gradients": _bytes(parameter.grad for parameter in parameters),
        "optimizer": _bytes(update.optimizer.state.values()),
        "average": _bytes(update.average.tensors) if isinstance(update.average, AveragedWeights) else 0,
    }]  # fmt: skip


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return local(value).nbytes
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_bytes, value)) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else 0


def _world(build: Builder, *, rank: int) -> World:
    """Become a rank of the run's world, on the CPU. Its collectives return immediately and move nothing.

    Use it only in a separate process that ends afterwards, because the process joins torch's default group.
    """
    alone, launch = World.alone(), build.config.launch
    register_fake_backend()
    groups = _WithoutOthers("fake", rank=rank, world_size=launch.most_processes, timeout=alone.timeout)
    groups.join(dist.HashStore())
    return replace(alone, rank=rank, world_size=launch.most_processes, local_rank=rank % launch.num_processes,
                   local_world_size=launch.num_processes, groups=groups)  # fmt: skip


class _WithoutOthers(Groups):
    """The groups of a rank without other ranks. A strategy that waits for an answer outside a collective cannot be built."""

    def store(self, name: str) -> dist.Store:
        raise ValueError(f"its processes communicate through a store ({name}), not in collectives")
