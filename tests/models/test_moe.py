"""The mixture of experts: what its experts compute, when a sample is balanced, and how its loss joins that of a task."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from framework.modules.flops import flops_per_sample
from framework.tasks.classification import Classification
from framework.tasks.language_modeling import IGNORED, LanguageModeling
from models.gpt import GPT
from models.moe import Experts, MoEGPT, imbalance

OPTIONS = {"vocab_size": 16, "seq_len": 12, "dim": 8, "num_layers": 2, "num_heads": 2}


def experts() -> tuple[Experts, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = Experts(dim=8, num_experts=5).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x_ND, weights_NK = torch.randn(9, 8, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    return layer, x_ND, torch.rand(9, 4).topk(2).indices, weights_NK  # nothing chooses the fifth


def test_experts_are_the_weighted_mlps_that_each_token_has_chosen() -> None:
    layer, x_ND, index_NK, weights_NK = experts()
    expected = [
        sum(weight * F.linear(F.gelu(F.linear(x, layer.up_XHD[i])), layer.down_XDH[i]) for i, weight in zip(chosen, weights))
        for x, chosen, weights in zip(x_ND, index_NK.tolist(), weights_NK)
    ]
    torch.testing.assert_close(layer(x_ND, index_NK, weights_NK), torch.stack(expected))
    torch.testing.assert_close(layer._through_all(x_ND, index_NK, weights_NK), torch.stack(expected))


def test_imbalance_is_1_where_experts_are_chosen_equally_often_and_their_number_where_one_is() -> None:
    even = torch.full((2, 8, 4), 0.25)
    index_BTK = torch.arange(8).remainder(4).expand(2, 8).unsqueeze(-1)
    torch.testing.assert_close(imbalance(even, index_BTK), torch.ones(2))
    one = F.one_hot(torch.full((2, 8), 3), 4).float()
    torch.testing.assert_close(imbalance(one, torch.full((2, 8, 1), 3)), torch.full((2,), 4.0))


def test_it_takes_the_operations_of_the_experts_that_a_token_has() -> None:
    tokens = torch.zeros(1, 12, dtype=torch.long, device="meta")
    with torch.device("meta"):
        dense, sparse = GPT(**OPTIONS), MoEGPT(**OPTIONS, num_experts=6, top_k=1)
    router = 2 * 3 * 2 * 12 * 8 * 6  # of two layers, forward and backward
    assert flops_per_sample(sparse, tokens) == flops_per_sample(dense, tokens) + router


def test_its_loss_is_added_by_the_tokens_of_a_sample_in_training_alone() -> None:
    torch.manual_seed(0)
    model, task = MoEGPT(**OPTIONS, balance=0.5).double(), LanguageModeling(bytes_per_token=None)
    tokens, targets = torch.randint(0, 16, (2, 3, 12))
    targets[0, 4:] = IGNORED
    outputs = model(tokens)
    total, weight = task.loss(outputs, targets), task.loss_weight(targets)
    plain = task.loss(outputs["logits"], targets)
    expected = 4 * outputs["aux_loss"][0] + 12 * outputs["aux_loss"][1:].sum()
    assert weight == 28 and (outputs["aux_loss"] >= 0.4).all()
    torch.testing.assert_close(total - plain, expected)
    assert isinstance(model.eval()(tokens), torch.Tensor)
    assert isinstance(MoEGPT(**OPTIONS, balance=0.0)(tokens), torch.Tensor)


@pytest.mark.parametrize(("value", "is_said"), [(torch.tensor(0.5), "[]"), (torch.ones(1), "[1]"), (torch.ones(3, 1), "[3, 1]"),
                                                (0.5, "float")], ids=str)  # fmt: skip
def test_a_loss_of_a_whole_micro_batch_is_refused(value: Any, is_said: str) -> None:
    outputs = {"logits": torch.zeros(3, 2), "aux_loss": value}
    with pytest.raises(TypeError, match=rf"aux_loss is {re.escape(is_said)}, but .* \[3\], .*output_router_logits=false"):
        Classification(label_smoothing=0.0).loss(outputs, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(("changes", "words"), [({"top_k": 5, "num_experts": 4}, "top_k=5"), ({"dim": 6}, "dim=6"),
                                                ({"num_experts": 0}, "num_experts=0")])  # fmt: skip
def test_what_cannot_be_built_is_said(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoEGPT(**OPTIONS | changes)
