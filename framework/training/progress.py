"""Where a run stands, and when things are due in it."""

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Where a run stands. All counters are global; none belongs to a rank."""

    step: int = 0
    samples_seen: int = 0
    wall_s: float = 0.0
    train_s: float = 0.0  # of it in steps: not in starts, evaluations and checkpoints
    began: float = field(default_factory=time.time)  # seconds since the epoch, of the first start
    num_divergences: int = 0  # that were got over

    @property
    def goodput(self) -> float:
        """The share of the time since the first start that went into the steps that count."""
        return self.train_s / max(time.time() - self.began, 1e-9)


@dataclass(frozen=True)
class Plan:
    """When things are due, in optimizer steps; None is "only at the end"."""

    total_steps: int
    log_every: int
    eval_every: int | None
    checkpoint_every: int | None
    clip_grad_norm: float | None
    grace_s: float | None  # between the signal that asks a run to stop and the one that kills it; None if not known
