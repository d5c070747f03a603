"""A world of several ranks in forked processes, for tests of what one rank does with the others."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.distributed.world import World
from framework.runtime.environment import Environment
from tests.harness import freeze

_FORK = multiprocessing.get_context("fork")


def on_ranks(num_ranks: int, act: Callable[[World], Any], *, scratch: Path, timeout_s: float = 20.0) -> list[Any]:
    """Call `act` with the world of each of so many ranks; return their results in rank order. AssertionError if one raises."""
    freeze()
    results: Any = _FORK.SimpleQueue()
    processes = [
        _FORK.Process(target=_be_rank, args=(rank, num_ranks, act, scratch, timeout_s, results)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    failed = {rank: error for rank, (_, error) in found.items() if error is not None}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
    return [found[rank][0] for rank in range(num_ranks)]


def _be_rank(rank: int, num_ranks: int, act: Callable[[World], Any], scratch: Path, timeout_s: float, results: Any) -> None:
    environment = Environment(rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks)
    try:
        world = World.start(environment, backend="gloo", timeout_s=timeout_s, scratch=scratch)
        result = act(world)
        world.groups.leave()
        world.agreement.barrier()  # a rank that leaves early must not look like one that has failed
        results.put((rank, (result, None)))
        world.stop()
    except BaseException:
        results.put((rank, (None, traceback.format_exc())))
    os._exit(0)
