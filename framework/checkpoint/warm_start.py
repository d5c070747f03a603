"""Warm start: a run that begins with the weights of a safetensors file (`model.init_from`) where they fit its model."""

from pathlib import Path

from torch import nn

from framework.checkpoint.plain import Invalid
from framework.checkpoint.weights import load_file
from framework.distributed.world import World
from framework.runtime.exits import NoValidCheckpoint
from framework.runtime.files import checksum
from framework.runtime.log import LOGGER


def warm_start(module: nn.Module, path: Path, *, digest: str, world: World) -> None:
    """Copy into the whole model, before any strategy takes it apart, what of the file fits it. Collective.

    NoValidCheckpoint if the file is not the one whose `digest` is part of the run's identity. Rank 0 tells what does not fit.
    """
    for fault in world.gather(_fault(path, digest) if world.local_rank == 0 else ""):
        if fault:
            raise NoValidCheckpoint(f"model.init_from: {path} {fault}")
    try:
        fit = load_file(path, module)
    except Invalid as error:  # of this rank alone, a moment after it was read: nothing to agree on
        raise RuntimeError(f"model.init_from: {path} {error}") from None
    if world.rank == 0:
        LOGGER.info("model.init_from: %d of the model's %d tensors are those of %s", len(fit.fitting),
                    len(module.state_dict()), path)  # fmt: skip
        for line in fit.faults:
            LOGGER.warning("model.init_from: %s", line)


def _fault(path: Path, digest: str) -> str:
    try:
        _, actual = checksum(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if actual == digest else "has changed since the command was given; give it again, for another run"
