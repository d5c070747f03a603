"""The steps at which things are due."""

from dataclasses import dataclass

from framework.config.trainer import TrainerSection
from framework.data.order import Order


@dataclass(frozen=True)
class Plan:
    """The steps at which things are due, in optimizer steps; None means "only at the end"."""

    total_steps: int
    settings: TrainerSection
    checkpoint_every: int | None
    grace_s: float | None  # between the signal that asks a run to stop and the signal that kills it; None if not known

    @classmethod
    def of(cls, settings: TrainerSection, order: Order, *, checkpoint_every: int | None, grace_s: float | None) -> "Plan":
        steps = [settings.max_steps, settings.max_epochs and order.steps_in(settings.max_epochs)]
        total_steps = min(count for count in steps if count is not None)
        return cls(total_steps, settings, checkpoint_every=checkpoint_every, grace_s=grace_s)
