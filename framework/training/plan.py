"""The steps and the times at which things are due."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from framework.checkpoint.saver import Saver
from framework.config.period import Period, samples_of, seconds_of
from framework.config.trainer import TrainerSection
from framework.data.order import Order
from framework.distributed.world import World
from framework.runtime.preemption import PREEMPTION


@dataclass(frozen=True)
class Plan:
    """The steps at which things are due; a period of None means "only at the end"."""

    total_steps: int
    settings: TrainerSection
    checkpoint_every: Period | None
    grace_s: float | None  # between the signal that asks a run to stop and the signal that kills it; None if not known
    epoch_size: int  # samples
    sample_tokens: int | None = None

    @classmethod
    def of(cls, settings: TrainerSection, order: Order, *, checkpoint_every: Period | None, grace_s: float | None) -> "Plan":
        steps = [settings.max_steps, settings.max_epochs and order.steps_in(settings.max_epochs)]
        total_steps = min(count for count in steps if count is not None)
        for period in (settings.eval_every, checkpoint_every):
            samples_of(period, epoch_size=order.epoch_size, sample_tokens=order.sample_tokens)  # refuses what cannot be counted
        return cls(total_steps, settings, checkpoint_every, grace_s, order.epoch_size, order.sample_tokens)

    def is_due(self, every: str, *, step: int, samples_seen: int, size: int) -> bool:
        """Return whether what is counted in samples is due after a step of `size` samples, with which so many were seen."""
        samples = samples_of(every, epoch_size=self.epoch_size, sample_tokens=self.sample_tokens)
        return step >= self.total_steps or samples is not None and samples_seen // samples > (samples_seen - size) // samples


class Alarms:
    """What any rank may want in any step: a stop, and the reports of failed saves and of periods of time, by rank 0's clock."""

    def __init__(self, *periods: Period | None, world: World, saver: Saver) -> None:
        self._seconds = [seconds_of(period) for period in periods] if world.rank == 0 else [None] * len(periods)
        self._since, self._heard = [time.monotonic()] * len(periods), [-2] * len(periods)
        self._world, self._saver = world, saver
        self._are_set = any(seconds_of(period) is not None for period in periods)

    def ask(self, *, now: bool) -> list[bool]:
        """Return whether any rank has asked for a stop, and which periods are over; settle a failed save. Collective.

        All as of the previous call. A period's flag stays until it is heard, as not every call sends it: see `any_flags`.
        """
        clock, own = time.monotonic(), [False] * len(self._seconds) if self._are_set else []
        for number, seconds in enumerate(self._seconds if own else ()):
            own[number] = seconds is not None and clock - self._since[number] >= seconds
        is_asked, has_failed, *rung = self._world.agreement.any_flags(
            PREEMPTION.requested, self._saver.has_failed, *own, now=now
        )
        if has_failed:
            self._saver.settle()
        return [is_asked, *rung]

    def heard(self, flags: Sequence[bool], *, step: int) -> list[bool]:
        """Return which flags are new: one that arrives in the step after another was on its way before that was heard."""
        new = [flag and step - last > 1 for flag, last in zip(flags, self._heard)]
        for number in (number for number, is_new in enumerate(new) if is_new):
            self._since[number], self._heard[number] = time.monotonic(), step
        return new
