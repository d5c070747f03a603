"""The first half of a rehearsal, on one process: some steps, with a save and a restore before the last, and the findings."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from framework.build.training import Builder
from framework.engine.forward import modules_of
from framework.engine.seam import Step
from framework.modules.structure import in_eval_mode
from framework.preflight.continuation import AFTER, BEFORE, Computed, Continuation, Evaluated, Updated, validation_step
from framework.preflight.cut import Cutting
from framework.preflight.differences import Writes, same
from framework.preflight.distances import differ
from framework.preflight.findings import Finding, Refused, blamed
from framework.preflight.player import SINGLE, Player, State
from framework.preflight.processes import data_ranks
from framework.preflight.training_samples import KEYED, TrainingSamples, batch_tensors, differs_when_loaded, same_tensors
from framework.preflight.two_steps import Sketch, sketches

_BUFFER = {  # the remedies for values that change from step to step
    "model": "register_buffer() it in the model",
    "task": "register_buffer() it in the task (an nn.Module), or in the model",
    "optimizer": "keep it in optimizer.state or in param_groups",
    "metric": "a metric with a reset() that clears its whole state",
    "part": "return it from state_dict(), and restore it in load_state_dict()",
}
_OUTSIDE = {
    "model": "something outside its parameters and persistent buffers",
    "task": "something outside its buffers",
    "optimizer": "something outside its state and its parameter groups",
    "metric": "something from evaluation to evaluation",
    "part": "something outside its state",
}
_RESTORED = "restored from a checkpoint"
_AGING, _SMALL = 32, 1_000_000  # steps before the second comparison, for models with at most so many parameters
_UPDATES, _UPDATES_S = 5, 0.5  # updates after a step, for an optimizer that counts, and seconds
_ROUNDING = 1e-4  # of a column
_BEFORE = 2  # steps before the save: after the first step, an average of the weights equals the weights
_SYNC = "use nn.BatchNorm2d, with trainer.sync_batchnorm=true"


class Trial:
    """A few steps of a run on one process."""

    def __init__(self, build: Builder, *, run: Builder) -> None:
        """`build` is a rehearsal's, `run` is the run's."""
        self.build, self.of_run = build.altered(parallel=SINGLE), run
        self.num_processes = build.config.launch.most_processes
        # in the run, a micro-batch is a process's share of a step
        self.is_cut_by_ranks = run.config.micro_batch_size is None and self.num_processes > 1

    def run(self) -> list[Finding]:
        """Raise Refused for a problem that breaks the run's promise; return possible problems."""
        # with its own task; before this process has loaded or computed anything
        other = Continuation(self.build.altered(), run=self.of_run.altered(), index=_BEFORE)
        try:
            return self._run(other)
        finally:
            other.close()

    def _run(self, other: Continuation) -> list[Finding]:
        self.samples = TrainingSamples(self.build, run=self.of_run)
        steps = self.samples.fetch(_BEFORE + 1)
        validation, later = other.samples()
        self.samples.compare(later)
        if not same_tensors(batch_tensors(validation_step(self.build)), validation):
            raise differs_when_loaded("val")
        self._look_at_smallest()
        drawn, findings = self._look_at_one_forward(steps[0])
        first = Player(self.build.altered())  # nothing has been tried in this one
        self._require_drawn(first.module, drawn)
        with blamed("scheduler", "it fails", "see scheduler.*"):
            first.require_schedules(self.samples.plan.total_steps, epochs_before=self.samples.order.epochs_before)
        for index, step in enumerate(steps[:_BEFORE]):
            with blamed("model", "a step fails", "does it run in a plain script? then please report it"):
                first.forward_backward(step, index=index)
            if sparse := [name for name, p in first.module.named_parameters() if p.grad is not None and p.grad.is_sparse]:
                raise Refused("model", f"{sparse[0]} has a sparse gradient, which is not supported", "sparse=False")
            with blamed("optimizer", "its step fails", "see the optimizer's own documentation"):
                first.take(index)
        self._evaluate(first)
        self._compare(first, other, steps[_BEFORE], index=_BEFORE)
        if sum(parameter.numel() for parameter in first.module.parameters()) <= _SMALL:  # some state matters only later
            for index in range(_BEFORE + 1, _BEFORE + 1 + _AGING):
                first.forward_backward(steps[_BEFORE], index=index)
                first.take(index)
            first.evaluate(validation_step(self.build), shares=())
            self._compare(first, other, steps[_BEFORE], index=index + 1)
        first.parts.ended()
        return findings

    def _look_at_one_forward(self, step: Step) -> tuple[dict[str, Sketch], list[Finding]]:
        """Return sketches of the model as built, and the findings of one forward."""
        scout = Player(self.build)
        drawn = sketches(scout.module)
        self._look_at_kinds(scout)
        self._look_at_forward(scout, step)
        return drawn, Cutting(self.build, is_by_ranks=self.is_cut_by_ranks).look(scout.module, step, self.samples)

    def _look_at_smallest(self) -> None:
        """Refuse a model or task that does not take the run's smallest micro-batch, if it is smaller than the rehearsal's."""
        config = self.of_run.config
        size = self.samples.smallest(dp_size=data_ranks(config.parallel, self.num_processes))
        if size >= self.build.config.global_batch_size // 2:
            return
        is_by_end = config.micro_batch_size is None or config.global_batch_size % config.micro_batch_size == 0
        cure = "drop_last=true leaves it out" if is_by_end else "a micro_batch_size that divides global_batch_size"
        what = f"it does not take a micro-batch of {size} sample{'s' * (size != 1)}, the run's smallest"
        with blamed("model", what, cure):
            step = Step(0, size, self.samples.cut(size)[:1])
            Player(self.build.altered()).engine.train(step, index=0, loss_scale=1.0, measure=True)

    def _require_drawn(self, module: nn.Module, drawn: dict[str, Sketch]) -> None:
        """Refuse a model that is different each time it is built."""
        for name, now in sketches(module).items():
            if repr(now) != repr(drawn.get(name)):  # the text of nan equals the text of nan
                what = f"its constructor makes another {name} each time: it draws from its own generator, or counts"
                raise Refused("model", what, f"draw {KEYED}, which the run seeds, or seed the generator")

    def _look_at_kinds(self, player: Player) -> None:
        if self.num_processes > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in player.module.modules()):
            raise Refused("model", "nn.SyncBatchNorm computes with the samples that each process happens to have", _SYNC)
        for prefix, module in modules_of(player.task).items():
            for name, parameter in module.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    cure = "put it in the model, which can return it; or requires_grad_(False), if it is not trained"
                    raise Refused("task", f"its parameter {name} would not be trained", cure)

    # --- one forward

    def _look_at_forward(self, player: Player, step: Step) -> None:
        module, micro_batch = player.module, step.micro_batches[0]
        step = step._replace(num_samples=micro_batch.num_samples, micro_batches=[micro_batch])
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        shape = f" of shape {list(micro_batch.inputs.shape)}" if isinstance(micro_batch.inputs, Tensor) else ""
        fails = f"its forward or the task's loss does not take a batch{shape} of this dataset"
        cure = "see docs/extend.md, sections A model and A task"
        if self.build.config.trainer.channels_last:
            cure += "; or trainer.channels_last=false: with true, `view` of a convolution's output fails, `reshape` works"
        if recomputed := self.build.config.trainer.activation_checkpointing:
            cure += (f"; or trainer.activation_checkpointing=false: with {recomputed}, blocks that write in place into "
                     "saved tensors fail")  # fmt: skip
        with blamed("model", fails, cure), player.untouched():
            player.engine.train(step, index=0, loss_scale=1.0, measure=False)
        made = sorted({name for name, _ in (*module.named_parameters(), *module.named_buffers())} - names)
        if made:
            raise Refused("model", f"its first forward makes a parameter or buffer ({made[0]})", "make it in the constructor")
        fails = "its metrics fail on a batch of this dataset"
        with in_eval_mode(module), torch.no_grad(), blamed("task", fails, "a task that fits the model"):
            player.engine.evaluate(step)
            self.build.metrics.compute(world=self.build.world)

    # --- the same state in this process, which has computed before, and in one that has not

    def _compare(self, first: Player, other: Continuation, step: Step, *, index: int) -> None:
        """Refuse what computes something else after a save and a restore: a step, its updates, or an evaluation."""
        state = first.state()
        other.restore(*state)
        self._numbers, writes = first.numbers(), Writes(first.module)
        with writes:
            ours = Computed.of(first, first.forward_backward(step, index=index))
        if differing := ours.first_difference(other.step(index)):
            one, again = other.twice(index)
            varies = any(not torch.equal(one[name], again[name]) for name in one)
            how = "the same step gives different results each time" if varies else f"{_RESTORED}, it computes different results"
            why = "it draws from its own generator, depends on the time, or counts outside of its modules" if varies else ""
            cure = f"draw {KEYED}; register_buffer() a count" if varies else ""
            self._refuse(first, ("model", "task"), f"{how} (first seen in {differing})", why=why, cure=cure)
        if writes.names and self.num_processes > 1:
            what = f"its forward changes {next(iter(writes.names))}, a parameter, on each process separately"
            raise Refused("model", what, "register_buffer() what has no gradient: micro-batch 0 of a step then changes it on "
                          "all processes; compute a value from its weight (torch.nn.utils.parametrize)")  # fmt: skip
        self._compare_updates(first, other, state, index=index)
        self._compare_evaluations(first, other)
        theirs = other.numbers()
        for key, name in self._changed(first):  # it may matter only after thousands of steps
            if first.numbers()[key, name] != theirs.get((key, name)):
                raise Refused(
                    key, f"{name} changes from step to step, and no checkpoint holds it", _BUFFER[key.partition(".")[0]]
                )

    def _changed(self, first: Player) -> list[tuple[str, str]]:
        return [place for place, value in first.numbers().items() if self._numbers.get(place) != value]

    def _compare_updates(self, first: Player, other: Continuation, state: State, *, index: int) -> None:
        first.take(index)
        ours = Updated.of(first, first.take_more(_UPDATES, first=index + 1, within_s=_UPDATES_S))
        theirs = other.take(index, ours.num_more)
        if differing := _other_tensor(ours.weights, theirs.weights):
            who = [type(first.update.optimizer).__name__, *(f"part.{name}" for name in first.parts.by_name)]
            what = f"{_RESTORED}, {' or '.join(who)} takes a different step (of {differing})"
            self._refuse(first, ("optimizer", "part"), what)
        if _other_column(ours.columns, theirs.columns):
            other.restore(*state)
            other.step(index)
            again = other.take(index, ours.num_more).columns
            if column := _other_column(ours.columns, theirs.columns, but_not=again):
                self._refuse(first, ("part",), f"{_RESTORED}, its column {column} is another one")

    def _compare_evaluations(self, first: Player, other: Continuation) -> None:
        ours = Evaluated.of(first, first.evaluate(validation_step(self.build), shares=AFTER))
        theirs = other.evaluate()
        if differing := next((name for name in ours.sums if not same(ours.sums[name], theirs.sums[name])), ""):
            self._refuse(first, ("model", "task"), f"{_RESTORED}, an evaluation gives a different {differing}")
        if differing := _other_column(ours.measured, theirs.measured):
            self._refuse(first, ("metric",), f"{_RESTORED}, an evaluation gives a different {differing}")
        if differing := _other_tensor(ours.weights, theirs.weights):
            self._refuse(first, ("part",), f"{_RESTORED}, after an evaluation it gives {differing} other values")

    def _refuse(self, first: Player, keys: Sequence[str], what: str, *, why: str = "", cure: str = "") -> NoReturn:
        """Refuse an object of one of these kinds, if possible with an attribute that has changed."""
        changed = self._changed(first)
        key, name = next((place for kind in keys for place in changed if place[0].partition(".")[0] == kind), (keys[0], ""))
        kind = key.partition(".")[0]
        if key == "part":
            key = ", ".join(f"part.{part}" for part in first.parts.by_name)
        if name:
            why, cure = f"{name} changes, and no checkpoint holds it", _BUFFER[kind]
        raise Refused(key, f"{what}: {why or 'it keeps ' + _OUTSIDE[kind]}", cure or _BUFFER[kind])

    # --- an evaluation

    def _evaluate(self, player: Player) -> None:
        """Evaluate a batch. Refuse a model of which an evaluation changes a buffer on each process in another way."""
        step = validation_step(self.build)
        if self.num_processes > 1:
            one, other = self._halves(step)
            after = [_buffers_after(player, steps) for steps in ([one], [other], [one, one])]
            for name in set().union(*after):  # a flag of the mode is the same after any samples, and any number of them
                if any(name not in buffers or not same(buffers[name], after[0][name]) for buffers in after):
                    what = f"an evaluation changes its buffer {name}, on each process with its own samples"
                    raise Refused("model", what, "change it in training only (self.training)")
        player.evaluate(step, shares=BEFORE)

    def _halves(self, step: Step) -> list[Step]:
        """Return two steps with different samples, if there are two samples."""
        size = max(1, step.micro_batches[0].num_samples // 2)
        first, *others = validation_step(self.build, micro_batch_size=size).micro_batches
        parts = [first, [first, *others][-1]._replace(start=0)]
        return [step._replace(num_samples=part.num_samples, micro_batches=[part]) for part in parts]


def _other_tensor(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that differs by more than rounding; or an empty text."""
    return next((name for name, tensor in ours.items() if not same(tensor, theirs[name])), "")


def _other_column(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, but_not: Mapping[str, Any] | None = None) -> str:
    """Return the first column that differs, but not one that differs also between `theirs` and `but_not`."""
    for name in sorted(ours.keys() | theirs.keys()):
        varies = but_not is not None and differ(theirs.get(name), but_not.get(name), tolerance=_ROUNDING)
        if differ(ours.get(name), theirs.get(name), tolerance=_ROUNDING) and not varies:
            return name
    return ""


def _buffers_after(player: Player, steps: list[Step]) -> dict[str, Tensor]:
    """Return the model's buffers as they are after evaluations, and restore the model."""
    with player.untouched():
        for step in steps:
            player.evaluate(step, shares=())
        return {name: buffer.clone() for name, buffer in player.module.named_buffers()}
