"""The loop. It does not know which strategy, launcher or logger it runs under."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from framework.averaging import AveragedWeights
from framework.checkpoint.canonical import restore, state_tensors
from framework.checkpoint.saver import Saver
from framework.checkpoint.store import CheckpointStore
from framework.data.loader import Loader
from framework.divergence import Divergence
from framework.engine import Engine, Step, Sums, add, persistent_buffers
from framework.log import LOGGER
from framework.loss_scale import LossScale
from framework.metrics import Patience, Row, Tracker
from framework.outcome import Diverged
from framework.preemption import PREEMPTION
from framework.recorder import Recorder
from framework.world import World


@dataclass
class Progress:
    """Where a run stands. All counters are global; none belongs to a rank."""

    step: int = 0
    samples_seen: int = 0
    wall_s: float = 0.0
    num_divergences: int = 0  # that were got over


@dataclass(frozen=True)
class Plan:
    """When things are due, in optimizer steps; None is "only at the end"."""

    total_steps: int
    log_every: int
    eval_every: int | None
    checkpoint_every: int | None
    clip_grad_norm: float | None
    grace_s: float | None  # between the signal that asks a run to stop and the one that kills it; None if not known


class Trainer:
    """Trains an engine's model to the plan's last step from wherever `progress` stands. Every method is collective."""

    def __init__(
        self,
        *,
        world: World,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        lr: float,
        schedule: Callable[[int, int], float],
        loaders: dict[str, Loader],
        store: CheckpointStore,
        saver: Saver,
        recorder: Recorder,
        plan: Plan,
        tracker: Tracker,
        patience: Patience,
        divergence: Divergence,
        loss_scale: LossScale,
        average: AveragedWeights | None,
        facts: dict[str, Any],
    ) -> None:
        self.world = world
        self.engine = engine
        self.optimizer = optimizer
        self.lr = lr  # the peak; a rank's own groups may have others, or none of it
        self.schedule = schedule
        self.loaders = loaders
        self.store = store
        self.saver = saver
        self.recorder = recorder
        self.plan = plan
        self.tracker = tracker
        self.patience = patience
        self.divergence = divergence
        self.loss_scale = loss_scale
        self.average = average
        self.facts = facts  # what a checkpoint must have in common with the run that loads it
        self.progress = Progress()
        self.peak_lrs = [group["lr"] for group in optimizer.param_groups]
        self.parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        self.buffers = persistent_buffers(engine.module) if divergence.is_watched else []
        self.before: list[Tensor] = []  # the buffers, as they were before the step
        self.loss_watch = torch.zeros((), device=world.device)  # adding up losses, it stays non-finite once one was
        self.last_log = (time.monotonic(), 0)
        self.last_tick = time.monotonic()

    def fit(self) -> bool:
        """Train. Returns True when the run is finished, False when it was preempted, after a committed checkpoint."""
        if self.is_over:
            return True
        if self.divergence.rolls_back and self.store.newest_valid() is None:
            self.commit()
        step, steps = self.begin()
        while True:
            try:
                self.take(step)
            except Diverged as error:
                if self.recover(error, step):
                    step, steps = self.begin()
                    continue
            is_best = (self.is_over or self.is_due(self.plan.eval_every)) and self.evaluate("val")
            is_asked, save_failed = self.world.any_flags(PREEMPTION.requested, self.saver.has_failed)
            preempted = is_asked and self.engine.can_pause(self.progress.step)
            if save_failed:
                self.saver.settle()
            if self.is_over:
                self.evaluate("test")
            is_due = is_best or preempted or self.is_due(self.plan.checkpoint_every)
            if self.is_over or (is_due and not (preempted and self.is_short_of_time())):
                self.save()
            if self.is_over or preempted:
                self.saver.finish()
                return self.is_over
            step = next(steps)

    def begin(self) -> tuple[Step, Iterator[Step]]:
        """Start at `progress`: return the first step and those that follow."""
        steps = self.loaders["train"].train(self.progress.samples_seen)
        step = next(steps)
        self.engine.warm_up(step)
        self.last_log = (time.monotonic(), self.progress.samples_seen)
        return step, steps

    @property
    def is_over(self) -> bool:
        return self.progress.step >= self.plan.total_steps or self.patience.is_exhausted

    def is_due(self, every: int | None, *, at: int | None = None) -> bool:
        at = self.progress.step if at is None else at
        return at >= self.plan.total_steps or (every is not None and at % every == 0)

    def take(self, step: Step) -> None:
        """Take one optimizer step, and log it if that is due. Diverged, with nothing taken, if it is not finite."""
        is_logged = self.is_due(self.plan.log_every, at=self.progress.step + 1)
        sums, grad_norm = self.train_step(step, measure=is_logged)
        if is_logged:
            self.log_step(step, sums, grad_norm)

    def train_step(self, step: Step, *, measure: bool) -> tuple[Sums, Tensor | None]:
        """Take one optimizer step. Returns this rank's sums and, if it was measured, the global gradient norm."""
        progress, plan, scale = self.progress, self.plan, self.loss_scale
        self.world.at("training", step=progress.step + 1)
        for parameter in self.parameters:
            parameter.grad = None
        self.before = [buffer.clone() for buffer in self.buffers]
        sums = self.engine.forward_backward(step, index=progress.step, loss_scale=scale.value, measure=measure)
        scale.unscale(self.parameters)
        needs_norm = measure or plan.clip_grad_norm is not None or scale.is_dynamic or self.divergence.is_watched
        grad_norm = self.engine.clip_grad_norm(plan.clip_grad_norm) if needs_norm else None
        if self.divergence.is_watched:
            self.require_finite_loss(sums["loss"], step=progress.step + 1)
        if (measure or self.divergence.is_watched) and grad_norm is not None:
            self.require_finite(grad_norm, step=progress.step + 1)
        if scale.accepts(grad_norm):
            factor = self.schedule(progress.step, plan.total_steps)
            for group, peak in zip(self.optimizer.param_groups, self.peak_lrs):
                group["lr"] = peak * factor
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        self.loss_watch += sums["loss"]
        progress.step += 1
        progress.samples_seen += step.num_samples
        return sums, grad_norm

    def recover(self, error: Diverged, step: Step) -> bool:
        """Get over a step that is not finite, as the policy says; raise `error` where it says that the run ends.

        Returns whether the run stands at an earlier step now.
        """
        policy, count = self.divergence, self.progress.num_divergences + 1
        if not policy.is_watched:
            raise error
        if count > policy.limit:
            raise Diverged(f"{error.what} (it has been got over {policy.limit} times, which is trainer.divergence.limit)")
        if policy.rolls_back:
            self.roll_back(past=step)
        else:
            self.leave_out(step)
        self.progress.num_divergences = count
        if self.world.rank == 0:
            done = f"back to step {self.progress.step}, leaving out the batches since" if policy.rolls_back else "left out"
            LOGGER.warning("%s: %s (%d of %d times)", error.what, done, count, policy.limit)
        return policy.rolls_back

    def leave_out(self, step: Step) -> None:
        """Count a step as taken whose forward pass has changed nothing but the buffers."""
        for buffer, before in zip(self.buffers, self.before):
            buffer.copy_(before)
        self.progress.step += 1
        self.progress.samples_seen += step.num_samples

    def roll_back(self, *, past: Step) -> None:
        """Load an earlier checkpoint, and have the samples continue behind the step `past`."""
        self.saver.settle()
        found = self.store.newest_valid(back=self.divergence.back - 1)
        if found is None:  # the disk has refused even the first, of step 0
            raise Diverged(f"step {self.progress.step + 1} is not finite, and there is no checkpoint to go back to")
        path, state = found
        samples_seen = self.progress.samples_seen + past.num_samples
        self.tick()
        wall_s = self.progress.wall_s
        restore(path, module=self.engine.module, optimizer=self.optimizer, average=self.average, world=self.world)
        self.load_state_dict(state)
        self.progress.samples_seen, self.progress.wall_s = samples_seen, wall_s
        self.loss_watch.zero_()
        self.store.drop_after(self.progress.step)  # a restart must not take them for this run's newest
        self.recorder.rewind(self.progress.step)

    def require_finite_loss(self, loss: Tensor, *, step: int) -> None:
        """Raise Diverged on every rank if the loss is not finite on any."""
        if self.world.sum((~torch.isfinite(loss)).double().cpu()):
            raise Diverged(f"the loss of step {step} is not finite")

    def require_finite(self, grad_norm: Tensor, *, step: int) -> None:
        """Raise Diverged on every rank, the norm being the global one; but fp16 skips such a step and goes on."""
        if not self.loss_scale.is_dynamic and not torch.isfinite(grad_norm):
            raise Diverged(f"the gradient of step {step} is not finite (norm {grad_norm.item()})")

    def log_step(self, step: Step, sums: Sums, grad_norm: Tensor | None) -> None:
        assert grad_norm is not None
        self.world.at("logging", step=self.progress.step)
        norm = grad_norm.item()
        means = self.means(sums, num_samples=step.num_samples)
        now, (then, seen) = time.monotonic(), self.last_log
        self.last_log = (now, self.progress.samples_seen)
        self.record({
            "step": self.progress.step,
            "split": "train",
            **means,
            "lr": self.lr * self.schedule(self.progress.step - 1, self.plan.total_steps),
            "grad_norm": norm if math.isfinite(norm) else None,  # fp16 has skipped the step; JSON has no infinity
            "samples_per_s": (self.progress.samples_seen - seen) / max(now - then, 1e-9),
            "epoch": step.epoch,
        })  # fmt: skip

    def means(self, sums: Sums, *, num_samples: int) -> dict[str, float]:
        """Return means over all ranks' samples. Diverged if any loss since the last call, on any rank, was not finite."""
        local = torch.stack([*(value.double() for value in sums.values()), self.loss_watch.double()])
        *totals, watch = self.world.sum(local.cpu()).tolist()
        if not math.isfinite(watch):
            raise Diverged(f"the loss is not finite by step {self.progress.step} (it was still finite at the last "
                           "checkpoint or row)")  # fmt: skip
        return {name: total / num_samples for name, total in zip(sums, totals)}

    def record(self, row: Row) -> None:
        self.patience.note(row)
        self.recorder.log(row)
        self.tracker.note(row)

    def evaluate(self, split: str) -> bool:
        """Measure every sample of a split once. Returns whether this step's checkpoint is one of the best, to be kept.

        Diverged if the loss is not finite: no batch is to blame for that, so there is none to leave out.
        """
        self.world.at("evaluation", step=self.progress.step)
        self.engine.sync_buffers()
        self.engine.module.eval()
        if self.average is not None:
            self.average.swap()
        sums: Sums = {}
        for micro_batch in self.loaders[split].evaluate():
            add(sums, self.engine.forward(micro_batch))
        if self.average is not None:
            self.average.swap()
        self.engine.module.train()
        means = self.means(sums, num_samples=len(self.loaders[split].source))
        if not math.isfinite(means["loss"]):
            raise Diverged(f"the {split} loss of step {self.progress.step} is not finite")
        self.record({"step": self.progress.step, "split": split, **means})
        return self.saver.is_among_best(self.tracker.monitored(step=self.progress.step))

    def save(self) -> None:
        """Save a checkpoint. Diverged instead, if what it would hold is not finite."""
        self.world.at("saving", step=self.progress.step)
        self.means({}, num_samples=1)
        if not self.divergence.is_watched:  # where it is, a step that was left out has left its gradient
            # the gradients of the step just taken are still there
            self.require_finite(self.engine.clip_grad_norm(None), step=self.progress.step)
        self.commit()

    def commit(self) -> None:
        self.engine.sync_buffers()
        self.tick()
        tensors = state_tensors(self.engine.module, self.optimizer, self.average)
        flush = functools.partial(self.recorder.flush, **self.summary())
        self.saver.save(self.progress.step, tensors, self.state_dict(), flush=flush)

    def is_short_of_time(self) -> bool:
        """Return whether, on any rank, a checkpoint would take longer than what is left before the signal that kills."""
        self.saver.settle()
        if self.plan.grace_s is None or self.saver.last is None:
            return False
        times = self.world.gather((PREEMPTION.left_of(self.plan.grace_s), self.saver.last.seconds))
        left, needed = min(left for left, _ in times), max(seconds for _, seconds in times)
        if left < needed and self.world.rank == 0:
            LOGGER.warning("no checkpoint of step %d: %.1f s of launch.grace_s are left, and the last one took %.1f s; the "
                           "run continues from that, of step %d",
                           self.progress.step, max(0.0, left), needed, self.saver.last.step)  # fmt: skip
        return left < needed

    def tick(self) -> None:
        now = time.monotonic()
        self.progress.wall_s += now - self.last_tick
        self.last_tick = now

    def summary(self) -> dict[str, Any]:
        return asdict(self.progress) | {"metrics": self.tracker.splits, "saves": self.saver.counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the plain part of a checkpoint: everything but tensors."""
        return {
            "progress": asdict(self.progress),
            "metrics": self.tracker.splits,
            "monitor": self.tracker.monitored(step=self.progress.step),
            "patience": self.patience.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "facts": self.facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's plain part. The tensors are `checkpoint.canonical.restore`'s."""
        self.progress = Progress(**state["progress"])
        self.tracker.splits = state["metrics"]
        self.patience.load_state_dict(state["patience"])
        self.loss_scale.load_state_dict(state["loss_scale"])
