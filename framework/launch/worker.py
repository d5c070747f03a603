"""What a worker process does, however it was started: read the frozen configuration, join the others, run."""

import json
import logging
import os
import time
import traceback
from pathlib import Path

import torch

from framework import log
from framework.environment import Environment
from framework.frozen import Frozen, thaw
from framework.launch.parent import die_with_parent
from framework.log import LOGGER
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
        _record_failure(error, rank=environment.rank, scratch=scratch)
        raise
    finally:
        log.stop_file()


def _work(frozen: Frozen, *, environment: Environment, scratch: Path | None) -> int:
    config = thaw(frozen)
    if environment.local_world_size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // environment.local_world_size))
    backend, timeout_s = config["backend"]["name"], config["launch"]["timeout_s"]
    world = World.start(environment, backend=backend, timeout_s=timeout_s, scratch=scratch)
    try:
        _check_configuration(world, frozen)
        return execute(config, world=world)
    finally:
        world.stop()


def work_in_child(frozen: Frozen, scratch: Path | None) -> int:
    """`work`, in a process of its own that does not outlive the one that started it."""
    die_with_parent()
    PREEMPTION.speaks = False
    return work(frozen, scratch)


def _check_configuration(world: World, frozen: Frozen) -> None:
    digests = world.gather(frozen.digest)
    if len(set(digests)) > 1:
        odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise RuntimeError(f"rank {odd} reads another configuration than rank 0 ({frozen.path}); is it one file system?")


def _record_failure(error: Exception, *, rank: int, scratch: Path | None) -> None:
    """Keep the whole story in train.log, and the headline where the parent finds it."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            record = LOGGER.makeRecord(LOGGER.name, logging.ERROR, "", 0, "%s", (traceback.format_exc(),), None)
            handler.handle(record)
    if scratch is not None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        headline = {
            "rank": rank,
            "time": time.time(),
            "error": _headline(error),
            "where": f"{where.filename}:{where.lineno} in {where.name}",
            "lost_peer": _is_lost_peer(error),
        }
        (scratch / f"failure_{rank}.json").write_text(json.dumps(headline))


def _headline(error: Exception) -> str:
    """Return an error's kind and first line; of one that quotes a loader process's traceback, that traceback's last."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and "Original Traceback" in str(error):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"


def _is_lost_peer(error: Exception) -> bool:
    """Return whether an error only says that another rank is gone."""
    return any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


