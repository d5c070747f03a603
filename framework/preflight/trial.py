"""The first half of a rehearsal, on one process: some steps, with a save and a restore before the last, and the findings."""

from typing import NoReturn

import torch
from torch import Tensor, nn

from framework.build.training import Builder
from framework.engine.forward import modules_of
from framework.engine.seam import Step
from framework.modules.aside import GENERATOR
from framework.modules.structure import in_eval_mode
from framework.preflight.continuation import AFTER, BEFORE, Computed, Continuation, validation_step
from framework.preflight.cut import Cutting
from framework.preflight.differences import Writes, same
from framework.preflight.findings import Finding, Refused, blamed
from framework.preflight.player import SINGLE, Player
from framework.preflight.processes import data_ranks
from framework.preflight.training_samples import KEYED, TrainingSamples, batch_tensors, differs_when_loaded, same_tensors
from framework.preflight.two_steps import Sketch, sketches

_BUFFER = {  # the remedies for values that change from step to step
    "model": "register_buffer() it in the model; leave it out if nothing reads it",
    "modules": "register_buffer() it in the model, or keep it in a part",
    "task": "register_buffer() it in the task (an nn.Module), or in the model",
    "optimizer": "keep it in optimizer.state or in param_groups",
    "dataset": "let a sample depend on its number and on `keys` alone",
    "metric": "a metric with a reset() that clears its whole state",
    "part": "return it from state_dict(), and restore it in load_state_dict()",
}
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
        changed = self._evaluate(first)
        other.restore(*first.state())
        self._compare(first, other, steps[_BEFORE])
        self._compare_evaluations(first, other, changed)
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

    # --- the second step, and what it shows about the first

    def _compare(self, first: Player, other: Continuation, step: Step) -> None:
        before, writes = first.attributes(), Writes(first.module)
        with writes:
            ours = Computed.of(first, first.forward_backward(step, index=_BEFORE))
        now = first.attributes()
        changed = [name for name, value in now.items() if before.get(name) != value]
        theirs, restored = other.step()
        if differing := ours.first_difference(theirs):
            self._explain(other, changed, differing, draws=any(now[place].startswith(GENERATOR) for place in changed))
        if writes.names and self.num_processes > 1:
            what = f"its forward changes {next(iter(writes.names))}, a parameter, on each process separately"
            raise Refused("model", what, "register_buffer() what has no gradient: micro-batch 0 of a step then changes it on "
                          "all processes; compute a value from its weight (torch.nn.utils.parametrize)")  # fmt: skip
        for key, name in now:
            if now[key, name].startswith(GENERATOR) and key == "model":
                raise Refused(
                    key,
                    f"{name} draws without a key, and no checkpoint holds it",
                    f"draw {KEYED}; a generator for the constructor alone can be a local variable",
                )
        for key, name in changed:
            if restored.get((key, name)) != now[key, name]:
                self._refuse_memory(key, f"{name} changes from step to step, and no checkpoint holds it")
        self._compare_steps(first, other)

    @staticmethod
    def _refuse_memory(key: str, what: str) -> NoReturn:
        raise Refused("model" if key == "modules" else key, what, _BUFFER[key.partition(".")[0]])

    def _compare_steps(self, first: Player, other: Continuation) -> None:
        """Refuse an optimizer that takes a different step after a restore, now or later."""
        before = first.attributes()
        first.take(_BEFORE)
        weights, restored = other.take()
        after = first.attributes()
        for (key, name), value in after.items():
            if key.startswith("part.") and before.get((key, name)) != value != restored.get((key, name)):
                self._refuse_memory(key, f"{name} changes from step to step, and no checkpoint holds it")
        kind = type(first.update.optimizer).__name__
        for name, parameter in first.module.named_parameters():
            if not same(parameter, weights[name]):
                what = f"restored from a checkpoint, {kind} takes a different step (of {name})"
                what += ": it keeps something outside its state and its parameter groups"
                self._refuse_memory("optimizer", what)
        for (key, name), value in after.items():
            if before.get((key, name)) != value != restored.get((key, name)):
                if key != "optimizer":
                    self._refuse_memory(key, f"{name} changes from step to step, and no checkpoint holds it")
                what = f"{kind} keeps {name}, which changes from step to step, outside its state and its parameter groups"
                self._refuse_memory("optimizer", what)

    def _explain(self, other: Continuation, changed: list[tuple[str, str]], differing: str, *, draws: bool) -> None:
        """Refuse a model that computes something else after a restore: by the values that it keeps, or by its draws."""
        if changed and not draws:
            (key, name), *_ = changed
            what = f"a step depends on {name}, which the step changes and no checkpoint holds"
            self._refuse_memory(key, what)
        one, again = other.twice()
        if draws or any(not torch.equal(one[name], again[name]) for name in one):
            what = f"the same forward gives different results each time (first seen in {differing})"
            what += ": it draws from its own generator, depends on the time, or counts outside of its modules"
            raise Refused("model", what, f"draw {KEYED}; register_buffer() the count")
        what = f"restored from a checkpoint, it computes different results (first seen in {differing})"
        what += ": it keeps something outside its parameters and persistent buffers"
        raise Refused("model", what, "register_buffer() it")

    # --- an evaluation

    def _evaluate(self, player: Player) -> list[tuple[str, str]]:
        """Evaluate a batch; return the attributes that this changes."""
        step, places = validation_step(self.build), player.attributes()
        if self.num_processes > 1:
            one, other = self._halves(step)
            after = [_buffers_after(player, steps) for steps in ([one], [other], [one, one])]
            for name in set().union(*after):  # a flag of the mode is the same after any samples, and any number of them
                if any(name not in buffers or not same(buffers[name], after[0][name]) for buffers in after):
                    what = f"an evaluation changes its buffer {name}, on each process with its own samples"
                    raise Refused("model", what, "change it in training only (self.training)")
        player.evaluate(step, shares=BEFORE)
        return [place for place, value in player.attributes().items() if places.get(place) != value]

    def _halves(self, step: Step) -> list[Step]:
        """Return two steps with different samples, if there are two samples."""
        size = max(1, step.micro_batches[0].num_samples // 2)
        first, *others = validation_step(self.build, micro_batch_size=size).micro_batches
        parts = [first, [first, *others][-1]._replace(start=0)]
        return [step._replace(num_samples=part.num_samples, micro_batches=[part]) for part in parts]

    def _compare_evaluations(self, player: Player, other: Continuation, changed: list[tuple[str, str]]) -> None:
        """Refuse a different evaluation after a restore, and `changed` values that go on from one evaluation to the next."""
        ours = player.evaluate(validation_step(self.build), shares=AFTER)
        now = player.attributes()
        theirs, restored = other.evaluate()
        if differing := next((name for name in ours if not same(ours[name], theirs[name])), ""):
            what = f"restored from a checkpoint, an evaluation gives a different {differing}"
            raise Refused(
                "model", f"{what}: it keeps something outside its parameters and persistent buffers", "register_buffer() it"
            )
        for key, name in changed:
            if restored.get((key, name)) != now.get((key, name)):
                self._refuse_memory(key, f"{name} changes from evaluation to evaluation, and no checkpoint holds it")
        player.parts.ended()


def _buffers_after(player: Player, steps: list[Step]) -> dict[str, Tensor]:
    """Return the model's buffers as they are after evaluations, and restore the model."""
    with player.untouched():
        for step in steps:
            player.evaluate(step, shares=())
        return {name: buffer.clone() for name, buffer in player.module.named_buffers()}
