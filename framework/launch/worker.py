"""What a worker process does, however it was started: read the frozen configuration, join the others, run."""

import dataclasses
import json
import logging
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from framework import log
from framework.environment import Environment
from framework.files import write_atomically
from framework.frozen import Frozen, thaw
from framework.log import LOGGER
from framework.outcome import headline, is_lost_peer, place_of
from framework.parent import die_with_parent
from framework.preemption import PREEMPTION
from framework.run import execute
from framework.run_directory import RunDirectory
from framework.world import World


def work(frozen: Frozen, scratch: Path | None) -> int:
    """Run this process's part of the run. Returns the exit code that all ranks agree on; raises what goes wrong."""
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    log.start_file(RunDirectory(frozen.path.parent).log, rank=environment.rank)
    try:
        return _work(frozen, environment=environment, scratch=scratch)
    except Exception as error:
        record_failure(error, environment=environment, scratch=scratch)
        raise
    finally:
        log.stop_file()


def _work(frozen: Frozen, *, environment: Environment, scratch: Path | None) -> int:
    config = thaw(frozen)
    if environment.local_world_size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // environment.local_world_size))
    backend, timeout_s = config["backend"]["name"], config["launch"]["timeout_s"]
    num_devices = config["parallel"].get("num_devices", 1)
    world = World.start(
        environment, backend=backend, timeout_s=timeout_s, scratch=scratch, num_devices=num_devices
    )
    try:
        _check_configuration(world, frozen)
        code = execute(config, world=world)
        world.leave()
        return code
    finally:
        world.stop()


def work_in_child(frozen: Frozen, scratch: Path | None) -> int:
    """`work`, in a process of its own that does not outlive the one that started it."""
    begin_child()
    return work(frozen, scratch)


def begin_child() -> None:
    """Make this process a worker, which ends with the one that started it and leaves the talking to that."""
    die_with_parent()
    tempfile.tempdir = None  # not the launcher's
    PREEMPTION.watch()  # a spawned one has not inherited it
    PREEMPTION.speaks = False


def _check_configuration(world: World, frozen: Frozen) -> None:
    digests = world.gather(frozen.digest)
    if len(set(digests)) > 1:
        odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RuntimeError(f"rank {odd} reads another configuration than rank 0 ({frozen.path}); is it one file system?")


def record_failure(error: Exception, *, environment: Environment, scratch: Path | None) -> None:
    """Keep the whole story in train.log, and the headline where the parent finds it."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            record = LOGGER.makeRecord(LOGGER.name, logging.ERROR, "", 0, "%s", (traceback.format_exc(),), None)
            handler.handle(record)
    if scratch is not None:
        failure = Failure.of(error, rank=environment.rank)
        text = json.dumps(dataclasses.asdict(failure))
        write_atomically(scratch / f"failure_{environment.attempt}_{environment.rank}.json", text)


@dataclass(frozen=True)
class Failure:
    """Why a worker ended: the headline."""

    rank: int
    error: str
    where: str
    lost_peer: bool = False  # the error only says that another rank is gone
    time: float = 0.0  # seconds since the epoch

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> "Failure":
        return cls(rank, headline(error), place_of(error), lost_peer=is_lost_peer(error), time=time.time())

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


def recorded_failures(scratch: Path, *, attempt: int) -> list[Failure]:
    """Return what the workers of an attempt have recorded of their ends, the first first; those who lost a peer last."""
    found = [Failure(**json.loads(path.read_text())) for path in scratch.glob(f"failure_{attempt}_*.json")]
    return sorted(found, key=lambda failure: (failure.lost_peer, failure.time))
