"""The load of a split: with the draws of the run's seed, and in an order in which no two processes download the same files."""

from framework.data.source import Dataset, Source, Split
from framework.distributed.world import World
from framework.randomness import key, seeded


def load_split(dataset: Dataset, split: Split, *, seed: int) -> Source:
    """Load a split. Its draws depend only on the run's seed, so its samples do not depend on which split is used first.

    All splits get the same draws: disjoint parts of one permutation stay disjoint. ValueError if the dataset has a problem.
    """
    if problems := dataset.problems():
        raise ValueError(problems[0])
    with seeded(key(seed, "split")):
        return dataset.load(split)


def load_in_turns(dataset: Dataset, split: Split, *, seed: int, world: World) -> Source:
    """Load a split: rank 0 first, then one rank of each other node, as they may download files; then all others. Collective.

    Each process has its own copy of what is not mapped from a file.
    """
    mine = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    for turn in range(3):
        if turn == mine:
            source = load_split(dataset, split, seed=seed)
        world.agreement.barrier()
    return source
