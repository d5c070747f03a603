"""Weights from Hugging Face's layout and back: export as a folder that from_pretrained loads, LoRA whose adapter alone is exported."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from framework import load
from tests.harness import Ended, Says, after_each, assert_same_bits, command, finished, once, refused, together
from tests.test_export import copied
from tests.test_init_from import own_conf
from tests.test_resume import after_step, crash
from tests.test_zoo import DATA
from tests.zoo import lora, make

RUN = ["global_batch_size=12", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.log_every=1",
       "checkpoint.every=2", "dataset=synthetic", "dataset.num_train=28", "dataset.num_val=6", "dataset.num_test=6",
       "optimizer.lr=0.05", "scheduler.warmup_steps=1"]  # fmt: skip
LM, IMAGES = DATA["tokens"], DATA["images"]
EXPORT = ["mode=export", "export.formats=[huggingface]"]


class Logits(nn.Module):
    """What an adapter class often is: a library's model, and which of its outputs count."""

    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.inner = make(name)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).logits


class Scaled(Logits):
    """As Logits, with a parameter of its own, for which no folder of the library has a place."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name=name)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens)


def unfrozen() -> nn.Module:
    """LoRA of which the last layer of the base is trained too, unknown to peft."""
    model = lora()
    model.get_parameter("base_model.model.transformer.ln_f.weight").requires_grad_(True)
    return model


def zoo(name: str, target: str = "tests.zoo.make") -> list[str]:
    return [f"model._target_={target}", f"model.name='{name}'"]


KINDS = {
    "gpt2": [*LM, *zoo("hf gpt2")],  # its head is tied to its embedding
    "vit": [*IMAGES, *zoo("hf vit"), "trainer.ema_decay=0.5"],
    "wrapped": [*LM, *zoo("hf llama", "tests.test_huggingface.Logits")],
    "scaled": [*LM, *zoo("hf gpt2", "tests.test_huggingface.Scaled")],
    "lora": [*LM, *zoo("peft lora")],
    "unfrozen": [*LM, "model._target_=tests.test_huggingface.unfrozen"],
    "ours": [*IMAGES, "model=mlp"],
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    make("hf gpt2")  # so that the commands need not import the library


def exported(run: Ended, root: Path) -> Path:
    ended = finished(*EXPORT, f"run.dir={run.directory}", root=root)
    assert "outputs within 0 of the model's" in ended.output
    return run.directory / "export" / "huggingface"


def outputs(model: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.eval()(inputs)
    return found if isinstance(found, Tensor) else found.logits


def inputs_of(kind: str) -> Tensor:
    return torch.randn(3, 3, 16, 16) if kind == "vit" else torch.randint(0, 32, (3, 12))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "vit", "wrapped"])
def test_from_pretrained_loads_what_was_exported(kind: str, tmp_path: Path) -> None:
    import transformers

    trained = once(*RUN, *KINDS[kind])
    folder = exported(trained, tmp_path / "none")
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json"} <= names and ("generation_config.json" in names) == (kind != "vit")
    automatic = transformers.AutoModelForImageClassification if kind == "vit" else transformers.AutoModelForCausalLM
    model, report = automatic.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    expected, inputs = load(trained.directory), inputs_of(kind)
    assert torch.equal(outputs(model, inputs), outputs(expected, inputs))
    assert {path.name for path in folder.parent.iterdir()} == {"huggingface"}


# --- LoRA


@pytest.mark.slow
def test_an_adapter_on_a_base_from_a_hub_trains_resumes_and_is_exported_alone(tmp_path: Path) -> None:
    import peft

    torch.manual_seed(1)
    base = make("hf gpt2")
    base.save_pretrained(tmp_path / "base")
    entry = {
        "file": str(tmp_path / "base"),
        "rename": {r"\.c_attn\.": ".c_attn.base_layer."},
        "prefix": "base_model.model.",
        "strict": True,
    }
    node = {"_target_": "tests.zoo.make", "name": "peft lora", "init_from": [entry]}
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "lora.yaml").write_text(json.dumps(node))
    line = [*RUN, *LM, "model=lora"]
    whole = finished(*line, root=tmp_path / "whole", before=own_conf(tmp_path))
    assert "training 384 of " in whole.output  # three layers, each of two matrices: 2 x 16 and 48 x 2
    killed = command(*line, root=tmp_path / "runs", before=together(own_conf(tmp_path), after_step(3, crash)))
    assert killed.code != 0
    again = finished(*line, root=tmp_path / "runs", before=own_conf(tmp_path))
    assert "continuing from" in again.output
    assert_same_bits(again, whole)
    for name, value in base.state_dict().items():
        there = "base_model.model." + name.replace(".c_attn.", ".c_attn.base_layer.")
        assert torch.equal(whole.weights[there], value), name  # frozen

    folder = exported(whole, tmp_path / "none")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in folder.iterdir()}
    weights = load_file(folder / "adapter_model.safetensors")
    assert sum(value.numel() for value in weights.values()) == 384 and all("lora_" in name for name in weights)
    inputs = inputs_of("lora")
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    expected = outputs(load(whole.directory), inputs)
    assert torch.equal(outputs(model, inputs), expected)
    assert (outputs(base, inputs) - expected).abs().max() > 1e-3


def test_the_names_of_a_base_without_a_prefix_are_refused_with_the_prefix(tmp_path: Path) -> None:
    make("hf gpt2").save_pretrained(tmp_path / "base")
    (line,) = refused(*RUN, *KINDS["lora"], f"model.init_from={tmp_path / 'base'}").splitlines()
    assert line == Says("model.init_from: nothing in base fits this model prefix (is it base_model.model.transformer.h.0.")


# --- what is refused


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("ours", "export.formats: huggingface: MLP has no save_pretrained()"),
        pytest.param("scaled", "export.formats: huggingface: Scaled has no save_pretrained()", marks=pytest.mark.slow),
        ("unfrozen", "export.formats: huggingface: only the adapter base_model.model.transformer.ln_f.weight was trained too"),
    ],
)
def test_what_has_no_folder_is_refused_before_anything_is_written(kind: str, line: str, tmp_path: Path) -> None:
    copy = copied(once(*RUN, *KINDS[kind]), tmp_path)
    given = ["mode=export", "export.formats=[safetensors,huggingface]", f"run.dir={copy}"]
    refused = command(*given, root=tmp_path / "none")
    assert refused.code == 78, refused.output
    assert any(said.rpartition("ERROR: ")[2] == Says(line) for said in refused.output.splitlines()), refused.output
    assert not (copy / "export").exists()


def test_a_folder_that_reads_as_something_else_is_not_kept(tmp_path: Path) -> None:
    def spoil() -> None:
        import transformers

        def change(_: Any, folder: str, **__: Any) -> None:
            config = json.loads((Path(folder) / "config.json").read_text())
            (Path(folder) / "config.json").write_text(json.dumps(config | {"scale_attn_weights": False}))

        after_each(transformers.GPT2LMHeadModel, "save_pretrained", change)

    copy = copied(once(*RUN, *KINDS["gpt2"]), tmp_path)
    refused = command(*EXPORT, f"run.dir={copy}", root=tmp_path / "none", before=spoil)
    assert refused.code == 78 and "export.formats: huggingface: the outputs differ from the model's by " in refused.output
    assert not list((copy / "export").iterdir())
    shutil.rmtree(copy)
