"""What every architecture promises, for each option of conf/model, and what single architectures promise besides."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import models.gpt
from framework.tasks.outputs import main_output
from models.cnn import CNN
from models.gpt import GPT, rotate
from models.mlp import MLP
from models.resnet import ResNet
from models.torchvision import TorchvisionClassifier
from models.vit import ViT

CONF = Path(__file__).parents[2] / "conf" / "model"
OPTIONS = sorted(path.stem for path in CONF.glob("*.yaml"))
FROM_DATA = {"num_classes": 10, "in_channels": 1, "image_size": 8, "vocab_size": 17, "seq_len": 12}
COUPLES_SAMPLES = {"torchvision"}  # its default, resnet18, has BatchNorm as published
WITHOUT_BLOCKS = {"torchvision"}  # foreign module trees have no common unit


def arguments(option: str) -> dict[str, Any]:
    """Return the YAML's arguments, with what follows from the data filled in."""
    node = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    del node["_target_"]
    return {key: FROM_DATA[key] if value is None else value for key, value in node.items()}


def constructor(option: str) -> Callable[..., Any]:  # the YAML decides the class
    module, name = yaml.safe_load((CONF / f"{option}.yaml").read_text())["_target_"].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def build(option: str, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return constructor(option)(**arguments(option))


def samples(option: str, *, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if "vocab_size" in arguments(option):
        return torch.randint(FROM_DATA["vocab_size"], (count, FROM_DATA["seq_len"]), generator=generator)
    return torch.randn(count, 1, 8, 8, generator=generator, dtype=dtype)


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_have_one_row_per_sample_and_one_column_per_class(option: str) -> None:
    logits = main_output(build(option)(samples(option, count=3)))
    assert logits.shape == ((3, 12, 17) if option in ("gpt", "moe") else (3, 10))
    assert logits.isfinite().all()


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_reach_every_parameter(option: str) -> None:
    model = build(option)
    main_output(model(samples(option, count=4))).square().sum().backward()
    without_gradient = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without_gradient == []


@pytest.mark.parametrize("option", OPTIONS)
def test_meta_construction_has_the_same_names_and_shapes(option: str) -> None:
    with torch.device("meta"):
        on_meta = build(option).state_dict()
    on_cpu = build(option).state_dict()
    assert all(tensor.is_meta for tensor in on_meta.values())
    assert {k: v.shape for k, v in on_meta.items()} == {k: v.shape for k, v in on_cpu.items()}


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - COUPLES_SAMPLES))
def test_logits_of_a_sample_do_not_depend_on_the_other_samples(option: str) -> None:
    model = build(option).double()
    batch = samples(option, count=4, dtype=torch.float64)
    alone = torch.cat([main_output(model(sample[None])) for sample in batch])
    torch.testing.assert_close(main_output(model(batch)), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
def test_forward_in_training_draws_no_random_numbers_by_default(option: str) -> None:
    model, batch = build(option), samples(option, count=2)
    before = torch.get_rng_state()
    model(batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - WITHOUT_BLOCKS))
def test_blocks_are_the_children_of_layers_in_order(option: str) -> None:
    model = build(option)
    assert [id(block) for block in model.blocks()] == [id(layer) for layer in model.layers]
    assert len(model.blocks()) >= 2


@pytest.mark.parametrize("size", [4, 8, 28, 32])
def test_cnn_takes_images_of_any_size(size: int) -> None:
    model = CNN(num_classes=10, in_channels=3, image_size=size, channels=[8, 12, 16])
    assert model(torch.randn(2, 3, size, size)).shape == (2, 10)


@pytest.mark.parametrize(("depth", "num_parameters"), [(18, 11689512), (34, 21797672), (50, 25557032), (101, 44549160)])
def test_resnet_has_the_published_number_of_parameters(depth: Any, num_parameters: int) -> None:
    with torch.device("meta"):
        model = ResNet(num_classes=1000, in_channels=3, depth=depth, stem="imagenet", norm="batch")
    assert sum(p.numel() for p in model.parameters()) == num_parameters


def test_zero_init_of_the_last_norm_makes_each_residual_zero() -> None:
    model = ResNet(num_classes=10, in_channels=3, zero_init_last_norm=True)
    assert not model.layers[0].get_submodule("residual")(torch.randn(2, 64, 8, 8)).any()


def test_vit_depends_on_where_a_patch_is() -> None:
    model = ViT(num_classes=10, in_channels=1, image_size=8)
    image = samples("vit", count=1)
    moved = image.roll(4, dims=3)
    assert (model(image) - model(moved)).abs().max() > 1e-4


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=17, seq_len=12).double()


def test_gpt_logits_do_not_depend_on_later_tokens(gpt: GPT) -> None:
    tokens = samples("gpt", count=2)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    difference = (gpt(tokens) - gpt(changed)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 1e-6


def test_gpt_depends_on_the_order_of_earlier_tokens(gpt: GPT) -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert (gpt(tokens) - gpt(swapped))[:, -1].abs().max() > 1e-6


def test_rotary_attention_depends_on_relative_position_only() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(32, dtype=torch.float64).expand(1, 1, 20, 32) for _ in range(2))
    scores = (rotate(query) @ rotate(key).transpose(-1, -2))[0, 0]
    for distance in range(20):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert scores[:, 0].unique().numel() == 20


def test_rotary_positions_are_accurate_in_the_dtype_of_use() -> None:
    ones = torch.ones(1, 1, 500, 2, dtype=torch.float64)  # one pair, which turns by one radian per token
    angles = torch.arange(500, dtype=torch.float64)
    expected = torch.stack([angles.cos() - angles.sin(), angles.cos() + angles.sin()], dim=-1)
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        rotated = rotate(ones.to(dtype))[0, 0]
        assert rotated.dtype == dtype
        torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=tolerance)


def test_a_compiler_is_given_the_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute them, in 64 bits, for every number of each query and key: an eighth of GPT-2's step on an H100."""
    graphs = list[str]()

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    monkeypatch.setattr(models.gpt, "_ROTARY_TABLES", {})
    gpt = GPT(vocab_size=5, seq_len=8, dim=8, num_layers=1, num_heads=2)
    x = torch.randn(2, 8, 8)
    compiled = torch.compile(gpt.layers[0], backend=keep, dynamic=False)(x)
    torch.testing.assert_close(compiled, gpt.layers[0](x))
    (code,) = graphs
    assert "scaled_dot_product_attention" in code
    assert not {"cos", "sin", "arange", "outer"} & set(re.findall(r"\.(\w+)\(", code)), code


def test_the_angles_are_computed_once_for_all_layers_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = [], models.gpt.rotary_table
    monkeypatch.setattr(models.gpt, "_ROTARY_TABLES", {})
    monkeypatch.setattr(models.gpt, "rotary_table", lambda *kind: made.append(kind) or original(*kind))
    gpt = GPT(vocab_size=5, seq_len=8, dim=8, num_layers=3, num_heads=2)
    with torch.inference_mode():
        gpt(torch.zeros(2, 8, dtype=torch.long))
    assert len(made) == 6, "tensors of inference mode are no use in training"
    with FakeTensorMode(allow_non_fake_inputs=True):
        rotate(torch.zeros(1, 1, 8, 4))
    assert not models.gpt._ROTARY_TABLES
    for length in (8, 5, 8, 5):
        gpt(torch.zeros(2, length, dtype=torch.long)).sum().backward()
    assert [kind[0] for kind in made[7:]] == [8, 5]
    with FakeTensorMode() as fake:  # as export does, after a run
        rotate(fake.from_tensor(torch.zeros(1, 1, 8, 4)))
    for length in range(1, 40):
        rotate(torch.zeros(1, 1, length, 4))
    assert len(models.gpt._ROTARY_TABLES) <= 16


def test_gpt_residual_projections_begin_smaller_with_depth() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=512, seq_len=8, num_layers=8)
    std = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert std["embedding.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["head.weight"] == pytest.approx(0.02, rel=0.05)
    for index in range(8):
        assert std[f"layers.{index}.mlp.up.weight"] == pytest.approx(0.02, rel=0.05)
        assert std[f"layers.{index}.mlp.down.weight"] == pytest.approx(0.02 / 4, rel=0.05)
        assert std[f"layers.{index}.attention.out.weight"] == pytest.approx(0.02 / 4, rel=0.05)


def test_tied_embeddings_are_one_tensor() -> None:
    tied, untied = (GPT(vocab_size=17, seq_len=12, tie_embeddings=tie) for tie in (True, False))
    assert tied.head.weight is tied.embedding.weight
    count_tied, count_untied = (sum(p.numel() for p in model.parameters()) for model in (tied, untied))
    assert count_untied - count_tied == 17 * 128


def test_torchvision_repeats_one_channel_to_three() -> None:
    model = TorchvisionClassifier(num_classes=10, in_channels=1).eval()
    image = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(model(image), model(image.repeat(1, 3, 1, 1)), rtol=0, atol=0)


IMAGES = {"num_classes": 10, "in_channels": 1}


@pytest.mark.parametrize(
    ("construct", "given", "message"),
    [
        (MLP, IMAGES | {"image_size": 8, "num_layers": 0}, r"num_layers=0: .*at least 1"),
        (CNN, IMAGES | {"image_size": 8, "channels": []}, r"channels=\[\]: .*one width per block"),
        (CNN, IMAGES | {"image_size": 8, "channels": [8], "norm": "layer"}, r"norm='layer' .*group, batch, none"),
        (ResNet, IMAGES | {"depth": 20}, r"depth=20 .*18, 34, 50, 101"),
        (ResNet, IMAGES | {"stem": "mnist"}, r"stem='mnist' .*cifar, imagenet"),
        (ResNet, IMAGES | {"norm": "none"}, r"norm='none' .*group, batch"),
        (ViT, IMAGES | {"image_size": 28, "patch_size": 8}, r"patch_size=8: .*image_size=28; choose a divisor"),
        (ViT, IMAGES | {"image_size": 8, "dim": 30}, r"dim=30 .*num_heads=4.*a multiple of 4"),
        (GPT, {"vocab_size": 17, "seq_len": 12, "dim": 12}, r"dim=12 .*2 \* num_heads=8.*a multiple of 8"),
        (GPT, {"vocab_size": 17, "seq_len": 12, "num_layers": 0}, r"num_layers=0: .*at least 1"),
        (TorchvisionClassifier, {"num_classes": 10, "in_channels": 4}, r"in_channels=4: .*3 channels, or 1"),
        (TorchvisionClassifier, IMAGES | {"name": "resnet19"}, r"name='resnet19' .*resnet18"),
    ],
)
def test_bad_combination_names_the_values_and_the_remedy(
    construct: Callable[..., nn.Module], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        construct(**given)
