"""The loading of a split, so that its samples do not depend on the process that loads it. This imports no torch."""

from typing import TYPE_CHECKING

from framework.data.alone import alone
from framework.data.source import Dataset, Source, Split
from framework.randomness import key, seeded

if TYPE_CHECKING:
    from framework.distributed.world import World


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
