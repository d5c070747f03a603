"""What depends on the cut of a step into micro-batches: a loss that is not a sum, coupled samples, draws for a batch."""

import math

import torch
from torch import nn

from framework.build.training import Builder
from framework.engine.seam import MicroBatch, Step
from framework.modules.structure import batch_dependent_layers, in_eval_mode
from framework.preflight.differences import untouched
from framework.preflight.findings import Finding, Refused
from framework.preflight.player import Player
from framework.preflight.training_samples import TrainingSamples


class Cutting:
    """A search for dependence on the cut. `is_by_ranks`: in the run, a micro-batch is a process's share of a step."""

    def __init__(self, build: Builder, *, is_by_ranks: bool) -> None:
        self._build, self._is_by_ranks = build, is_by_ranks

    def look(self, module: nn.Module, step: Step, samples: TrainingSamples) -> list[Finding]:
        """Return the warnings for the run. Raise Refused for a mean where a sum is needed."""
        found = self._look_at_loss(module, step, samples) or self._look_at_cut(module, step, samples)
        if not found and self._is_by_ranks and samples.draw_for_micro_batches:
            found = self._depends_on_cut("dataset", "its collate function or a transform draws once for a whole micro-batch")
        return found

    def _look_at_loss(self, module: nn.Module, step: Step, samples: TrainingSamples) -> list[Finding]:
        """Compare the loss of two samples with the sum of their losses; for a task's own step, a batch with its halves."""
        if self._build.forward().trains_by_step:
            return self._look_at_own_step(step, samples)
        forward = self._build.forward()
        with in_eval_mode(module), torch.no_grad():
            try:
                two = samples.cut(2)[0]
                if two.num_samples < 2:
                    return []
                both = float(forward(module, two, measure=False)[0])
                alone = sum(float(forward(module, one, measure=False)[0]) for one in samples.cut(1)[:2])
            except Exception:  # a model, or a collate function, that does not accept one sample
                return []
        return self._judge(both, alone, of="two samples", parts_are="their losses")

    def _judge(self, whole: float, parts: float, *, of: str, parts_are: str) -> list[Finding]:
        """Refuse a loss of two parts that is the mean of the parts' losses; `parts` is their sum. Warn if it is not the sum."""
        if not math.isfinite(whole + parts) or abs(whole - parts) <= 1e-3 * max(abs(whole), abs(parts)):
            return []
        if abs(2 * whole - parts) <= 1e-3 * max(abs(2 * whole), abs(parts)):
            what = f"its loss of {of} is the mean of {parts_are}: the results would depend on how a step is cut"
            raise Refused("task", what, "return the sum over the samples (reduction='sum')")
        return self._depends_on_cut("task", f"its loss of {of} is neither the sum nor the mean of {parts_are}")

    def _look_at_own_step(self, step: Step, samples: TrainingSamples) -> list[Finding]:
        player = Player(self._build.altered())
        one, *_ = step.micro_batches
        half = one.num_samples // 2
        if half * 2 != one.num_samples or half == 0:
            return []
        step = step._replace(num_samples=one.num_samples)
        try:
            halves = samples.cut(half)[:2]
            with in_eval_mode(player.module):
                whole, parts = (
                    float(player.forward_backward(step._replace(micro_batches=cut), index=0)["loss"]) for cut in ([one], halves)
                )
        except Exception:  # a model, or a collate function, that does not accept so few samples
            return []
        return self._judge(whole, parts, of="a batch", parts_are="its halves' losses")

    def _look_at_cut(self, module: nn.Module, step: Step, samples: TrainingSamples) -> list[Finding]:
        """Warn of a training forward that draws, or that couples samples although no layer class shows it."""
        if batch_dependent_layers(module):  # with or without a rehearsal, there is a warning about these
            return []
        whole, forward = step.micro_batches[0], self._build.forward()
        size = whole.num_samples

        def loss(micro_batch: MicroBatch, *, number: int = 0) -> float:
            forward.seed_draws(step=0, micro_batch=number)
            with torch.no_grad(), untouched(module):
                return float(forward(module, micro_batch, measure=False)[0])

        try:
            at_once, *others = [loss(whole, number=number) for number in range(3)]
            cut = samples.cut(max(n for n in range(1, size) if size % n == 0))
            in_parts = sum(loss(part) for part in cut if part.start < size)
        except Exception:  # a model, or a collate function, that does not accept so few samples
            return []
        if any(other != at_once for other in others):
            return self._depends_on_cut("model", "its training forward draws random numbers")
        if abs(at_once - in_parts) > 1e-3 * abs(at_once):
            return self._depends_on_cut("model", "its training forward couples the samples of a micro-batch")
        return []

    def _depends_on_cut(self, key: str, what: str) -> list[Finding]:
        if not self._is_by_ranks:
            return []
        what = f"{what}, so the results depend on the number of processes"
        return [Finding(key, what, "set micro_batch_size", refuses=False)]
