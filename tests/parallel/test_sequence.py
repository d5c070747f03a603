"""Sequence parallelism: between the layers that tensor parallelism cuts, the tokens are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from framework.parallel.sequence import applies, sequence_problems
from framework.parallel.tensor import styles_of
from models.gpt import GPT
from models.vit import ViT
from tests.harness import Says, assert_close, finished, once
from tests.test_conformance import MODELS, RUN, TOKENS

LINE = [*RUN, *MODELS["gpt, tied"], "dataset.seq_len=12"]


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(vocab_size=8, seq_len=8, dim=8, num_layers=2, num_heads=2)
    styles = styles_of(model, num_parts=2)
    assert not sequence_problems(model, styles) and applies(model, styles)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    assert sequence_problems(model, styles) == [Says("sequence=true: needs torch 2.12 ... sequence=false")] and not applies(
        model, styles
    )


def planned(*, vocab_size: int, seq_len: int) -> nn.Module:
    """Return a model of transformers that says how its layers are cut. Its modules get the hidden state by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Planned(LlamaForCausalLM):
        def tensor_plan(self) -> dict[str, str]:
            columns = {f"model.layers.*.{name}_proj": "colwise" for name in ("self_attn.[qkv]", "mlp.gate", "mlp.up")}
            return columns | {f"model.layers.*.{name}_proj": "rowwise" for name in ("self_attn.o", "mlp.down")}

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Planned(LlamaConfig(vocab_size=vocab_size, max_position_embeddings=seq_len, **sizes))


CASES = {
    "a module gets the hidden state by name": (2, [*RUN, *TOKENS, "model=gpt", "model._target_=tests.parallel.test_sequence.planned"]),
    "one block is the first and the last": (2, [*LINE, "model.num_layers=1"]),
    # the 13 tokens of tests/test_conformance.py have no equal parts either
    "one token": (2, [*LINE, "dataset.seq_len=1", "trainer.max_steps=5"]),
    "four processes have 2, 2, 1 and no tokens": (4, [*LINE, "dataset.seq_len=5", "trainer.max_steps=5"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_one_process_does(case: str, tmp_path: Path) -> None:
    ranks, line = CASES[case]
    two = ["parallel=tensor", f"launch.nproc_per_node={ranks}", "parallel.sequence=true"]
    assert_close(finished(*line, *two, root=tmp_path / "runs"), once(*line))


def model(name: str, **options: Any) -> nn.Module:
    sizes = {"dim": 8, "num_layers": 1, "num_heads": 2}
    return GPT(vocab_size=8, seq_len=4, **sizes, **options) if name == "gpt" else ViT(
        image_size=8, in_channels=1, num_classes=2, **sizes)  # fmt: skip


def test_it_is_used_unasked_where_the_model_says_where_tokens_meet() -> None:
    def used(given: nn.Module) -> bool:
        return applies(given, styles_of(given, num_parts=2))

    assert used(model("gpt"))
    assert not used(model("vit"))  # it has the layers, and does not say where tokens meet
