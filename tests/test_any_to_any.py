"""A run begun under any strategy is continued under any other: the same state, bit for bit, and the same way onward."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint.canonical import TrainingState, restore, state_tensors
from framework.checkpoint.state import PlainState
from framework.checkpoint.store import CheckpointStore
from framework.config.folders import options
from framework.distributed.world import World
from framework.modes import train as run
from framework.modules.tensors import whole
from tests.harness import Ended, assert_close, command, finished, once, together
from tests.test_conformance import FOR_EXPERTS, NOT_EQUAL, layouts
from tests.test_resume import after_step, preempt, preempted

# AdamW with two groups, a frozen matrix and vector, tied weights, an average of the weights
RUN = ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.num_train=40", "dataset.num_val=6",
       "dataset.num_test=6", "dataset.seq_len=7", "dataset.vocab_size=12", "precision=fp64",
       "model._target_=tests.frozen_gpt.FrozenGPT", "model.dim=16", "model.num_layers=4", "model.num_heads=4", "model.tie_embeddings=true",
       "global_batch_size=6", "micro_batch_size=2", "trainer.max_epochs=null", "trainer.max_steps=10",
       "trainer.log_every=1", "trainer.eval_every=null", "checkpoint.every=null", "trainer.ema_decay=0.8",
       "optimizer.weight_decay=0.1", "optimizer.lr=0.01", "trainer.clip_grad_norm=1.0"]  # fmt: skip
STRATEGIES = [name for name in options("parallel") if name not in (*NOT_EQUAL, *FOR_EXPERTS)]


def line(strategy: str, ranks: int | None = None) -> list[str]:
    """Return the overrides of a strategy, on the fewest ranks that it is tested on, or on so many."""
    count, mesh = (
        next(layout for layout in layouts(strategy) if ranks in (None, layout[0])) if strategy != "single" else (1, [])
    )
    return [f"parallel={strategy}", f"launch.nproc_per_node={count}", *mesh]


def note_state(path: Path) -> Callable[[], None]:
    """Return what makes a command write down the hash of each whole tensor of its state, whenever it saves or restores."""

    def write(tensors: dict[str, torch.Tensor], world: World) -> None:
        mine = {name: hashlib.sha256(whole(tensor).cpu().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
        merged: dict[str, str] = {}
        for theirs in world.agreement.gather(mine):
            assert all(merged.setdefault(name, value) == value for name, value in theirs.items()), "ranks differ"
        if world.rank == 0:
            path.write_text(json.dumps(merged))

    def plant() -> None:
        original = CheckpointStore.save

        def save(self: CheckpointStore, step: int, tensors: dict[str, torch.Tensor], state: object) -> object:
            write(tensors, self.world)
            return original(self, step, tensors, state)

        def restore_and_write(path: Path, kept: PlainState, held: TrainingState, *, world: World) -> None:
            restore(path, kept, held, world=world)
            write(state_tensors(held), world)
            CheckpointStore.save = original  # what was restored is what counts

        CheckpointStore.save = save
        run.restore = restore_and_write

    return plant


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Ended, str]]:
    """Return a function: a strategy -> its run, stopped after step 5, and the hashes of its state."""
    done: dict[str, tuple[Ended, str]] = {}

    def begin(strategy: str) -> tuple[Ended, str]:
        if strategy not in done:
            folder = tmp_path_factory.mktemp("begun")
            # two ranks agree a step later than one
            cut = 5 if line(strategy)[1].endswith("=1") else 4
            before = together(note_state(folder / "state"), after_step(cut, preempt))
            stopped = command(*RUN, *line(strategy), root=folder / "runs", before=before)
            assert stopped.code == 75, stopped.output
            assert stopped.summary["step"] == 5
            done[strategy] = stopped, (folder / "state").read_text()
        return done[strategy]

    return begin


NUM_SECONDS = 2  # strategies under which each strategy's run is continued; as many are continued under each


def pairs() -> Iterator[Any]:
    """Yield pairs of strategies: each is as often the first as the second.

    A checkpoint is one format, whoever writes it: what a strategy writes wrongly shows with any reader, what it reads
    wrongly with any writer. The strides share no factor with the number of strategies, so that pairs of kin come too.
    """
    count = len(STRATEGIES)
    strides = [stride for stride in range(1, count) if math.gcd(stride, count) == 1][:NUM_SECONDS]
    for stride in strides:
        for i, first in enumerate(STRATEGIES):
            second = STRATEGIES[(i + stride) % count]
            yield pytest.param(first, second, marks=[] if stride == 1 and i % 6 == 0 else [pytest.mark.slow])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [*pairs()])
def test_a_run_goes_on_under_another_strategy(
    first: str, second: str, begun: Callable[[str], tuple[Ended, str]], tmp_path: Path
) -> None:
    stopped, state = begun(first)
    ended = finished(
        *RUN, *line(second), f"run.resume={stopped.directory}", root=tmp_path / "runs", before=note_state(tmp_path / "state")
    )
    assert json.loads((tmp_path / "state").read_text()) == json.loads(state)
    assert_close(ended, once(*RUN))


def test_the_same_command_under_another_strategy_is_the_same_run(tmp_path: Path) -> None:
    stopped = preempted(*RUN, *line("ddp"), at=4, root=tmp_path)
    assert stopped.summary["step"] == 5, stopped.output
    ended = finished(*RUN, *line("fsdp"), "trainer.activation_checkpointing=true", root=tmp_path)
    assert ended.directory == stopped.directory and "continuing from" in ended.output
    assert_close(ended, once(*RUN))
    again = command(*RUN, *line("pipeline"), root=tmp_path)
    assert again.code == 0 and again.directory == ended.directory and "finished already, at step 10" in again.output


LONGER = [*RUN, "trainer.max_steps=16"]
CHAINS = [
    [("ddp", 2), ("fsdp", 3), ("tensor", 2), ("single", None), ("hsdp", 4), ("ddp", 4)],
    [("zero", 3), ("context", 4), ("fsdp+tp", 4), ("fsdp+context", 4), ("zero", 2), ("dp", None), ("fsdp", 2)],
    [("ddp", 2), ("fsdp", 3), ("pipeline", 2), ("tensor", 2), ("single", None), ("hsdp", 4), ("ddp", 4)],
    [("parameter-server", 3), ("pp+fsdp+tp", 4), ("ddp+pp", 4), ("model-parallel", None), ("auto", 2), ("pp+fsdp+tp", 2)],
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS[1:])
def test_a_chain_of_strategies_comes_to_the_same_end(chain: list[tuple[str, int | None]], tmp_path: Path) -> None:
    previous: Ended | None = None
    step = 0
    for hop, (strategy, ranks) in enumerate(chain):
        resume = [f"run.resume={previous.directory}"] if previous else []
        is_last = hop == len(chain) - 1
        before = None if is_last else after_step(step + 1, preempt)
        hopped = command(*LONGER, *line(strategy, ranks), *resume, root=tmp_path / str(hop), before=before)
        assert hopped.code == (0 if is_last else 75), hopped.output
        previous, step = hopped, hopped.summary["step"]
    assert previous is not None
    assert_close(previous, once(*LONGER))


def lines_run(act: Callable[[], object]) -> int:
    """Return how many lines of Python code run."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    sys.settrace(note)
    act()
    sys.settrace(None)
    return count


def test_a_resume_takes_work_in_proportion_to_the_number_of_parameters(tmp_path: Path) -> None:
    def resumed(count: int) -> int:
        module = nn.ParameterList(torch.ones(1) for _ in range(count))
        optimizer = torch.optim.Adam(module.parameters())
        sum(parameter.sum() for parameter in module).backward()
        optimizer.step()
        held, world = TrainingState(module, optimizer, None, None, None), World.alone()
        store = CheckpointStore(tmp_path / str(count), world=world, keep_last=1, keep_best=0, mode="min")
        store.save(1, state_tensors(held), {})
        (path,) = store.directory.iterdir()
        return lines_run(lambda: restore(path, PlainState(), held, world=world))

    few, many = resumed(20), resumed(80)
    assert many < 4.5 * few, (few, many)
