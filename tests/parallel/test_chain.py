"""Cutting a chain of modules into stages."""

import itertools
import random

import pytest
import torch
from torch import nn

from framework.engine.seam import Demands
from framework.modules.trace import give_example
from framework.parallel.pipeline import problems
from framework.parallel.pipelining.chain import costs_of, cut, stray_parameters, weighty

NOTHING = Demands(None, None, False, None, None, False, None, False)


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


class Deep(nn.Module):
    def __init__(self, *, reads_values: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.reads_values = reads_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():  # tokens: it reads whether there is padding
            x = self.embed(x) * (1 if (x > 0).all() else (x > 0)[..., None])
        for block in self.blocks:
            x = block(x)
        return -x if self.reads_values and x.sum().item() > 0 else x


def test_a_model_that_cannot_be_cut_is_told_why_and_what_to_do() -> None:
    def said(*, reads_values: bool, example: torch.Tensor | None) -> list[str]:
        model = Deep(reads_values=reads_values)
        give_example(model, lambda: example)
        return problems(model, demands=NOTHING, pipeline=2, schedule="1f1b")

    example = torch.empty(2, 4, device="meta")
    tokens = torch.tensor([[1, 2, 0], [3, 1, 2]])
    assert said(reads_values=False, example=example) == said(reads_values=False, example=tokens) == []
    for (line,), words in ((said(reads_values=False, example=None), "the shape of an input is not known"),
                           (said(reads_values=False, example=tokens.to("meta")), "it reads the values of its tensors"),
                           (said(reads_values=True, example=example), "it reads the values of its tensors")):  # fmt: skip
        assert words in line and "add chain() to the model, or take another strategy" in line
