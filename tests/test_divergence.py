"""A loss or gradient that is not finite on one rank: every rank does the same about it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from framework.config.folders import options
from framework.data.loader import Loader
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Step
from framework.modules.tensors import local
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from framework.training.recovery import Recovery
from tests.checkpoint.sealing import edit
from tests.harness import (
    Ended,
    after_each,
    around,
    assert_close,
    assert_same_bits,
    checked,
    command,
    finished,
    note_steps,
    once,
    together,
)
from tests.test_conformance import CONTEXTS, FOR_EXPERTS, MODELS, NOT_EQUAL, layouts
from tests.test_conformance import RUN as CONFORMANCE
from tests.test_resume import RUN, STRATEGIES, after_step, crash, preempt, preempted

LINE = [*RUN, "micro_batch_size=4", "precision=fp64", "trainer.clip_grad_norm=1.0"]  # 21 steps; checkpoints at 4, 8, ...
BAD = 148  # samples seen before step 11 (7 steps an epoch of 100 samples)
SKIP, ROLLBACK = "trainer.divergence.action=skip", "trainer.divergence.action=rollback"


def is_last() -> bool:
    environment = Environment.read()
    return environment.rank == environment.world_size - 1


def bad_batches(*positions: int, everywhere: bool = False) -> Callable[[], None]:
    """Return what makes the last rank's part of the batches at these positions not finite, or every rank's."""

    def train_step(original: Any, loader: Loader, samples_seen: int) -> Step:
        step = original(loader, samples_seen)
        if samples_seen in positions and (everywhere or is_last()):
            poisoned = [m._replace(inputs=torch.full_like(m.inputs, math.nan)) for m in step.micro_batches]
            step = step._replace(micro_batches=poisoned)
        return step

    return lambda: around(Loader, "train_step", train_step)


def infinite_loss() -> None:
    """At step 11 the last rank's loss is infinite, and no gradient shows it."""
    note_steps()
    spoil_losses(lambda forward: torch.is_grad_enabled() and forward.latest == 10)


def spoil_losses(condition: Callable[[Any], bool]) -> None:
    """Let the loss of the last rank be infinite while its Forward meets the condition."""

    def measured(original: Any, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        loss, sums = original(forward, *args, **kwargs)
        more = math.inf if condition(forward) and is_last() else 0.0
        return loss + more, sums | {"loss": sums["loss"] + more}

    around(Forward, "measured", measured)


def infinite_gradient() -> None:
    """At step 11 the last rank's gradient is infinite, and no loss shows it."""

    def train(original: Any, self: Engine, step: Step, *, index: int, **options: Any) -> Any:
        if index != 10 or not is_last():
            return original(self, step, index=index, **options)
        parameter = next(p for p in self.module.parameters() if local(p).numel())
        hook = parameter.register_hook(lambda gradient: gradient * math.inf)
        try:
            sums = original(self, step, index=index, **options)
        finally:
            hook.remove()
        if isinstance(parameter.grad, DTensor):  # whose hooks are not called: it is this rank's shard of the sum
            local(parameter.grad).fill_(math.inf)
        return sums

    around(Engine, "train", train)


def without_step_11() -> None:
    """The step as `skip` leaves it: counted, and nothing else."""

    def take(original: Any, self: Trainer, step: Step) -> None:
        if self.progress.step == 10:
            self.progress.step += 1
            self.progress.samples_seen += step.num_samples
        else:
            original(self, step)

    around(Trainer, "take", take)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [bad_batches(BAD), infinite_loss, infinite_gradient], ids=["inputs", "loss", "gradient"])
@pytest.mark.parametrize("strategy", ["ddp 2", "fsdp 2"])
def test_a_skipped_step_leaves_no_trace(strategy: str, fault: Callable[[], None], tmp_path: Path) -> None:
    ended = finished(*LINE, *STRATEGIES[strategy], SKIP, root=tmp_path / "runs", before=fault)
    assert ended.output.count("of step 11 is not finite") == 1
    assert ": left out (1 of 10 times)" in ended.output
    assert ended.summary["num_divergences"] == 1
    assert_same_bits(ended, once(*LINE, *STRATEGIES[strategy], before=without_step_11))


@pytest.mark.slow
def test_skips_are_counted_through_interruptions_and_bounded(tmp_path: Path) -> None:
    line = [*LINE, *STRATEGIES["ddp 2"], SKIP, "trainer.divergence.limit=2"]
    faults = bad_batches(BAD, BAD + 16, 232)  # steps 11, 12 and 17
    assert command(*line, root=tmp_path / "runs", before=together(faults, after_step(13, preempt))).code == 75
    ended = command(*line, root=tmp_path / "runs", before=faults)
    assert ended.code == 70, ended.output
    assert "of step 17 is not finite (the run has recovered 2 times, the limit in trainer.divergence.limit)" in ended.output
    assert ended.summary["num_divergences"] == 2


def continued_from(checkpoint: Path, *, samples_seen: int) -> None:
    """Rewrite a checkpoint's place in the data, with a manifest that fits."""
    edit(checkpoint, lambda content: content["state"]["progress"].update(samples_seen=samples_seen))


def rolled_back(strategy: str, *, to: int, root: Path) -> Ended:
    """The same by hand: a run that stopped at that step, and goes on behind the bad batch."""
    line = [*LINE, *STRATEGIES[strategy], ROLLBACK]
    stop = to - 1 if strategy != "single" else to  # several agree a step later
    stopped = preempted(*line, at=stop, root=root)
    assert stopped.summary["step"] == to, stopped.output
    continued_from(stopped.directory / "checkpoints" / f"step_{to:08d}", samples_seen=BAD + 16)
    return finished(*line, root=root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "to", "more"), [("single", 8, []), ("fsdp 2", 8, []), ("ddp 2", 4, ["trainer.divergence.back=2"])]
)
def test_a_rollback_goes_on_from_a_checkpoint_behind_the_bad_batch(
    strategy: str, to: int, more: list[str], tmp_path: Path
) -> None:
    expected = rolled_back(strategy, to=to, root=tmp_path / "expected")
    line = [*LINE, *STRATEGIES[strategy], ROLLBACK, *more]
    ended = finished(*line, root=tmp_path / "runs", before=bad_batches(BAD))
    assert f": back to step {to}, without the batches since (1 of 10 times)" in ended.output
    assert_same_bits(ended, expected)
    assert ended.summary["num_divergences"] == 1


@pytest.mark.slow
def test_before_the_first_checkpoint_it_goes_back_to_the_beginning(tmp_path: Path) -> None:
    line = [*LINE, *STRATEGIES["ddp 2"], ROLLBACK, "checkpoint.every=null"]
    ended = finished(*line, root=tmp_path / "runs", before=bad_batches(BAD))
    assert ": back to step 0, without the batches since" in ended.output
    assert [row["step"] for row in ended.rows if row["split"] == "train"] == list(range(1, 22))


@pytest.mark.slow
@pytest.mark.parametrize("number", [9, 10, 14])
def test_killed_about_a_rollback_it_ends_with_the_same_bits(number: int, tmp_path: Path) -> None:
    line = [*LINE, *STRATEGIES["ddp 2"], ROLLBACK, "launch.max_restarts=0"]
    whole = finished(*line, root=tmp_path / "whole", before=bad_batches(BAD))
    # 9 and 10 come before the rollback, and after it
    for fault in (after_step(number, crash), lambda: after_each(Recovery, "recover", lambda *_, **__: crash())):
        assert command(*line, root=tmp_path / "runs", before=together(bad_batches(BAD), fault)).code == -9
        if number == 14:
            break  # the rollback is behind the newest checkpoint
    assert_same_bits(finished(*line, root=tmp_path / "runs", before=bad_batches(BAD)), whole)


@pytest.mark.parametrize(
    "stops", [[9], pytest.param([5, 6, 9, 10], marks=pytest.mark.slow)], ids=["once", "more often than checkpoints are kept"]
)
def test_a_rollback_does_not_go_back_to_what_a_stop_has_saved(stops: list[int], tmp_path: Path) -> None:
    line = [*LINE, ROLLBACK, "checkpoint.keep_last=1"]
    whole = once(*line, before=bad_batches(BAD))
    for step in stops:
        faults = together(bad_batches(BAD), after_step(step, preempt))
        assert command(*line, root=tmp_path / "runs", before=faults).code == 75
    ended = finished(*line, root=tmp_path / "runs", before=bad_batches(BAD))
    assert ": back to step 8, without the batches since" in ended.output
    assert_same_bits(ended, whole)


def test_where_a_rollback_goes_back_to_is_part_of_a_run() -> None:
    every = [
        checked(*RUN, *words, "checkpoint.every=5").run.id == checked(*RUN, *words).run.id for words in ([ROLLBACK], [SKIP])
    ]
    assert every == [False, True]


def infinite_evaluation() -> None:
    """The last rank's loss is infinite in the evaluation of step 10."""
    note_steps()
    spoil_losses(lambda forward: not torch.is_grad_enabled() and forward.latest == 9)


def test_an_evaluation_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    line = [*LINE, *STRATEGIES["ddp 2"], SKIP]
    failed = command(*line, root=tmp_path / "runs", before=infinite_evaluation)
    assert failed.code == 70
    assert failed.summary["error"].startswith("the val loss of step 10 is not finite")
    assert all(row["step"] < 10 or row["split"] == "train" for row in failed.rows)
    assert sorted(path.name for path in (failed.directory / "checkpoints").iterdir())[-1] == "step_00000008"
    assert not (failed.directory / "model.safetensors").exists()


IMAGES = [*CONFORMANCE, *MODELS["vit"], "checkpoint.every=4"]  # steps 1 to 5 see 66 samples
TWO_RANKS = [
    (strategy, *layouts(strategy)[0]) for strategy in options("parallel") if strategy not in ("single", *CONTEXTS, *FOR_EXPERTS)
]


BAD_EVERYWHERE = bad_batches(80, everywhere=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh", "action"), [(*case, (SKIP, ROLLBACK)[number % 2]) for number, case in enumerate(TWO_RANKS)]
)
def test_any_strategy_gets_over_it(strategy: str, ranks: int, mesh: list[str], action: str, tmp_path: Path) -> None:
    line = [*IMAGES, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", *mesh, action]
    if strategy in NOT_EQUAL:
        line += ["parallel.sync_every=2", "trainer.eval_every=4"]
    ended = finished(*line, root=tmp_path / "runs", before=BAD_EVERYWHERE)
    assert "of step 7 is not finite: " in ended.output
    if strategy not in NOT_EQUAL:  # which is not equal to one process, and says so
        assert_close(ended, once(*IMAGES, action, before=BAD_EVERYWHERE))


@pytest.mark.slow
def test_so_does_context_parallelism_whose_inputs_are_always_finite(tmp_path: Path) -> None:
    line = [*CONFORMANCE, *MODELS["gpt, tied"], "trainer.max_steps=14", SKIP]
    two = ["parallel=context", "parallel.context=2", "launch.nproc_per_node=2"]
    ended, one = (finished(*line, *more, root=tmp_path / f"{len(more)}", before=infinite_loss) for more in (two, []))
    assert "the loss of step 11 is not finite: " in ended.output
    assert_close(ended, one)
