"""What decides the results of a step besides its samples: how it is cut into micro-batches."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

from framework.build.training import Builder
from framework.engine.forward import modules_of
from framework.engine.seam import MicroBatch, Step
from framework.modules.structure import batch_norms, in_eval_mode
from framework.optim.precision import PRECISIONS
from framework.preflight.differences import Draws, differ, untouched
from framework.preflight.player import Player
from framework.preflight.processes import data_ranks
from framework.preflight.refused import Refused, blamed
from framework.preflight.sketches import Sketch, far, other_sketch, sketch
from framework.preflight.training_samples import TrainingSamples
from framework.runtime.exits import is_own_code
from framework.runtime.problem import Problem
from framework.runtime.torch_internals import UNREAD_STATISTICS

_MORE_S = 0.5  # seconds for the losses of more samples, and for later steps


class _Computed(NamedTuple):
    """What a step computes, by name."""

    sums: dict[str, float]
    buffers: dict[str, Sketch]
    gradients: dict[str, Sketch]


class Cutting:
    """A search for dependence on the cut."""

    def __init__(self, build: Builder, samples: TrainingSamples) -> None:
        self._player, self._samples = Player(build, sources={"train": samples.source}), samples
        self._of_run = build.of_run.config
        self._size = build.config.global_batch_size // 2
        # in the run, a micro-batch is a process's share of a step
        depends = self._of_run.micro_batch_size == "auto" or self._of_run.launch.most_processes > 1
        self._rounds = PRECISIONS[self._of_run.precision.name].autocast is not None
        self._is_open = self._of_run.known_micro_batch_size is None and depends
        self._index = 0  # of the step

    @property
    def _synchronised(self) -> list[nn.Module]:
        """The layers whose statistics are of all processes in the run."""
        return batch_norms(self._player.module) if self._of_run.trainer.sync_batchnorm else []

    @property
    def _has_several(self) -> bool:
        """Whether a step of the run has several micro-batches, however many processes there are."""
        return (self._of_run.known_micro_batch_size or math.inf) < self._of_run.global_batch_size

    def look_at_smallest(self) -> None:
        """Refuse a model or task that does not take the run's smallest micro-batch, if it is smaller than the rehearsal's."""
        config = self._of_run
        dp_size = data_ranks(config.parallel, config.launch.most_processes)
        size = self._samples.smallest(dp_size=1 if config.trainer.sync_batchnorm else dp_size)
        if size >= self._size:
            return
        fixed = config.known_micro_batch_size
        is_by_end = fixed is None or config.global_batch_size % fixed == 0
        cure = "drop_last=true leaves it out" if is_by_end else "a micro_batch_size that divides global_batch_size"
        what = f"it does not take a micro-batch of {size} sample{'s' * (size != 1)}, the run's smallest"
        with blamed("model", what, cure):
            self._loss(self._samples.cut(size)[:1])

    def look(self) -> list[Problem]:
        """Return the warnings for the run. Raise Refused for a mean where a sum is needed."""
        found: list[Problem] = []
        for look in (self._look_at_loss, self._look_at_training):
            try:
                found = found or look()
            except Refused:
                raise
            except Exception:  # a model, or a collate function, that does not accept so few samples
                continue
        if self._is_open and self._samples.draw_for_micro_batches:  # this explains what was found
            found = self._depends_on_cut("dataset", "its collate function or a transform draws once for a whole micro-batch")
        return found

    def draws_later(self, draws: Draws) -> list[Problem]:
        """Return the warning that something draws only in some of the steps, or only in evaluations."""
        if draws.in_training:
            who, what = self._of_later_steps
            return self._depends_on_cut(who, f"{what} draws random numbers")
        return self._depends_on_cut("model, task", "an evaluation draws random numbers") if draws.in_evaluation else []

    @property
    def _of_later_steps(self) -> tuple[str, str]:
        """The keys of what decides a training step, and its name for a message."""
        parts = self._player.parts
        who = ["model", *(["task"] if hasattr(self._player.task, "step") else [])]
        who += [f"part.{name}" for name in parts.by_name if ":" not in name]
        return ", ".join(who), f"in a later step, its training forward{' or batch()' * bool(parts.changing_batches)}"

    def look_later(self, player: Player) -> list[Problem]:
        """Return the warnings that begin in a later step of the run: after the steps of this player, or at the step's number.

        Nothing else can be done with the player after this.
        """
        if not self._is_open:
            return []
        with torch.no_grad():  # as rounding decides nothing: those of the first step
            for parameter, first in zip(player.module.parameters(), self._player.module.parameters()):
                parameter.copy_(first)
                parameter.grad = None
        self._player, until, progress = player, time.monotonic() + _MORE_S, player.trainer.progress
        for layer in self._synchronised:
            layer.eval()
        total_steps = player.parts.loop.total_steps = self._samples.plan.total_steps
        for self._index in sorted({progress.step, max(progress.step, total_steps // 2), max(progress.step, total_steps - 1)}):
            progress.step = self._index
            with suppress(Exception):  # of a part that does not expect it
                if time.monotonic() < until and (found := self._look_at_cuts(*self._of_later_steps, with_parts=True)):
                    return found
        return []

    def writes(self, name: str) -> list[Problem]:
        """Return the warning that each micro-batch of a step changes a parameter, if the run's steps have several."""
        if not self._has_several:
            return []
        what = f"its forward changes {name}, a parameter, in each micro-batch of a step anew"
        cure = "micro_batch_size=null, or register_buffer(): micro-batch 0 of a step then changes it"
        return [Problem("model", what, cure, is_warning=True)]

    def _loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        return self._computed(micro_batches, measure=False).sums["loss"]

    def _computed(self, micro_batches: Sequence[MicroBatch], *, with_parts: bool = False, measure: bool = True) -> _Computed:
        """Return what a step with these micro-batches computes; nothing is changed."""
        step = Step(0, sum(micro_batch.num_samples for micro_batch in micro_batches), list(micro_batches))
        holders = [self._player.module, *modules_of(self._player.task).values()]
        with untouched(*holders):
            step = self._player.parts.begin_step(step, has_row=True) if with_parts else step
            sums = self._player.gradients(step, index=self._index, measure=measure)
            parameters = dict(self._player.module.named_parameters())
            return _Computed(
                {name: float(value) for name, value in sums.items()},
                {name: sketch(buffer) for holder in holders for name, buffer in holder.named_buffers()},
                {name: sketch(torch.zeros(()) if p.grad is None else p.grad) for name, p in parameters.items()},
            )

    def _look_at_loss(self) -> list[Problem]:
        """Compare, in evaluation mode, the loss of some samples with the losses of their halves."""
        half = max(1, self._size // 2)
        with in_eval_mode(self._player.module):
            whole, parts = self._loss(self._samples.cut(2 * half)[:1]), self._loss(self._samples.cut(half)[:2])
        rounding = 1e-2 if self._rounds else 1e-5
        if not math.isfinite(whole + parts) or abs(whole - parts) <= rounding * max(abs(whole), abs(parts)):
            return self._look_at_more()
        where = place_of_loss(self._player.task)
        if abs(2 * whole - parts) <= rounding * max(abs(2 * whole), abs(parts)):
            what = f"its loss of a batch{where} is the mean of its halves' losses"
            what = f"{what}: the results would depend on how a step is cut"
            raise Refused("task", what, "return the sum over the samples (reduction='sum')")
        what = f"its loss of a batch{where} is neither the sum nor the mean of its halves' losses"
        return self._depends_on_cut("task", f"{what} (it, or the model's forward in evaluation mode, couples samples or draws)")

    def _look_at_more(self) -> list[Problem]:
        """Compare the losses of more and more samples, as far as there is time: what couples some may not couple the first."""
        count, most, until = 2 * self._size, self._of_run.global_batch_size, time.monotonic() + _MORE_S
        while self._is_open and count // 2 < most and time.monotonic() < until:
            count = min(count, most)
            with in_eval_mode(self._player.module):
                whole, parts = (self._loss(self._samples.first(count, size=size)) for size in (count, -(-count // 2)))
            if math.isfinite(whole + parts) and differ(whole, parts, tolerance=1e-2 if self._rounds else 3e-5):
                what = (
                    f"its loss of {count} samples{place_of_loss(self._player.task)} is not the sum of the losses of its halves"
                )
                return self._depends_on_cut("task", what)
            count *= 2
        return []

    def _look_at_training(self) -> list[Problem]:
        """Warn of a training step that draws, that couples samples or that counts them, whatever code does so."""
        synchronised = self._synchronised
        if synchronised and self._of_run.micro_batch_size is not None and self._of_run.launch.most_processes > 1:
            what = "the statistics are of one micro-batch of each process, so the results depend on the number of processes"
            return [Problem("trainer.sync_batchnorm", what, "micro_batch_size=null, or false", is_warning=True)]
        if not self._is_open:
            return self._look_at_other_micro_batches()
        for layer in synchronised:
            layer.eval()
        changing = [f"part.{name}" for name in self._player.parts.changing_batches]
        found = self._look_at_cuts("model", "its training forward", with_parts=False)
        return found or (self._look_at_cuts(", ".join(changing), "its batch()", with_parts=True) if changing else [])

    def _look_at_other_micro_batches(self) -> list[Problem]:
        """Warn of a buffer that follows only a step's micro-batch 0, if its samples matter and the run's steps have several.

        Statistics that no forward reads in training are no such buffers.
        """
        if not self._has_several:
            return []
        of_each = [self._computed([one._replace(number=0)]).buffers for one in self._samples.cut(self._size)[:2]]
        holders = [self._player.module, *modules_of(self._player.task).values()]
        parts = [named for holder in holders for named in holder.named_modules()]
        unread = [f"{prefix}." for prefix, part in parts if type(part).forward in UNREAD_STATISTICS]
        first, *others = ({name: one for name, one in found.items() if not name.startswith((*unread,))} for found in of_each)
        if name := next(filter(None, (other_sketch(first, other) for other in others)), ""):
            owner = "model" if name in dict(self._player.module.named_buffers()) else "task"
            what = f"in training, samples change its buffer {name}, but of a step's samples only those of micro-batch 0"
            return [Problem(owner, what, "micro_batch_size=null lets all samples of one process change it", is_warning=True)]
        return []

    def _look_at_cuts(self, key: str, what: str, *, with_parts: bool) -> list[Problem]:
        """Compare some samples at once with the same samples again, and with their parts."""
        whole, *_ = self._samples.cut(self._size)
        at_once, *again, repeated = (
            self._computed([whole._replace(number=number)], with_parts=with_parts) for number in (0, 1, 2, 0)
        )
        sums = at_once.sums
        if differ(repeated.sums, sums, tolerance=0.0):  # it depends on earlier forwards, and the second run shows it
            return []
        if any(differ(other.sums, sums, tolerance=0.0) for other in again):
            return self._depends_on_cut(key, f"{what} draws random numbers")
        parts = self._samples.cut(max(n for n in range(1, self._size) if self._size % n == 0))
        mine = [part for part in parts if part.start < self._size]
        in_parts = self._computed(mine, with_parts=with_parts)
        if differ(in_parts.sums["loss"], sums["loss"], tolerance=1e-3):
            return self._depends_on_cut(key, f"{what} couples the samples of a micro-batch")
        if far(at_once.gradients, in_parts.gradients, what="", tolerance=5e-2 if self._rounds else 1e-3):
            what = "its backward pass couples the samples of a micro-batch (a hook, or an autograd.Function)"
            return self._depends_on_cut(key, what)
        if name := other_sketch(at_once.buffers, in_parts.buffers):
            owner = "model" if name in dict(self._player.module.named_buffers()) else "task"
            what = f"in training, the samples of a micro-batch change its buffer {name}"
            return self._depends_on_cut(owner, what, then="; only the samples of a step's micro-batch 0 then change the buffer")
        if name := next((name for name in sums if differ(in_parts.sums.get(name), sums[name], tolerance=1e-3)), ""):
            return self._depends_on_cut("task", f"its value {name} of a batch is not the sum of the values of its parts")
        return []

    def _depends_on_cut(self, key: str, what: str, *, then: str = "") -> list[Problem]:
        if not self._is_open:
            return []
        memory = " and their memory" * (self._of_run.micro_batch_size == "auto")
        what, cure = f"{what}, so the results depend on the number of processes{memory}", "set micro_batch_size"
        if memory:
            cure = f"{cure} to a number"
        elif any(layer.training for layer in batch_norms(self._player.module)):
            cure = f"{cure}, or trainer.sync_batchnorm=true"
        return [Problem(key, what, cure + then, is_warning=True)]


def place_of_loss(task: object) -> str:
    """Return the file and the line of a task's loss, for a message: of its `source`, if another function computes it."""
    found = getattr(task, "source", None) or getattr(task, "step", None) or getattr(task, "loss", None)
    code = getattr(found, "__code__", None)
    return f" (at {code.co_filename}:{code.co_firstlineno})" if code is not None and is_own_code(code.co_filename) else ""
