"""How much of the framework a reader walks through from the loop to the first backward pass of a step."""

import inspect
import sys
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from framework.build.training import Builder
from framework.config.schema import RunConfig
from framework.distributed.world import World
from framework.modes.train import _continue
from tests.product import configured
from tests.ranks import on_ranks

GPT = ["dataset=synthetic", "dataset.kind=tokens", "dataset.num_train=16", "task=language_modeling", "model=gpt", "model.dim=16",
       "model.num_layers=2", "model.num_heads=2", "global_batch_size=4", "micro_batch_size=2", "trainer.max_epochs=null",
       "trainer.max_steps=2", "device=cpu"]  # fmt: skip
# the most files of the framework, and lines of functions in them, that run in the second step before its first backward pass. The
# goals are 5 and 200, 6 and 280, 7 and 320, 8 and 380
MOST = {"single": (16, 365), "ddp": (18, 375), "fsdp": (19, 375), "pipeline": (21, 480)}


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

    trainer.take = taking  # type: ignore[method-assign]
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
