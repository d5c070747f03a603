"""The reaction to a loss or gradient that is not finite: the run ends, skips the step, or returns to an earlier checkpoint."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from framework.checkpoint.canonical import restore
from framework.checkpoint.plain_state import TrainingState
from framework.checkpoint.saver import Saver
from framework.checkpoint.state import Progress, stored_plain_state
from framework.config.trainer import Divergence
from framework.distributed.world import World
from framework.engine.buffers import Buffers
from framework.engine.seam import Step
from framework.runtime.exits import Diverged
from framework.runtime.log import LOGGER
from framework.training.recorder import Recorder


@dataclass(eq=False)
class Recovery:
    """The recovery of a run from a step that is not finite, by its policy. Every method is collective."""

    policy: Divergence
    world: World
    held: TrainingState
    saver: Saver
    recorder: Recorder

    def __post_init__(self) -> None:
        self.is_watching = self.policy.action != "raise"  # then every step is checked before it is taken
        self.rolls_back = self.policy.action == "rollback"
        self.buffers = Buffers(*(module for module in (self.held.module, self.held.task) if module is not None))
        self._before: list[Tensor] = []  # the buffers before the step

    @property
    def needs_checkpoint(self) -> bool:
        """Return whether the run must save a checkpoint before it starts, because there is none to return to."""
        return self.rolls_back and self.saver.store.newest_valid() is None

    def begin_step(self) -> None:
        """Keep a copy of what a step changes before it is checked."""
        self._before = self.buffers.values() if self.is_watching else []

    def recover(self, error: Diverged, *, step: Step, progress: Progress) -> dict[str, Any] | None:
        """Return the state of the checkpoint that the run continues from; None if `step` was skipped instead.

        Diverged if the policy ends the run.
        """
        if not self.is_watching:
            raise error
        policy, count = self.policy, progress.num_divergences + 1
        if count > policy.limit:
            raise Diverged(f"{error.what} (the run has recovered {policy.limit} times, the limit in trainer.divergence.limit)")
        progress.num_divergences = count
        state = self._roll_back(past=step, progress=progress) if self.rolls_back else None
        if state is None:  # the skipped step counts as taken; its forward pass has changed only the buffers
            self.buffers.set(self._before)
            progress.step += 1
            progress.samples_seen += step.num_samples
        if self.world.rank == 0:
            done = "left out" if state is None else f"back to step {state['progress']['step']}, without the batches since"
            LOGGER.warning("%s: %s (%d of %d times)", error.what, done, count, policy.limit)
        return state

    def _roll_back(self, *, past: Step, progress: Progress) -> dict[str, Any]:
        """Load an earlier checkpoint; return its state, with the sample counter after the step `past`."""
        self.saver.settle()
        found = self.saver.store.newest_valid(back=self.policy.back - 1, is_scheduled=True)
        if found is None:  # the disk has refused even the checkpoint of step 0
            raise Diverged(f"step {progress.step + 1} is not finite, and there is no checkpoint to go back to")
        path, state = found
        restore(path, stored_plain_state(state), self.held, world=self.world)
        kept = {"wall_s": progress.wall_s, "num_divergences": progress.num_divergences}
        state["progress"] |= kept | {"samples_seen": progress.samples_seen + past.num_samples}
        step = state["progress"]["step"]
        self.saver.store.drop_after(step)  # a restart must not continue from later checkpoints
        self.recorder.rewind(step)
        return state
