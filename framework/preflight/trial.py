"""The first of a rehearsal's short runs: on one process, some steps with saves between, and what can be seen in one forward."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from framework.build.schedules import schedules
from framework.build.training import Builder
from framework.engine.forward import modules_of
from framework.engine.seam import Step
from framework.optim.update import Update
from framework.parallel.sync_batchnorm import OfSync
from framework.preflight.continuation import BEFORE, Continued, in_bytes, validation_tensors
from framework.preflight.cutting import Cutting
from framework.preflight.differences import Draws, Writes
from framework.preflight.player import SINGLE, Player
from framework.preflight.refused import Refused, blamed
from framework.preflight.sketches import other_sketch, sketches
from framework.preflight.training_samples import KEYED, TrainingSamples
from framework.runtime.problem import Problem

_AGING, _SMALL = 32, 1_000_000  # steps before the second comparison, for models with at most so many parameters
_UPDATES, _UPDATES_S = 5, 0.5  # updates after a step, for an optimizer that counts, and seconds


class Trial:
    """A few steps of a run on one process."""

    def __init__(self, build: Builder) -> None:
        self.build = build.altered(parallel=SINGLE)
        self.num_processes = build.config.launch.most_processes

    def run(self) -> tuple[list[Problem], Sequence[Any]]:
        """Raise Refused for a problem that breaks the run's promise; return possible problems, and data for the second run."""
        self.samples = TrainingSamples(self.build)
        steps = self.samples.fetch(BEFORE + 1)
        validation, later = validation_tensors(self.build), self.samples.later()
        cutting = Cutting(self.build, self.samples)
        first = Player(self.build, sources={"train": self.samples.source})
        self._require_drawn(first)
        self._look_at_kinds(first)
        with blamed("scheduler", "it fails", "see scheduler.*"):
            self._require_schedules(first.update)
        self._take_first(first, steps[0])
        cutting.look_at_smallest()
        findings = cutting.look()
        for step in steps[1:BEFORE]:
            first.take(step)
        first.watch.around_evaluation = draws = Draws(first.engine, first.parts)
        if len(splits := first.trainer.splits.validations()) > 1:
            first.evaluate(shares=(), splits=splits)
        first.evaluate(shares=(2.0, 1.0))  # a part's best value is from before the save
        outcomes = [self._go_on(first, steps[BEFORE])]
        if sum(parameter.numel() for parameter in first.module.parameters()) <= _SMALL:  # some state matters only later
            first.watch.around = draws
            for _ in range(_AGING):
                first.advance(steps[BEFORE])
            first.evaluate(shares=())
            outcomes.append(self._go_on(first, steps[BEFORE]))
        first.parts.ended()
        first.watch.around = draws
        findings = findings or cutting.look_later(first) or cutting.draws_later(draws)
        findings = findings or [warning for name in self._written for warning in cutting.writes(name)][:1]
        return findings, (in_bytes(validation), in_bytes(later), [tuple(outcome) for outcome in outcomes])

    def _require_schedules(self, update: Update) -> None:
        """Refuse schedules that are no functions of the step, or that do not have a rate for each step of the run."""
        config, total_steps = self.build.config, self.samples.plan.total_steps
        one, other = (
            schedules(config.scheduler, update.optimizer, of=config.optimizer, total_steps=total_steps,
                      order=self.samples.order)
            for _ in range(2)
        )  # fmt: skip
        of_run = replace(update, schedule=one.pop(""), schedules=one)
        of_run.require_steps(total_steps)
        pairs = [(of_run.schedule, other.pop("")), *((one[name], other[name]) for name in one)]
        if any(mine.span(total_steps) != theirs.span(total_steps) for mine, theirs in pairs):
            what = "it has other rates each time: it draws random numbers, or depends on the time"
            raise Refused("scheduler", what, "a function of the step alone")

    def _require_drawn(self, player: Player) -> None:
        """Refuse a model that is different each time it is built."""
        may_be_set = any(hasattr(part, "begun") for part in player.parts.by_name.values())  # by a part, from the data
        module = self.build.model() if may_be_set else player.module
        if name := other_sketch(sketches(module), sketches(self.build.model())):
            what = f"its constructor makes another {name} each time: it draws from its own generator, or counts"
            raise Refused("model", what, f"draw {KEYED}, which the run seeds, or seed the generator")

    def _look_at_kinds(self, player: Player) -> None:
        is_off = self.num_processes > 1 and not self.build.config.trainer.sync_batchnorm
        if is_off and any(isinstance(module, OfSync) for module in player.module.modules()):
            raise Refused("model", "it has nn.SyncBatchNorm: trainer.sync_batchnorm is false", "trainer.sync_batchnorm=true")
        for prefix, module in modules_of(player.task).items():
            for name, parameter in module.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    cure = "put it in the model, which can return it; or requires_grad_(False), if it is not trained"
                    raise Refused("task", f"its parameter {name} would not be trained", cure)

    def _take_first(self, player: Player, step: Step) -> None:
        module, inputs = player.module, step.micro_batches[0].inputs
        names = module.state_dict().keys()
        shape = f" of shape {list(inputs.shape)}" if isinstance(inputs, Tensor) and not inputs.is_nested else ""
        fails = f"its forward, or the task's loss or metrics, does not take a batch{shape} of this dataset"
        cure = "see docs/extend.md, sections A model and A task"
        if self.build.config.trainer.channels_last:
            cure += "; or trainer.channels_last=false: with true, `view` of a convolution's output fails, `reshape` works"
        if recomputed := self.build.config.trainer.activation_checkpointing:
            cure += (f"; or trainer.activation_checkpointing=false: with {recomputed}, blocks that write in place into "
                     "saved tensors fail")  # fmt: skip
        player.watch.around = writes = Writes(module)
        player.take(step, of_model=(fails, cure))
        player.watch.around = nullcontext()
        self._written = writes.names
        self._require_own_writes()
        if made := sorted(module.state_dict().keys() - names):
            cure = "make it in the constructor; or persistent=False for a buffer that it can compute anew"
            raise Refused("model", f"its first forward makes a parameter or buffer ({made[0]})", cure)

    def _go_on(self, first: Player, step: Step) -> Continued:
        """Save, and go on."""
        path = first.save()
        first.watch.around = writes = Writes(first.module)
        outcome = Continued.of(first, str(path), step, num_more=_UPDATES, within_s=_UPDATES_S)
        first.watch.around = nullcontext()
        self._written |= writes.names
        self._require_own_writes()
        return outcome

    def _require_own_writes(self) -> None:
        """Refuse a forward that writes into parameters, if each process would."""
        if self._written and self.num_processes > 1:
            what = f"its forward changes {next(iter(self._written))}, a parameter, on each process separately"
            raise Refused("model", what, "register_buffer() what has no gradient: micro-batch 0 of a step then changes it on "
                          "all processes; compute a value from its weight (torch.nn.utils.parametrize); clamp a weight, or let "
                          "a teacher follow the weights, after each step: step_taken() of a part")  # fmt: skip
