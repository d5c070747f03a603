"""A model's parts: units found anywhere in its tree, and what the configuration answers for it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from framework.cli.run import checked_line
from framework.modules.parts import blocks_of, chain_of, description, give_parts, own_answer, repeated
from framework.modules.trace import give_example, traced
from tests.harness import Says, finished, refused
from tests.test_loop import TINY
from tests.zoo import IMAGES, TOKENS

UNITS = {
    "hf gpt2": "3 units of GPT2Block, 92 % of the weights",
    "hf llama": "3 units of LlamaDecoderLayer, 85 % of the weights",
    "hf mixtral": "3 units of MixtralDecoderLayer, 94 % of the weights",
    "hf bert": "3 units of BertLayer and 1 unit of BertEmbeddings, 95 % of the weights",
    "peft lora": "3 units of GPT2Block, 93 % of the weights",
    "x-transformers": "3 units of Attention and 3 units of FeedForward, 89 % of the weights",
    "nanogpt": "3 units of Block, 90 % of the weights",
    "nn.TransformerEncoder": "3 units of TransformerEncoderLayer, 85 % of the weights",
    "timm vit": "3 units of Block, 89 % of the weights",
    "timm swin": "4 units of SwinTransformerBlock, 91 % of the weights",
    "torchvision swin": "4 units of SwinTransformerBlock, 91 % of the weights",
    "torchvision mobilenet": "11 units of InvertedResidual, 60 % of the weights",
    "torchvision densenet": "4 units of _DenseLayer, 67 % of the weights",
    "unet": "5 units of Double, 99 % of the weights",
    "moe": "2 units of Layer, 29 % of the weights",
    "codebook": "none in Codebook, which is one unit (model.parts.blocks names its blocks)",
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", UNITS)
def test_the_units_are_the_blocks_wherever_they_are(name: str) -> None:
    model = (IMAGES | TOKENS)[name]()
    assert description(blocks_of(model), model) == UNITS[name]


def test_experts_that_a_forward_is_not_seen_to_enter_are_no_units() -> None:
    model = IMAGES["one moe"]()
    assert len(repeated(model)) == 3
    give_example(model, lambda: torch.empty(2, 3, 16, 16, device="meta"))
    assert blocks_of(model) == []
    trace = traced(model)
    assert trace is not None and not trace.is_whole


class ReadsPositions(nn.Module):
    """As the masks of transformers: what is computed from positions alone decides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if (positions.diff() == 1).all():
            x = x + positions.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return x


def test_positions_have_numbers_while_a_forward_is_followed() -> None:
    model = ReadsPositions()
    give_example(model, lambda: torch.empty(2, 5, dtype=torch.int64, device="meta"))
    trace = traced(model)
    assert trace is not None and trace.is_whole and blocks_of(model) == [*model.layers]


def test_names_of_the_frameworks_questions_are_no_answers() -> None:
    model = IMAGES["named traps"]()
    assert chain_of(model) is None and own_answer(model, "tensor_plan") is None
    assert [type(block) for block in blocks_of(model)] == [*[nn.Sequential] * 3, nn.Linear]

    class Selects(nn.Module):
        def tensor_plan(self, how: str) -> str:
            return how

        def mixers(self) -> int:
            return 3

    assert own_answer(Selects(), "tensor_plan") is None and own_answer(Selects(), "mixers") is not None


def test_a_weight_that_is_read_is_seen() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.called(x.to(self.called.weight.dtype)) @ self.read.weight

    model = Reads()
    give_example(model, lambda: torch.empty(2, 4, device="meta"))
    trace = traced(model)
    assert trace is not None and trace.is_whole
    assert trace.read_elsewhere() == {id(model.read.weight)}


def test_the_configuration_answers_for_a_model() -> None:
    model = TOKENS["hf gpt2"]()
    parts = {
        "blocks": "transformer.h",
        "chain": ["transformer.wte", "transformer.h.*.mlp", "lm_head"],
        "tensor_plan": {"*.c_fc": "colwise"},
    }
    give_parts(model, parts)
    assert blocks_of(model) == [*model.transformer.h]
    assert chain_of(model) == [model.transformer.wte, *(block.mlp for block in model.transformer.h), model.lm_head]
    answer = own_answer(model, "tensor_plan")
    assert answer is not None and answer() == {"*.c_fc": "colwise"}
    give_parts(model, {"blocks": "GPT2MLP"})  # a class
    assert blocks_of(model) == [block.mlp for block in model.transformer.h]
    of_block, of_mlp = (
        sum(p.numel() for p in part.parameters()) for part in (model.transformer.h[0], model.transformer.h[0].mlp)
    )
    give_parts(model, {"blocks": of_mlp + 1})  # parameters
    assert blocks_of(model) == [*model.transformer.h]
    give_parts(model, {"blocks": of_mlp})
    assert {block.mlp for block in model.transformer.h} <= set(blocks_of(model))
    give_parts(model, {"blocks": []})
    assert blocks_of(model) == [] and chain_of(model) is None


@pytest.mark.parametrize(("parts", "says"), [
    ({"blocks": "transformer.hh"}, "model.parts.blocks: 'transformer.hh' names no module of GPT2LMHeadModel ... transformer.h"),
    ({"blocks": "GPT2Blck"}, "model.parts.blocks: 'GPT2Blck' ... did you mean GPT2Block?"),
    ({"blocks": 10**9}, "model.parts.blocks: 1000000000, but no module within GPT2LMHeadModel (of 10,640) has that many parameters"),
    ({"chain": ["lm_hed"]}, "model.parts.chain: 'lm_hed' ... did you mean lm_head?"),
    ({"tensor_plan": {"*.nothing": "colwise"}}, "model.parts.tensor_plan: '*.nothing' ..."),
])  # fmt: skip
def test_a_name_of_no_module_is_an_error(parts: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        give_parts(TOKENS["hf gpt2"](), parts)
    assert str(caught.value) == Says(says)


@pytest.mark.parametrize(("word", "says"), [
    ("model.parts.block=x", "model.parts.block: unknown key ... model.parts.blocks"),
    ("model.parts.blocks=0.5", "model.parts.blocks: 0.5 is not valid ..."),
    ("model.parts=x", "model.parts: 'x' is not valid ..."),
    ("model.parts.tensor_plan={a:upwise}", "model.parts.tensor_plan: ... is not valid ..."),
])  # fmt: skip
def test_parts_of_a_wrong_kind_are_refused_with_their_key(word: str, says: str, tmp_path: Path) -> None:
    (problem,) = checked_line([word, f"run.root={tmp_path}"]).problems
    assert str(problem) == Says(says)


def test_parts_are_checked_too_if_the_run_is_finished_since_its_id_does_not_depend_on_them(tmp_path: Path) -> None:
    finished(*TINY, "trainer.max_epochs=1", root=tmp_path)
    assert "model.parts.blocks: 0.5 is not valid" in refused(*TINY, "trainer.max_epochs=1", "model.parts.blocks=0.5")
