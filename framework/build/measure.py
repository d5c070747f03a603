"""The construction of the stop-watch that measures a run's speed."""

from collections.abc import Callable, Mapping

from torch import nn

from framework.build import components
from framework.config.trainer import TrainerSection
from framework.distributed.world import World
from framework.modules import flops
from framework.runs.directory import RunDirectory
from framework.training.machine import Machine
from framework.training.profile import Profile
from framework.training.speed import Speed


def stopwatch(
    model: Callable[[], nn.Module],
    info: Mapping[str, int],
    *,
    world: World,
    precision: str,
    trainer: TrainerSection,
    directory: RunDirectory,
) -> Speed:
    """Return the stop-watch of a run. The operations of `model()` are counted only if the device's peak is known."""
    batch, needed = components.example(info), None
    peak = flops.peak_flops(world.device, precision=precision)
    if peak is not None and batch is not None:
        needed = flops.flops_per_sample(model(), batch)
        peak *= world.world_size * len(world.devices)
    is_profiled = trainer.profile == "all" or (trainer.profile and world.rank == 0)
    return Speed(
        world.device,
        tokens_per_sample=info.get("seq_len"),
        flops_per_sample=needed,
        peak_flops=peak,
        profile=Profile(directory.profile, world=world) if is_profiled else None,
        machine=Machine(directory.path, world=world) if trainer.log_machine else None,
    )
