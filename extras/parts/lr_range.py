"""The learning-rate range test: the loss for a learning rate that grows with each step, and the best rate."""

import math
from typing import Any

from framework.runs.curves import write_figure
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER
from framework.training.loop_view import Loop


class LRRange:
    """A part for a schedule that grows (scheduler=range_test): it ends the run when the loss explodes, and draws the losses.

    The loss is smoothed by an exponential average. It explodes when it is `stop_at` times its lowest value. The drawing is
    lr_range.png in the run's directory. The best rate is the rate at which the smoothed loss falls fastest over the logarithm
    of the rate.
    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3.
    """

    def __init__(self, *, smoothing: float = 0.8, stop_at: float = 4.0) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing} is out of range (from 0 to below 1)")
        if stop_at <= 1:
            raise ValueError(f"stop_at={stop_at} is out of range (above 1)")
        self.smoothing, self.stop_at = smoothing, stop_at
        self.rates: list[float] = []
        self.losses: list[float] = []  # smoothed
        self._loss, self._average = 0.0, 0.0

    def gradients_ready(self, loop: Loop) -> None:
        if loop.turn:
            raise Unfit("optimizer.turns: gives each step several losses and learning rates, but part.lr_range takes one of "
                        "each (a run without turns)")  # fmt: skip
        self._loss = loop.loss()

    def step_taken(self, loop: Loop) -> None:
        self._average = self.smoothing * self._average + (1 - self.smoothing) * self._loss
        self.rates.append(float(loop.optimizer.param_groups[0]["lr"]))
        self.losses.append(self._average / (1 - self.smoothing ** (len(self.rates))))
        if not self.losses[-1] <= self.stop_at * min(self.losses):
            loop.stop(f"the loss explodes at a learning rate of {self.rates[-1]:.2g}")

    @property
    def best(self) -> float | None:
        """The rate at which the loss falls fastest; None if it does not fall."""
        slopes = [
            (after - before) / (math.log(last) - math.log(first))
            for before, after, first, last in zip(self.losses, self.losses[1:], self.rates, self.rates[1:])
            if last > first
        ]
        steepest = min(range(len(slopes)), key=slopes.__getitem__) if slopes else None
        return self.rates[steepest] if steepest is not None and slopes[steepest] < 0 else None

    def ended(self, loop: Loop) -> None:
        if not loop.is_main or len(self.rates) < 2:
            return
        picture = loop.directory / "lr_range.png"
        write_figure(picture, self._figure, dpi=120)
        found = "falls at no learning rate" if self.best is None else f"falls fastest at optimizer.lr={self.best:.2g}"
        LOGGER.info("the loss %s%s", found, f": {picture.name} is in {loop.directory}" if picture.exists() else "")

    def _figure(self) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses)
        axes.set(xscale="log", xlabel="learning rate", ylabel="training loss, smoothed")
        if self.best is not None:
            axes.axvline(self.best, color="#d62728", linestyle=":", label=f"falls fastest: {self.best:.2g}")
            axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        return figure

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "losses": self.losses, "average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.losses, self._average = list(state["rates"]), list(state["losses"]), state["average"]
