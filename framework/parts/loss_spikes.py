"""Loss spikes: a step counts as diverged if its loss is far above the losses before it."""

from statistics import median
from typing import Any

from framework.runtime.exits import Diverged
from framework.training.loop import Loop


class LossSpikes:
    """A part that treats a loss above `factor` times the median of the last `window` losses as a divergence.

    Then `trainer.divergence.action` decides (`rollback` continues from an earlier checkpoint, with later batches). It costs
    one message a step.

    Source: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", section 5.1.
    """

    def __init__(self, *, factor: float = 2.0, window: int = 100) -> None:
        if factor <= 1:
            raise ValueError(f"factor={factor} is out of range (above 1)")
        if window < 2:
            raise ValueError(f"window={window} is out of range (at least 2)")
        self.factor, self.window = factor, window
        self.losses: list[float] = []  # of the last steps taken
        self._loss = 0.0

    def gradients_ready(self, loop: Loop) -> None:
        self._loss = loop.loss()
        if len(self.losses) == self.window and self._loss > self.factor * (usual := median(self.losses)):
            raise Diverged(f"the loss of step {loop.step + 1} is {self._loss:.4g}, the median of {self.window} is {usual:.4g}")

    def step_taken(self, loop: Loop) -> None:
        self.losses = [*self.losses, self._loss][-self.window :]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
