"""`micro_batch_size=auto`: after each lack of memory in a step, the workers start again with micro-batches of half the size."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import TypeAdapter

from framework.build.training import Builder
from framework.config.folders import option_of
from framework.config.section import Positive
from framework.launch.failures import SMALLER
from framework.modules.flops import device_name
from framework.preflight.processes import data_ranks
from framework.runtime.exits import REMARK, lacks_memory
from framework.runtime.files import write_atomically


@contextmanager
def fitting(build: Builder) -> Iterator[Builder]:
    """Yield the builder with the micro-batch size that is to be tried: a process's whole share in the first attempt.

    If a forward or backward inside lacks memory, note half the size, for the next attempt and for later commands with the same
    devices and strategy. Collective.
    """
    config, world, path = build.config, build.world, build.directory.micro_batch_size
    if config.micro_batch_size != "auto":
        yield build
        return
    place = f"{option_of('parallel', config.parallel)} on {world.world_size} x {device_name(world.device)}"
    noted = world.agreement.from_rank_0(_noted(path) if world.rank == 0 else {})
    build.micro_batch_size = noted.get(place)
    try:
        yield build
    except Exception as error:
        size = build.micro_batch_size or -(-config.global_batch_size // data_ranks(config.parallel, world.world_size))
        if lacks_memory(error) and size > 1 and _is_in_step(error):
            smaller = -(-size // 2)
            setattr(error, SMALLER, smaller)
            setattr(error, REMARK, f"; the next attempt has micro-batches of {smaller}")
            write_atomically(path, json.dumps(noted | {place: smaller}) + "\n")
        raise


def _noted(path: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        return TypeAdapter(dict[str, Positive]).validate_json(path.read_bytes())
    return {}


def _is_in_step(error: Exception) -> bool:
    """Return whether a forward or backward was running: only these need less memory for fewer samples."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("framework.engine.") for name in modules)
