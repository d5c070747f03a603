"""How much of the framework a reader walks through from the loop to the first backward pass, and what a step of nothing costs."""

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.build.training import Builder
from framework.config.schema import RunConfig
from framework.distributed.world import World
from framework.modes.train import _continue
from tests.harness import before_each
from tests.product import configured
from tests.ranks import on_ranks

GPT = ["dataset=synthetic", "dataset.kind=tokens", "dataset.num_train=16", "task=language_modeling", "model=gpt", "model.dim=16",
       "model.num_layers=2", "model.num_heads=2", "global_batch_size=4", "micro_batch_size=2", "trainer.max_epochs=null",
       "trainer.max_steps=2", "device=cpu"]  # fmt: skip
# the most files of the framework, and lines of functions in them, that run in the second step before its first backward pass. The
# goals are 5 and 200, 6 and 280, 7 and 320, 8 and 380
MOST_FUNCTIONS = 145  # of the framework, in a step that does almost nothing
MOST = {"single": (11, 332), "ddp": (13, 345), "fsdp": (14, 345), "pipeline": (17, 460)}


def walk(world: World, config: RunConfig) -> tuple[int, int]:
    """Return the numbers of files and of lines of the functions that run between the start of the second step and a backward pass."""
    build = Builder(config, world=world)
    trainer = build.trainer()
    _continue(trainer, build)
    entered, is_on, found = set[CodeType](), [False], list[tuple[int, int]]()
    take, backward = trainer.take, torch.autograd.backward

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_on[0]:
            entered.add(frame.f_code)

    def taking(step: Any) -> None:
        is_on[0] = trainer.progress.step == 1
        take(step)

    def ended(*given: Any, **named: Any) -> Any:
        if is_on[0]:
            is_on[0] = False
            ours = {code for code in entered if f"{Path('framework')}/" in code.co_filename and "tests" not in code.co_filename}
            ours = {code for code in ours if code.co_name[0] != "<"}
            found.append((len({code.co_filename for code in ours}), sum(len(inspect.getsourcelines(code)[0]) for code in ours)))
        return backward(*given, **named)

    trainer.take = taking
    torch.autograd.backward = ended
    sys.setprofile(note)
    try:
        trainer.fit()
    finally:
        sys.setprofile(None)
        torch.autograd.backward = backward
    trainer.saver.close()
    return found[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", MOST)
def test_the_walk_from_the_loop_to_a_backward_pass_is_short(strategy: str, tmp_path: Path) -> None:
    ranks = 1 if strategy == "single" else 2
    config = configured(*GPT, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", f"run.dir={tmp_path}/run")
    (tmp_path / "scratch").mkdir()
    files, lines = max(on_ranks(ranks, partial(walk, config=config), scratch=tmp_path / "scratch"))
    print(f"{strategy}: {files} files, {lines} lines of functions")
    assert files <= MOST[strategy][0] and lines <= MOST[strategy][1]


NOTHING = ["model=mlp", "model.num_layers=1", "model.dim=1", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=4",
           "trainer.eval_every=null", "trainer.log_every=4", "device=cpu"]  # fmt: skip
TOKENS = [*GPT, "trainer.max_steps=4", "trainer.eval_every=null", "trainer.log_every=4"]


def of_a_step(world: World, config: RunConfig, count: Callable[[Counter[str]], Callable[[], None]]) -> int:
    """Return what `count` has counted from the start of the second step to the start of the third; it returns how to end it."""
    build = Builder(config, world=world)
    trainer = build.trainer()
    _continue(trainer, build)
    found, take, end = Counter[str](), trainer.take, list[Callable[[], None]]()

    def taking(step: Any) -> None:
        if trainer.progress.step == 1:
            end.append(count(found))
        elif trainer.progress.step == 2:
            end.pop()()
        take(step)

    trainer.take = taking
    trainer.fit()
    trainer.saver.close()
    return found.total()


def seedings(found: Counter[str]) -> Callable[[], None]:
    return counting(random, ["seed"], found)


def functions(found: Counter[str]) -> Callable[[], None]:

    def note(frame: FrameType, event: str, _: Any) -> None:
        found["call"] += event == "call" and "/framework/" in frame.f_code.co_filename

    sys.setprofile(note)
    return lambda: sys.setprofile(None)


MESSAGES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "send", "recv")


def messages(found: Counter[str], *, world: World) -> Callable[[], None]:
    """Count the messages of a process, beside those by which the ranks agree."""
    return counting(dist, MESSAGES, found, but=world.agreement.group)


def counting(owner: Any, names: Iterable[str], found: Counter[str], but: Any = ()) -> Callable[[], None]:
    """Count the calls of an owner's functions by name, but those for a group; return how to end it."""

    def note(called: str, *_: Any, group: Any = None, **__: Any) -> None:
        found[called] += group is not but

    plain = {name: getattr(owner, name) for name in names}
    for name in plain:
        before_each(owner, name, partial(note, name))
    return lambda: [setattr(owner, name, call) for name, call in plain.items()] and None


@pytest.mark.parametrize(("line", "most"), [(NOTHING, 2), ([*NOTHING, "model.dropout=0.5"], 5)])
def test_a_step_seeds_generators_for_its_forward_for_units_that_draw_and_for_its_optimizer(
    line: list[str], most: int, tmp_path: Path
) -> None:
    """Not for stored arrays under transforms that draw nothing."""
    count = of_a_step(World.alone(), configured(*line, f"run.dir={tmp_path}/run"), seedings)
    assert 0 < count <= most, f"{count} seedings in a step"


def test_a_step_of_nothing_runs_few_functions(tmp_path: Path) -> None:
    count = of_a_step(World.alone(), configured(*NOTHING, f"run.dir={tmp_path}/run"), functions)
    print(f"{count} functions of the framework in a step")
    assert count <= MOST_FUNCTIONS


def messages_of_a_step(world: World, config: RunConfig) -> int:
    return of_a_step(world, config, partial(messages, world=world))


@pytest.mark.parametrize(("line", "count"), [(NOTHING, 1), (TOKENS, 2)])
def test_only_a_weight_that_a_rank_does_not_know_is_sent(line: list[str], count: int, tmp_path: Path) -> None:
    """One message is the gradients. Images and their labels are in every rank's memory; of tokens, a rank reads only its own."""
    config = configured(*line, "parallel=ddp", "launch.nproc_per_node=2", f"run.dir={tmp_path}/run")
    (tmp_path / "scratch").mkdir()
    assert on_ranks(2, partial(messages_of_a_step, config=config), scratch=tmp_path / "scratch") == [count, count]
