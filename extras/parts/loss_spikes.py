"""Loss spikes: a step counts as diverged if its loss is far above the losses before it."""

from statistics import median
from typing import Any

from framework.runtime.exits import Diverged
from framework.training.loop_view import Loop


class LossSpikes:
    """A part that treats a loss above `factor` times the median of the last `window` losses of the same turn as a divergence.

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
        self.losses: dict[str, list[float]] = {}  # of each turn (optimizer.turns), in the last steps taken
        self._current: dict[str, float] = {}

    def step_begun(self, loop: Loop) -> None:
        self._current = {}

    def gradients_ready(self, loop: Loop) -> None:
        self._current[loop.turn] = loss = loop.loss()
        before = self.losses.get(loop.turn, [])
        if len(before) == self.window and loss > self.factor * (usual := median(before)):
            raise Diverged(f"the loss of step {loop.step + 1} is {loss:.4g}, the median of {self.window} is {usual:.4g}")

    def step_taken(self, loop: Loop) -> None:
        for turn, loss in self._current.items():
            self.losses[turn] = [*self.losses.get(turn, []), loss][-self.window :]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = {turn: list(losses) for turn, losses in state["losses"].items()}
