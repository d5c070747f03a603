"""Recomputation that reads and draws what the first forward did, of all blocks, of some, or of what is cheap."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from framework.modules.recomputation import Recomputed, recompute_activations
from tests.harness import Counting
from tests.zoo import make


class Moving(nn.Module):
    """Reads and moves a buffer, and draws from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        y = torch.tanh(self.linear(x)) * self.scale.clone() * noise
        with torch.no_grad():
            self.scale.mul_(1.5)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Moving() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: Model) -> tuple[list[Tensor], list[Tensor], float]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    for _ in range(2):  # two graphs at once, as with several micro-batches under way
        model(torch.ones(2, 3)).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return gradients, [buffer.clone() for buffer in model.buffers()], random.random()


@pytest.mark.quick(1)
@pytest.mark.parametrize("which", [True, 2, "operations"])
def test_recomputed_blocks_read_and_draw_the_same_and_leave_no_trace(which: Recomputed) -> None:
    plain, recomputed = Model(), Model()
    recompute_activations([*recomputed.layers], which=which)
    for one, other in zip(step(plain), step(recomputed)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("which", "products", "cheap"), [(True, 4, 4), (2, 3, 3), (3, 3, 3), ("operations", 2, 4)])
def test_what_is_computed_again(which: Recomputed, products: int, cheap: int) -> None:
    """Of two blocks' forwards: products of matrices, and what is cheap."""
    model = Model()
    recompute_activations([*model.layers], which=which)
    with Counting() as counting:
        model(torch.ones(2, 3)).sum().backward()
    assert (counting.calls["addmm"], counting.calls["tanh"]) == (products, cheap), counting.calls


class Dense(nn.Module):
    """Appends to the list that it is given, as a DenseNet's layers do."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, 2)

    def forward(self, features: list[Tensor], *, kept: dict[str, Tensor]) -> Tensor:
        features.append(torch.tanh(self.linear(torch.cat(features, dim=1))))
        kept["last"] = kept.get("last", torch.zeros(())) + features[-1].sum()
        return features[-1] * kept["last"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("which", [True, "operations"])
def test_a_cache_that_blocks_fill_is_for_the_second_forward_as_empty_as_for_the_first(which: Recomputed) -> None:
    """As in transformers' models, whose cache of keys and values is on by default."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model: Any = make("hf llama")
    tokens, lengths = torch.randint(0, 32, (2, 12)), list[int]()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens).logits.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def note(attention: Any, arguments: Any, named: dict[str, Any]) -> None:
        (cache,) = (value for value in (*arguments, *named.values()) if hasattr(value, "get_seq_length"))
        lengths.append(cache.get_seq_length(attention.layer_idx))

    plain = gradients()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    gradients()
    recompute_activations([*model.model.layers], which=which)
    for one, other in zip(plain, gradients()):
        assert torch.equal(one, other)
    assert lengths == [0] * 9  # once without, twice with recomputation, then from the last layer to the first


def test_a_list_that_blocks_change_is_for_the_second_forward_what_it_was() -> None:
    gradients = []
    for which in (False, True):
        torch.manual_seed(0)
        blocks = [Dense(2), Dense(4), Dense(6)]
        if which:
            recompute_activations(blocks, which=True)
        features, kept = [torch.ones(3, 2)], dict[str, Tensor]()
        torch.stack([block(features, kept=kept) for block in blocks]).sum().backward()
        assert len(features) == 4
        gradients.append([parameter.grad for block in blocks for parameter in block.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, features: list[Tensor], *, kept: dict[str, list[Tensor]]) -> Tensor:
        features.append(self.layer(features[-1]))
        return kept["features"][-1].square()


def test_a_list_with_two_names_stays_one_list() -> None:
    block = Shares()
    recompute_activations([block], which=True)
    features = [torch.ones(3, 2)]
    block(features, kept={"features": features}).sum().backward()
    assert block.layer.weight.grad is not None
