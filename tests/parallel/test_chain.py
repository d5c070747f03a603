"""Cutting a chain of modules into stages."""

import itertools
import random

import pytest
import torch
from torch import nn

from framework.parallel.pipelining.chain import costs_of, cut, stray_parameters, weighty


@pytest.mark.parametrize("seed", range(20))
def test_the_dearest_stage_is_as_cheap_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.randrange(1, 50) for _ in range(rng.randrange(4, 9))]
    num_stages = rng.randrange(1, 5)
    stages = cut(costs, num_stages=num_stages)
    assert [i for stage in stages for i in stage] == list(range(len(costs)))
    assert len(stages) == num_stages and all(len(stage) for stage in stages)
    best = min(
        max(sum(costs[start:end]) for start, end in zip((0, *inner), (*inner, len(costs))))
        for inner in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert max(sum(costs[i] for i in stage) for stage in stages) == best


def test_links_without_weights_go_with_their_neighbours() -> None:
    links = [nn.Flatten(), nn.Linear(4, 4), nn.GELU(), nn.Dropout(), nn.Linear(4, 2), nn.Identity()]
    assert weighty(links) == [range(4), range(4, 6)]


def test_costs_are_counted_operations() -> None:
    links = [nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 5)]
    example = torch.empty(3, 1, 8, 8, device="meta")
    assert costs_of(nn.Sequential(*links), links, example=example) == [1 + 2 * 3 * 2 * 9 * 36 + 20, 1, 1 + 2 * 3 * 72 * 5 + 365]


def test_a_weight_outside_of_the_chain_is_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert stray_parameters(model, [model[0]]) == ["1.weight", "1.bias"]
