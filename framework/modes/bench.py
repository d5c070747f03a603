"""mode=bench: measure the time of a back end's collectives between a run's processes, by size. Nothing is trained."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from framework.build.training import Builder
from framework.distributed.world import World
from framework.runtime.exits import Exit, Interrupted, Unfit
from framework.runtime.preemption import PREEMPTION
from framework.runtime.torch_internals import all_gather_single, reduce_scatter_single

_FIRST = 1 << 10  # bytes; each following message is eight times as large
_LONG_S, _MOST = 0.2, 100  # of a measurement: its intended seconds, and its largest number of repeats


class Collective(NamedTuple):
    """A collective to time: `run` gets a tensor with the table's number of bytes, and this rank's part of it."""

    name: str
    run: Callable[[Tensor, Tensor], object]
    share: Callable[[int], float]  # of the bytes that cross a link, by the number of ranks (nccl-tests, PERFORMANCE.md)


def _part(size: int) -> float:
    return (size - 1) / size


COLLECTIVES = (
    Collective("all_reduce", lambda whole, part: dist.all_reduce(whole), lambda size: 2 * _part(size)),
    Collective("all_gather", lambda whole, part: all_gather_single(whole, part), _part),
    Collective("reduce_scatter", lambda whole, part: reduce_scatter_single(part, whole), _part),
    Collective("all_to_all", lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole), _part),
    Collective("broadcast", lambda whole, part: dist.broadcast(whole, src=0), lambda size: 1.0),
    Collective("send and receive", lambda whole, part: _to_the_next(whole), lambda size: 1.0),
)


def bench(build: Builder) -> Exit:
    """Print a table of the default group's collectives, by size, and the latency of the agreements. Collective."""
    world, largest = build.world, build.config.bench.largest_mib << 20
    if world.world_size == 1:
        raise Unfit("mode: bench measures messages, but there is only one process (parallel=ddp launch.nproc_per_node=2)")
    where = f"{world.world_size} processes, {world.groups.backend}, {world.device.type}"
    _print(world, f"{where}: float32, the slowest rank; GB/s by the bytes that cross a link")
    _print(world, f"{'':18} {'bytes':>12} {'us':>12} {'GB/s':>8}")
    for collective in COLLECTIVES:
        num_bytes = _FIRST
        while num_bytes <= largest:
            per_rank = max(1, num_bytes // 4 // world.world_size)
            whole = torch.zeros(per_rank * world.world_size, device=world.device)
            part = torch.zeros(per_rank, device=world.device)
            try:
                seconds = _timed(lambda: collective.run(whole, part), world=world)  # noqa: B023  # called at once
            except (RuntimeError, NotImplementedError) as error:  # on every rank: the back end does not support it
                _print(world, f"{collective.name:18} {'-':>12}  {' '.join(str(error).split())[:80]}")
                break
            rate = collective.share(world.world_size) * whole.nbytes / seconds / 1e9
            _print(world, f"{collective.name:18} {whole.nbytes:12,} {seconds * 1e6:12,.1f} {rate:8.2f}")
            num_bytes *= 8
    seconds = _timed(world.agreement.barrier, world=world)
    _print(world, f"{'an agreement':18} {'-':>12} {seconds * 1e6:12,.1f}")
    return Exit.FINISHED


def _to_the_next(whole: Tensor) -> None:
    """Send to the next rank while the previous rank sends: a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(whole)
    exchanges = [dist.P2POp(dist.isend, whole, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(exchanges):
        work.wait()


def _timed(run: Callable[[], object], *, world: World) -> float:
    """Return the seconds of a call on the slowest rank, as a mean over many calls. Collective."""
    if any(world.agreement.any_flags(PREEMPTION.requested)):
        raise Interrupted("stopped; nothing was written")
    _repeat(run, 1, world=world)
    once = max(world.agreement.gather(_repeat(run, 1, world=world)))
    count = max(1, min(_MOST, int(_LONG_S / max(once, 1e-9))))
    return max(world.agreement.gather(_repeat(run, count, world=world))) / count


def _repeat(run: Callable[[], object], count: int, *, world: World) -> float:
    world.agreement.barrier()
    begin = _now(world.device)
    for _ in range(count):
        run()
    return _now(world.device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _print(world: World, line: str) -> None:
    if world.rank == 0:
        print(line, flush=True)
