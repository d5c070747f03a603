"""A time limit: the run ends, with an evaluation and a checkpoint, after a number of hours of its own time."""

import time

from framework.training.loop_view import Loop


class TimeLimit:
    """A part that ends a run after `hours` of its own time.

    The hours count from the run's first start, without the time between a stop and the next start. The clock is read only every
    `every` steps, because the processes have to agree.
    The speed of a run then decides where it ends, but not what it computes until there.
    """

    def __init__(self, *, hours: float, every: int = 10) -> None:
        if hours <= 0:
            raise ValueError(f"hours={hours} is out of range (above 0)")
        if every < 1:
            raise ValueError(f"every={every} is out of range (at least 1)")
        self.hours, self.every = hours, every
        self._began: float | None = None  # by this process's clock, as if it had run all the time

    def step_taken(self, loop: Loop) -> None:
        now = time.monotonic()
        self._began = now - loop.wall_s if self._began is None else self._began
        if loop.step % self.every == 0 and loop.any(now - self._began > 3600 * self.hours):
            loop.stop(f"its {self.hours:g} hours are over (part.time_limit.hours)")
