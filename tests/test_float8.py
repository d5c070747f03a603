"""precision=float8: refused where it cannot be, and which layers it converts. These tests run it on no GPU: benchmarks/gpu.sh does."""

import importlib.util

import pytest
import torch
from torch import nn

from framework.config.launch import LaunchSection
from framework.config.schema import PrecisionSection
from framework.modules import float8
from framework.modules.float8 import convert_linear, float8_fault, multiply_in_float8
from framework.preflight.rules import float8_has_its_devices
from framework.runtime.exits import Unfit
from models.gpt import GPT
from tests.harness import Says, refused
from tests.test_conformance import MODELS

CUDA = torch.device("cuda", 0)


def test_a_cpu_is_refused_before_the_start() -> None:
    assert refused(*MODELS["gpt, tied"], "precision=float8", "device=cpu") == Says("precision: float8 ... 8.9 ... (bf16)")


def test_layers_cut_over_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.modules.float8.float8_fault", lambda devices: None)
    line = [*MODELS["gpt, tied"], "precision=float8", "parallel=tensor", "launch.nproc_per_node=2"]
    assert refused(*line) == Says("precision: float8 ... parallel cuts linear layers ... (bf16)")


def test_the_launcher_does_not_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no process forked from it, such as those that try out an optimizer, would CUDA work then."""

    def refuse() -> None:
        raise AssertionError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(float8, "missing", lambda extra: [])
    sections = {
        "precision": PrecisionSection(name="float8"),
        "device": "auto",
        "parallel": {},
        "launch": LaunchSection.model_construct(kind="local"),
    }
    assert not list(float8_has_its_devices(**sections))
    monkeypatch.setattr(float8, "missing", lambda extra: ["torchao"])
    assert list(float8_has_its_devices(**sections))


@pytest.mark.parametrize(("capability", "has_torchao", "why"), [((8, 0), True, "older than"), ((9, 0), False, "not installed"),
                                                                ((9, 0), True, None)])  # fmt: skip
def test_an_old_gpu_and_a_missing_package_are_said(
    capability: tuple[int, int], has_torchao: bool, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(float8, "missing", lambda extra: [] if has_torchao else ["torchao"])
    fault = float8_fault([CUDA])
    assert (fault is None) if why is None else (fault is not None and why in fault)


def test_a_process_refuses_devices_that_cannot() -> None:
    convert_linear(nn.Linear(2, 2), to=None, devices=[torch.device("cpu")])
    with pytest.raises(Unfit, match=r"precision: float8, but it needs a CUDA device.*precision=bf16"):
        convert_linear(nn.Linear(2, 2), to="float8", devices=[torch.device("cpu")])


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_the_layers_of_blocks_are_converted_with_their_names_and_weights() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=32, seq_len=8, dim=16, num_layers=2, num_heads=2, tie_embeddings=True)
    model.layers[1].mlp.up = nn.Linear(16, 24)  # no multiple of 16
    model.layers[1].mlp.down = nn.Linear(24, 16)
    before = dict(model.named_parameters(remove_duplicate=False))
    names = multiply_in_float8(model, emulate=True)
    kinds = ("attention.key", "attention.out", "attention.query", "attention.value")
    assert names == [*(f"layers.0.{name}" for name in (*kinds, "mlp.down", "mlp.up")), *(f"layers.1.{name}" for name in kinds)]
    assert {name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"} == set(names)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(0, 32, (2, 8))).float().square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in after.values())
