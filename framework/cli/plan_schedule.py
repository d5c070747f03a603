"""The plan of a run's steps: all learning rates, evaluations and epochs."""

from dataclasses import dataclass
from typing import Any

from framework.build import components
from framework.build.training import Builder
from framework.data.order import Order
from framework.engine.engine import Engine
from framework.modules.structure import freeze_parameters
from framework.optim.optimizers import hidden_matrices, trainable
from framework.optim.turns import InTurns
from framework.optim.update import Update
from framework.training.plan import Plan

_MOST_POINTS = 5000  # per curve; a curve has fewer pixels
_MOST_MARKS = 60  # lines at epochs, or ticks of evaluations, that a person can still distinguish


@dataclass(frozen=True)
class PlannedSteps:
    """The learning rates by name, all for the same `steps` (counted from 1), and the last steps of epochs and evaluations."""

    total_steps: int
    steps: list[int]
    rates: dict[str, list[float]]  # `lr`, as in the rows of metrics.jsonl, and the rates that differ from it
    epochs: list[int]  # only the first epochs
    eval_every: int | None

    @property
    def evaluations(self) -> list[int]:
        """The steps after which the validation set is evaluated."""
        before = range(self.eval_every, self.total_steps, self.eval_every) if self.eval_every else []
        return [*before, self.total_steps]

    def lines(self) -> list[str]:
        """Return the main numbers."""
        epoch = f", {self.epochs[0]:,} in the first epoch" if self.epochs else ", less than an epoch"
        steps = f"{self.total_steps:,} step{'s' * (self.total_steps != 1)}"
        evaluations = f"{len(self.evaluations):,} evaluation{'s' * (len(self.evaluations) != 1)}"
        found = [f"{steps}{epoch}; {evaluations}"]
        for name, rates in self.rates.items():
            top = max(rates)
            found.append(f"{name}: {rates[0]:.4g} in step 1, at most {top:.4g} in step {self.steps[rates.index(top)]:,}, "
                         f"{rates[-1]:.4g} in step {self.total_steps:,}")  # fmt: skip
        return found

    def drawn(self) -> Any:
        """Return the figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for name, rates in self.rates.items():
            axes.plot(self.steps, rates, linewidth=1.5, label=name)
        if len(self.epochs) <= _MOST_MARKS:
            for index, step in enumerate(self.epochs):
                axes.axvline(step, color="#d5dbe1", linewidth=0.8, zorder=0, label=None if index else "end of an epoch")
        if len(self.evaluations) <= _MOST_MARKS:
            axes.plot(self.evaluations, [0] * len(self.evaluations), "|", color="#d62728", markersize=9, clip_on=False,
                      transform=axes.get_xaxis_transform(), label="evaluation")  # fmt: skip
        axes.set(xlabel="step", ylabel="learning rate", xlim=(0, self.total_steps * 1.01), ylim=(0, None))
        axes.legend(frameon=False, fontsize=8, loc="outside right upper" if len(self.rates) > 3 else "best")
        return figure


def planned_steps(build: Builder) -> PlannedSteps:
    """Return the plan of the run that `build` would build. Load its training data, which decide the number of steps.

    Raise ValueError or OSError for data that cannot be loaded.
    """
    config = build.config
    order = build.loader(build.source("train"), "train", dp_rank=0, dp_size=1).order
    settings = config.trainer
    total = Plan.of(settings, order, checkpoint_every=config.checkpoint.every, grace_s=None).total_steps
    steps = sorted({*range(1, total + 1, -(-total // _MOST_POINTS)), total})
    rates = _rates(_update(build, order, total_steps=total), steps)
    epochs = [order.steps_in(1)] if total >= order.steps_in(1) else []
    while epochs and len(epochs) <= _MOST_MARKS and (end := order.steps_in(len(epochs) + 1)) <= total:
        epochs.append(end)
    return PlannedSteps(total, steps, rates, epochs, settings.eval_every)


def _update(build: Builder, order: Order, *, total_steps: int) -> Update:
    """Return the run's own update, for a model without storage."""
    model = components.shapes_of(build.config.model, seed=build.config.seed)
    freeze_parameters(model, build.config.trainer.freeze)
    hidden = hidden_matrices(model)
    engine = Engine(module=model, forward=build.forward())
    trained = trainable(model, hidden=hidden)
    return build.update(engine, trained, total_steps=total_steps, epochs_before=order.epochs_before)


def _rates(update: Update, steps: list[int]) -> dict[str, list[float]]:
    groups, optimizer = [update.rates(step - 1) for step in steps], update.optimizer
    turns = optimizer.turns_of_groups if isinstance(optimizer, InTurns) else None
    found = {"lr": [update.lr(step - 1) for step in steps]}
    for number, group in enumerate(optimizer.param_groups):
        rates = [rates[number] for rates in groups]
        if rates not in found.values():
            named = f"turn {turns[number]}" if turns else f"group {number}"
            count = len(group["params"])
            found[f"{named}, of {count} parameter{'s' * (count != 1)}"] = rates
    return found
