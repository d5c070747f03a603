"""What depends on the cut of a step into micro-batches: a loss that is not a sum, coupled samples, draws for a batch."""

import math
from collections.abc import Sequence

from framework.build.training import Builder
from framework.engine.seam import MicroBatch, Step
from framework.modules.structure import batch_dependent_layers, in_eval_mode
from framework.preflight.differences import untouched
from framework.preflight.findings import Finding, Refused, blamed
from framework.preflight.player import Player
from framework.preflight.processes import data_ranks
from framework.preflight.training_samples import TrainingSamples


class Cutting:
    """A search for dependence on the cut. `build` is a rehearsal's, `run` is the run's."""

    def __init__(self, build: Builder, samples: TrainingSamples, *, run: Builder) -> None:
        self._player, self._samples, self._of_run = Player(build, sources={"train": samples.source}), samples, run.config
        self._size = build.config.global_batch_size // 2
        # in the run, a micro-batch is a process's share of a step
        self._is_by_ranks = self._of_run.micro_batch_size is None and self._of_run.launch.most_processes > 1

    def look_at_smallest(self) -> None:
        """Refuse a model or task that does not take the run's smallest micro-batch, if it is smaller than the rehearsal's."""
        config = self._of_run
        size = self._samples.smallest(dp_size=data_ranks(config.parallel, config.launch.most_processes))
        if size >= self._size:
            return
        is_by_end = config.micro_batch_size is None or config.global_batch_size % config.micro_batch_size == 0
        cure = "drop_last=true leaves it out" if is_by_end else "a micro_batch_size that divides global_batch_size"
        what = f"it does not take a micro-batch of {size} sample{'s' * (size != 1)}, the run's smallest"
        with blamed("model", what, cure):
            self._loss(self._samples.cut(size)[:1])

    def look(self) -> list[Finding]:
        """Return the warnings for the run. Raise Refused for a mean where a sum is needed."""
        found: list[Finding] = []
        for look in (self._look_at_loss, self._look_at_training):
            try:
                found = found or look()
            except Refused:
                raise
            except Exception:  # a model, or a collate function, that does not accept so few samples
                continue
        if not found and self._is_by_ranks and self._samples.draw_for_micro_batches:
            found = self._depends_on_cut("dataset", "its collate function or a transform draws once for a whole micro-batch")
        return found

    def _loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        step = Step(0, sum(micro_batch.num_samples for micro_batch in micro_batches), list(micro_batches))
        with untouched(self._player.module):
            return float(self._player.gradients(step, index=0, measure=False)["loss"])

    def _look_at_loss(self) -> list[Finding]:
        """Compare, in evaluation mode, the loss of some samples with the losses of their halves."""
        half = max(1, self._size // 2)
        with in_eval_mode(self._player.module):
            whole, parts = self._loss(self._samples.cut(2 * half)[:1]), self._loss(self._samples.cut(half)[:2])
        if not math.isfinite(whole + parts) or abs(whole - parts) <= 1e-3 * max(abs(whole), abs(parts)):
            return []
        if abs(2 * whole - parts) <= 1e-3 * max(abs(2 * whole), abs(parts)):
            what = "its loss of a batch is the mean of its halves' losses: the results would depend on how a step is cut"
            raise Refused("task", what, "return the sum over the samples (reduction='sum')")
        return self._depends_on_cut("task", "its loss of a batch is neither the sum nor the mean of its halves' losses")

    def _look_at_training(self) -> list[Finding]:
        """Warn of a training forward that draws, or that couples samples although no layer class shows it."""
        if not self._is_by_ranks or batch_dependent_layers(self._player.module):  # there is a warning about these anyway
            return []
        whole, *_ = self._samples.cut(self._size)
        at_once, *others = (self._loss([whole._replace(number=number)]) for number in range(3))
        if any(other != at_once for other in others):
            return self._depends_on_cut("model", "its training forward draws random numbers")
        parts = self._samples.cut(max(n for n in range(1, self._size) if self._size % n == 0))
        in_parts = self._loss([part for part in parts if part.start < self._size])
        if abs(at_once - in_parts) > 1e-3 * abs(at_once):
            return self._depends_on_cut("model", "its training forward couples the samples of a micro-batch")
        return []

    def _depends_on_cut(self, key: str, what: str) -> list[Finding]:
        if not self._is_by_ranks:
            return []
        what = f"{what}, so the results depend on the number of processes"
        return [Finding(key, what, "set micro_batch_size", refuses=False)]
