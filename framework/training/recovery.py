"""Getting over a step that is not finite: it is left out, or the run goes back to an earlier checkpoint."""

from typing import TYPE_CHECKING

from framework.checkpoint.canonical import restore
from framework.engine.seam import Step
from framework.runtime.exits import Diverged
from framework.runtime.log import LOGGER

if TYPE_CHECKING:
    from framework.training.trainer import Trainer
from dataclasses import dataclass
from typing import Literal


def recover(trainer: "Trainer", error: Diverged, *, step: Step) -> bool:
    """Get over a step that is not finite, as the policy says; raise `error` where it says that the run ends. Collective.

    Returns whether the run stands at an earlier step now.
    """
    policy, count = trainer.divergence, trainer.progress.num_divergences + 1
    if not policy.is_watched:
        raise error
    if count > policy.limit:
        raise Diverged(f"{error.what} (it has been got over {policy.limit} times, which is trainer.divergence.limit)")
    if policy.rolls_back:
        roll_back(trainer, past=step)
    else:
        leave_out(trainer, step)
    trainer.progress.num_divergences = count
    if trainer.world.rank == 0:
        done = (
            f"back to step {trainer.progress.step}, leaving out the batches since" if policy.rolls_back else "left out"
        )
        LOGGER.warning("%s: %s (%d of %d times)", error.what, done, count, policy.limit)
    return policy.rolls_back


def leave_out(trainer: "Trainer", step: Step) -> None:
    """Count a step as taken whose forward pass has changed nothing but the buffers."""
    for buffer, before in zip(trainer.buffers, trainer.before):
        buffer.copy_(before)
    trainer.progress.step += 1
    trainer.progress.samples_seen += step.num_samples


def roll_back(trainer: "Trainer", *, past: Step) -> None:
    """Load an earlier checkpoint, and have the samples continue behind the step `past`. Collective."""
    trainer.saver.settle()
    found = trainer.store.newest_valid(back=trainer.divergence.back - 1)
    if found is None:  # the disk has refused even the first, of step 0
        raise Diverged(f"step {trainer.progress.step + 1} is not finite, and there is no checkpoint to go back to")
    path, state = found
    samples_seen = trainer.progress.samples_seen + past.num_samples
    trainer.tick()
    wall_s = trainer.progress.wall_s
    restore(
        path, module=trainer.engine.module, optimizer=trainer.optimizer, average=trainer.average, world=trainer.world
    )
    trainer.load_state_dict(state)
    trainer.progress.samples_seen, trainer.progress.wall_s = samples_seen, wall_s
    trainer.loss_watch.zero_()
    trainer.store.drop_after(trainer.progress.step)  # a restart must not take them for this run's newest
    trainer.recorder.rewind(trainer.progress.step)


@dataclass(frozen=True)
class Divergence:
    """`raise` ends the run. `skip` leaves the step out; `rollback` goes on from the `back`-th newest checkpoint, with the
    batches after the one that was not finite: both at most `limit` times in a run.

    Source of the rollback: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", section 5.1.
    """

    action: Literal["raise", "skip", "rollback"]
    limit: int
    back: int

    @property
    def is_watched(self) -> bool:
        """Return whether every step has to be known as finite before it is taken."""
        return self.action != "raise"

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"
