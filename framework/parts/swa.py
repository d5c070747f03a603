"""Stochastic weight averaging: the run evaluates and exports the plain mean of its last weights."""


class SWA:
    """A part that averages the last weights.

    `start` is the share of the run's steps before the mean starts; `every` is the number of steps between the weights that
    count. BatchNorm's statistics are those of the weights. The source uses a constant or cyclic learning rate.
    Source: Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization".
    """

    def __init__(self, *, start: float = 0.75, every: int = 1) -> None:
        if not 0 <= start < 1:
            raise ValueError(f"start={start} is out of range (from 0 to below 1)")
        if every < 1:
            raise ValueError(f"every={every} is out of range (at least 1)")
        self.start, self.every = start, every

    def average_share(self, step: int, *, total_steps: int) -> float:
        """Return how far the average moves towards the weights after a step, counted from 0."""
        since = step + 1 - int(self.start * total_steps)
        if since <= 0:
            return 1.0  # before the mean starts, the average equals the weights
        return 1.0 / (1 + since // self.every) if since % self.every == 0 else 0.0
