"""The training loop. It does not depend on the strategy, the launcher or the loggers."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from framework.checkpoint.canonical import state_tensors
from framework.checkpoint.plain_state import TrainingState, plain_state_of_all
from framework.checkpoint.saver import Saver
from framework.checkpoint.state import Progress
from framework.data.loader import Splits
from framework.data.source import Split
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.seam import Step
from framework.engine.sums import Sums, means, over_turns, with_loss_of_turn
from framework.modules.structure import names_of_trained
from framework.optim.turns import Turn
from framework.optim.update import Update
from framework.runs.metrics_file import Row, numbers_of
from framework.runtime.exits import Diverged
from framework.training.evaluation import DueEvaluations, measure, measured_by_task, require_finite, totals, until_asked
from framework.training.guard import require_equal_replicas, require_equal_trails, require_same_trained
from framework.training.loop_view import finish_gradients
from framework.training.metrics import finite
from framework.training.parts import LoopParts
from framework.training.plan import Alarms, Plan
from framework.training.recorder import Recorder
from framework.training.recovery import Recovery
from framework.training.speed import Speed, peak_memory_gib
from framework.training.tracking import Tracker, combined


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The training of an engine's model from `progress` to the plan's last step. Every method is collective."""

    world: World
    engine: Engine
    update: Update
    splits: Splits
    saver: Saver
    recorder: Recorder
    plan: Plan
    tracker: Tracker
    speed: Speed
    parts: LoopParts

    def __post_init__(self) -> None:
        self.progress, divergence = self.parts.loop.progress, self.plan.settings.divergence
        self.held = TrainingState(self.engine.module, self.update.optimizer, self.update.average, self.engine.task, self.parts)
        self.recovery = Recovery(divergence, world=self.world, held=self.held, saver=self.saver, recorder=self.recorder)
        self.parameters = [parameter for parameter in nn.Module.parameters(self.engine.module) if parameter.requires_grad]
        self.trained = names_of_trained(self.engine.module)
        self.loss_watch = torch.zeros((), device=self.world.device)  # a sum of losses: not finite after a loss that is not
        self.memory_gib: list[float] = []  # the peak of each rank
        self.grad_norm, self.size = 0.0, 0  # the last value read; the samples of the last step
        self.alarms = Alarms(self.plan.settings.eval_every, self.plan.checkpoint_every, world=self.world, saver=self.saver)
        self.due = DueEvaluations(self.recovery.buffers)

    def fit(self) -> bool:
        """Train. Return True when the run is finished; False when it was preempted, after a committed checkpoint."""
        if self.is_over and not self.due.left:
            return True
        if self.recovery.needs_checkpoint:
            self.commit(is_scheduled=True)
        steps = self.begin()
        is_asked, is_late, is_scheduled = False, bool(self.due.left), False  # they wait until the run can be saved
        rings = [False, False]
        while True:
            if not self.due.left:
                self.speed.enter("data")
                self.world.at("data", step=self.progress.step + 1)
                step = next(steps)
                try:
                    self.take(step)
                except Diverged as error:
                    self.speed.tick(self.progress)
                    state = self.recovery.recover(error, step=step, progress=self.progress)
                    if state is not None:
                        self.load_state_dict(state)
                        self.loss_watch.zero_()
                        steps = self.begin()
                        continue
                    self.parts.step_taken()
                self.parts.agree_on_end()
                is_over = self.is_over
                if is_over or self.is_due(self.plan.settings.eval_every) or rings[0]:
                    self.due.left = [*self.splits.validations()] or ["test"] * is_over
            can_save = self.parts.can_save(is_ending=self.is_ending)
            if self.due.left:
                self.due.finish(self.evaluate, may_stop=can_save and self.parts.can_break_off, is_over=lambda: self.is_over)
                is_over = self.is_over and not self.due.left
            is_best = can_save and self.saver.is_among_best(self.tracker.monitored(step=self.progress.step))
            asked_now, *rung = self.alarms.ask(now=self.is_due(self.plan.settings.log_every))
            rings = self.alarms.heard(rung, step=self.progress.step) if rung else rings
            is_asked |= asked_now or bool(self.due.left)
            is_scheduled |= self.is_due(self.plan.checkpoint_every)
            is_late |= is_scheduled or rings[1]
            preempted = is_asked and can_save
            is_due = is_best or preempted or (is_late and can_save)
            if preempted and not is_over:
                is_due = not self.saver.is_short_of_time(self.progress.step, grace_s=self.plan.grace_s)
            if is_over or is_due:
                self.save(is_scheduled=is_scheduled)
                is_late = is_scheduled = False
            if is_over or preempted:
                self.speed.enter("end")
                self.saver.finish()
                return is_over

    def begin(self) -> Iterator[Step]:
        """Start at `progress`: return the following steps, of which the first is loaded."""
        self.speed.enter("start")
        steps = self.splits.loader("train").train(self.progress.samples_seen)
        step = next(steps)
        self.engine.warm_up()
        self.speed.begin(step=self.progress.step, samples_seen=self.progress.samples_seen)
        return itertools.chain([step], steps)

    @property
    def is_over(self) -> bool:
        return self.is_ending and (self.is_due(None) or self.parts.can_save(is_ending=True))

    @property
    def is_ending(self) -> bool:
        return self.is_due(None) or self.tracker.patience.is_exhausted or bool(self.parts.loop.stopped)

    def is_due(self, every: int | str | None, *, at: int | None = None) -> bool:
        at = self.progress.step if at is None else at
        if isinstance(every, str):
            return self.plan.is_due(every, step=at, samples_seen=self.progress.samples_seen, size=self.size)
        return at >= self.plan.total_steps or (every is not None and at % every == 0)

    def take(self, step: Step) -> None:
        """Take one optimizer step, and log it if due. Raise Diverged, without a step, if it is not finite."""
        if self.speed.profile is not None:
            self.speed.profile.begin_step(self.progress.step + 1)
        is_logged = self.is_due(self.plan.settings.log_every, at=self.progress.step + 1)
        sums, grad_norm = self.train_step(step, measure=is_logged)
        if is_logged:
            self.log_step(step, sums, grad_norm)

    def train_step(self, step: Step, *, measure: bool) -> tuple[Sums, Tensor | None]:
        """Take one optimizer step. Return this rank's sums and, if measured, the global gradient norm."""
        progress, sums, norms, self.size = self.progress, Sums(), list[Tensor](), step.num_samples
        turns: Sequence[Turn | None] = self.update.due(progress.step) if self.update.turns else [None]
        self.world.at("training", step=progress.step + 1)
        if self.recovery.is_watching:
            self.recovery.begin_step()
        if self.parts.by_name:
            step = self.parts.begin_step(step, has_row=measure)
        for turn in turns:
            self.speed.enter("forward_backward")
            more, norm = self.take_turn(turn, step, measure=measure, is_last=turn is turns[-1])
            sums = over_turns(sums, more) if sums else more
            norms += [norm] if norm is not None else []
        self.speed.enter("loop")
        self.loss_watch += sums["loss"]
        progress.step, progress.samples_seen = progress.step + 1, progress.samples_seen + self.size
        self.parts.step_taken()
        return sums, torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0] if norms else None

    def take_turn(self, turn: Turn | None, step: Step, *, measure: bool, is_last: bool) -> tuple[Sums, Tensor | None]:
        """Do the work of `train_step` for the parameters of one turn, or for all parameters."""
        progress, plan, scale, is_watching = self.progress, self.plan, self.update.loss_scale, self.recovery.is_watching
        step = step._replace(turn=turn.name) if turn is not None else step
        for parameter in self.parameters:
            parameter.grad = None
        sums = self.engine.train(step, index=progress.step, loss_scale=scale.value, measure=measure)
        self.speed.enter("optimizer")
        finish_gradients(step=step, engine=self.engine, update=self.update)
        self.parts.gradients_ready(sums, step)
        max_norm = turn and turn.clip_grad_norm or plan.settings.clip_grad_norm
        needs_norm = measure or max_norm is not None or scale.is_dynamic or is_watching
        grad_norm = self.engine.clip_grad_norm(max_norm) if needs_norm else None
        if is_watching and grad_norm is not None:  # so that the device is waited for only once
            loss, norm = torch.stack([sums["loss"], grad_norm.to(sums["loss"].device)]).cpu().double()
            if self.world.agreement.sum((~torch.isfinite(loss)).double()):
                raise Diverged(f"the loss of step {progress.step + 1} is not finite")
            scale.require_finite(norm.item(), step=progress.step + 1)
        self.update.take(progress.step, grad_norm=grad_norm, is_last=is_last)
        if turn is not None and measure:
            sums = with_loss_of_turn(sums, turn.name)
        return sums, grad_norm

    def log_step(self, step: Step, sums: Sums, grad_norm: Tensor | None) -> None:
        self.world.at("logging", step=self.progress.step)
        means = self.means(sums, num_samples=step.num_samples, norm=grad_norm)
        if turns := [turn for turn in self.update.due(self.progress.step - 1) if turn is not None]:
            means["loss"] = math.fsum(means[f"{turn.name}_loss"] for turn in turns)
        self.speed.tick(self.progress)
        own = {
            "lr": self.update.lr(self.progress.step - 1),
            "grad_norm": self.grad_norm,  # not finite if fp16 has skipped the step
            "epoch": step.epoch,
            **self.speed.row(step=self.progress.step, samples_seen=self.progress.samples_seen),
            "memory_gib": max(self.memory_gib),
            "goodput": self.progress.goodput,
        }
        self.record(combined(*self.tracker.columns("train", means, step=self.progress.step), ("", own), *self.parts.columns()))

    def means(self, sums: Sums, *, num_samples: int, norm: Tensor | None = None) -> dict[str, float]:
        """Return means over all ranks' samples; also store the gradient norm (the same on all ranks) and each rank's memory.

        Diverged if the norm, or on any rank a loss since the last call, is not finite. Unfit if the ranks' trails differ.
        """
        size, step, watch = self.world.world_size, self.progress.step, self.loss_watch
        own = torch.zeros(2 * size + 1, dtype=torch.float64)
        own[self.world.rank], own[size + self.world.rank] = peak_memory_gib(self.world.devices), self.engine.trail()
        own[-1] = self.speed.step_s(step=step)
        once = torch.zeros_like(watch) if norm is None or self.world.rank else norm
        found = totals(sums | {":watch": watch, ":norm": once, ":own": own}, world=self.world)
        self.memory_gib, trails, (step_s,) = map(Tensor.tolist, found.pop(":own").split(size))
        self.world.agreement.take_pace(call_s=step_s / size)
        require_equal_trails(trails, step=step)
        self.grad_norm = found.pop(":norm").item()
        self.update.loss_scale.require_finite(self.grad_norm, step=step)
        if not torch.isfinite(found.pop(":watch")):
            raise Diverged(f"the loss is not finite by step {step} (it was still finite at the last checkpoint or row)")
        return means(found, num_samples=num_samples)

    def record(self, row: Row) -> None:
        """Track a row, and write it. Unfit if it lacks the monitored metric."""
        row = {name: finite(value) for name, value in row.items()}
        self.tracker.patience.note(numbers_of(row))
        self.tracker.note(numbers_of(row))
        self.recorder.log(row)

    def evaluate(self, split: Split, *, may_stop: bool = False) -> None:
        """Measure a split. Diverged if its loss is not finite. With `may_stop`, Interrupted once any rank is asked to stop."""
        self.world.at("evaluation", step=self.progress.step)
        self.speed.enter("evaluation")
        self.parts.evaluating(split)
        loader = self.splits.loader(split)
        with self.update.averaged():
            sums = measure(self.engine, until_asked(loader.evaluate(), lambda: may_stop and self.alarms.ask(now=True)[0]))
            means = self.means(sums, num_samples=len(loader.source))
            observed = ("task", measured_by_task(self.engine)), ("metric", self.tracker.metrics.compute(world=self.world))
            require_finite(means["loss"], sums, what=f"the {split} loss of step {self.progress.step}")
            row = combined(*self.tracker.columns(split, means, step=self.progress.step), *observed)
            row = combined(("", row), *self.parts.evaluated(split, row))
        self.speed.enter("loop")
        self.record(row)

    def save(self, *, is_scheduled: bool) -> None:
        """Save a checkpoint. Raise Diverged instead if its content would not be finite."""
        self.world.at("saving", step=self.progress.step)
        self.speed.enter("checkpoint")
        # the gradients of the last step still exist; with a recovery policy, they may be those of a skipped step
        self.means({}, num_samples=1, norm=None if self.recovery.is_watching else self.engine.clip_grad_norm(None))
        self.commit(is_scheduled=is_scheduled)
        self.speed.enter("loop")

    def commit(self, *, is_scheduled: bool) -> None:
        require_same_trained(self.engine.module, self.trained)
        self.engine.sync_buffers()
        self.parts.saving()
        require_equal_replicas(self.engine.module, world=self.world)
        self.speed.tick(self.progress)
        kept = plain_state_of_all(self.held, initial=self.update.initial, world=self.world).model_dump()
        flush = functools.partial(self.recorder.flush, **self.summary())
        state = self.state_dict() | {"kept": kept, "is_scheduled": is_scheduled}
        self.saver.save(self.progress.step, state_tensors(self.held), state, flush=flush)

    def summary(self) -> dict[str, Any]:
        measured = {"goodput": self.progress.goodput, "memory_gib": self.memory_gib}
        return self.progress.model_dump() | measured | {"metrics": self.tracker.splits, "saves": self.saver.counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the plain part of a checkpoint: everything except tensors."""
        return {
            "progress": self.progress.model_dump(),
            "metrics": self.tracker.splits,
            "patience": self.tracker.patience.state_dict(),
            "monitor": self.tracker.monitored(step=self.progress.step),
            "loss_scale": self.update.loss_scale.state_dict(),
            "facts": self.saver.facts,
            **self.splits.state_dict(),
            "stopped": self.parts.loop.stopped,
            "evaluations_left": [*self.due.left],
            **self.recorder.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the plain part of a checkpoint. `checkpoint.canonical.restore` loads the tensors."""
        self.progress = self.parts.loop.progress = Progress(**state["progress"])
        self.parts.loop.stopped = state.get("stopped", "")
        self.due.left = [*state.get("evaluations_left", [])]
        self.splits.load_state_dict(state)
        self.tracker.splits = state["metrics"]
        self.tracker.patience.load_state_dict(state["patience"])
        self.update.loss_scale.load_state_dict(state["loss_scale"])
        self.recorder.load_state_dict(state)
