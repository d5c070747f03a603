"""The loading of a split, so that its samples do not depend on the process that loads it. This imports no torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from framework.data.source import Dataset, Source, Split
from framework.randomness import key, seeded
from framework.runtime.environment import outside_of_groups

if TYPE_CHECKING:
    from framework.distributed.world import World


@contextmanager
def alone() -> Iterator[None]:
    """Let code that asks torch.distributed, or the environment, for the number of processes find one.

    The run divides the samples; a dataset that did so too would do it twice.
    """
    answers: dict[str, Any] = {"is_initialized": lambda: False, "get_rank": lambda group=None: 0}
    answers["get_world_size"] = lambda group=None: 1
    functions = vars(sys.modules.get("torch.distributed", SimpleNamespace()))  # without torch, this process is in no group
    asked = {name: functions.get(name) for name in answers}
    with outside_of_groups():
        functions.update(answers)  # what torch itself asks is in another module
        try:
            yield
        finally:
            functions.update(asked)


def load_split(dataset: Dataset, split: Split, *, seed: int) -> Source:
    """Load a split. Its draws depend only on the run's seed, so its samples do not depend on which split is used first.

    All splits get the same draws: disjoint parts of one permutation stay disjoint. The dataset finds only one process.
    ValueError if it has a problem.
    """
    if problems := dataset.problems():
        raise ValueError(problems[0])
    with seeded(key(seed, "split")), alone():
        return dataset.load(split)


def load_in_turns(dataset: Dataset, split: Split, *, seed: int, world: "World") -> Source:
    """Load a split: rank 0 first, then one rank of each other node, as they may download files; then all others. Collective.

    Each process has its own copy of what is not mapped from a file.
    """
    mine = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    for turn in range(3):
        if turn == mine:
            source = load_split(dataset, split, seed=seed)
        world.agreement.barrier()
    return source
