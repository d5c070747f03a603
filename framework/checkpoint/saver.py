"""How a run saves checkpoints: in the background or between steps, and the reaction to disk errors."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.checkpoint.chunks import WritePlan
from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.modules.tensors import local, with_part
from framework.runtime.exits import DiskFailed
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION

WORTH_A_THREAD = 1 << 20  # bytes of a rank's state; benchmarks/checkpoints.py measures the stall of both ways


class Committed(NamedTuple):
    """A checkpoint that is committed to the disk."""

    step: int
    seconds: float  # from the first file to the commit


class Saver:
    """The saver of a run's checkpoints. Every method is collective, unless its docstring says otherwise.

    With `is_async`, a save blocks training only while it copies the state. A thread then writes and commits the copy, with the
    same protocol and its own process group. With None, this is done for a large state only. At most `max_failures` consecutive
    saves may fail; each failure gives a warning.
    """

    def __init__(
        self, store: CheckpointStore, *, world: World, is_async: bool | None, max_failures: int, facts: dict[str, Any]
    ) -> None:
        self.store = store
        self.facts = facts  # facts that a checkpoint must have in common with the run that loads it
        self._writer = store  # for asynchronous saves: the same store with its own process group
        self._world = world
        self._is_async = is_async
        self._max_failures = max_failures
        self._failures: list[DiskFailed] = []  # consecutive failures
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Committed] | None = None
        self._plan = WritePlan(world)
        self._copies = HostCopies()
        self.counts = {"committed": 0, "failed": 0, "waited_for": 0}
        self.last: Committed | None = None

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, flush: Callable[[], None]) -> None:
        """Save the state after `step`. Before the save, `flush` writes the data to disk that the checkpoint depends on.

        Wait for a save that still runs. Raise DiskFailed after more than `max_failures` consecutive failures.
        """
        if self._running is not None and not self._running.done():
            self.counts["waited_for"] += 1
        self.settle()
        with self._tolerating():
            flush()
            is_in_background, tensors = self._runs_in_background(tensors), self._plan.mine(tensors)
            if is_in_background or any(tensor.is_cuda for tensor in tensors.values()):  # all at once, not one after the other
                tensors = self._copies.update(tensors)
            if is_in_background:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                    self._writer = replace(self.store, world=self._world.with_own_agreement())
                self._running = self._thread.submit(self._write, step, tensors, copy.deepcopy(state))
            else:
                self._note(self._write(step, tensors, state))

    @property
    def has_failed(self) -> bool:
        """Return whether the save in the background has failed. (`settle` raises its error.) Not collective."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def is_among_best(self, value: float | None) -> bool:
        """Return whether a checkpoint with this monitored value would be kept as one of the best."""
        if self.store.keep_best == 0 or value is None:
            return False
        self.settle()
        return self.store.is_among_best(value)

    def is_short_of_time(self, step: int, *, grace_s: float | None) -> bool:
        """Return whether, on any rank, a checkpoint would take longer than the time until the kill signal."""
        self.settle()
        if grace_s is None or self.last is None:
            return False
        mine = PREEMPTION.left_of(grace_s), self.last.seconds
        lefts, times = zip(*self._world.agreement.distinct(mine).values())
        left, needed = min(lefts), max(times)
        if left < needed and self._world.rank == 0:
            LOGGER.warning("no checkpoint of step %d: %.1f s of launch.grace_s are left, and the last checkpoint took %.1f s; "
                           "the run continues from the checkpoint of step %d",
                           step, max(0.0, left), needed, self.last.step)  # fmt: skip
        return left < needed

    def settle(self) -> None:
        """Wait for a running save. Raise DiskFailed after more than `max_failures` consecutive failures."""
        running, self._running = self._running, None
        if running is not None:
            with self._tolerating():
                self._note(running.result())

    def finish(self) -> None:
        """Wait for the last save. Raise DiskFailed if it is not on the disk."""
        self.settle()
        if self._failures:
            raise self._failures[-1]

    def close(self) -> None:
        """End the thread, whether its save has failed or not. Not collective."""
        if self._thread is not None:
            self._thread.shutdown()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except DiskFailed as failure:
            self._failures.append(failure)
            self.counts["failed"] += 1
            if len(self._failures) > self._max_failures:
                raise
            if self._world.rank == 0:
                LOGGER.warning("%s; training continues (failure %d in a row; checkpoint.max_failures allows %d)",
                               failure, len(self._failures), self._max_failures)  # fmt: skip

    def _note(self, committed: Committed) -> None:
        self._failures.clear()
        self.counts["committed"] += 1
        self.last = committed

    def _runs_in_background(self, tensors: dict[str, Tensor]) -> bool:
        if self._is_async is None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors.values()))
            self._is_async = any(self._world.agreement.distinct(size >= WORTH_A_THREAD).values())
        return self._is_async

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Committed:
        start = time.monotonic()
        self._copies.wait()
        self._writer.save(step, tensors, state)
        return Committed(step, time.monotonic() - start)


# --- copies, which are written while training continues


class HostCopies:
    """Copies that are reused for the next save, because memory that was used before is several times faster.

    For a CUDA device the copies are in pinned memory. The device makes them in the order of its own work: the host does not
    wait, and later computations of the device do not change a copy.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._made: list[torch.cuda.Event] = []

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy this rank's parts of tensors. Return the copies, cut like the tensors: complete only after `wait`."""
        kept, self._copies = self._copies, {}
        for name, tensor in tensors.items():
            copy, part = kept.get(name), local(tensor)
            if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
                copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._copies[name] = copy.copy_(part, non_blocking=True)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._made = [torch.cuda.current_stream(device).record_event() for device in devices]
        return {name: with_part(tensor, self._copies[name]) for name, tensor in tensors.items()}

    def wait(self) -> None:
        """Wait until the copies are complete. Any thread may call this."""
        for event in self._made:
            event.synchronize()
