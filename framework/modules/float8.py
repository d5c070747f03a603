"""Linear layers that multiply in 8-bit floating point with torchao: numbers are scaled to fit; sums use more bits."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from framework.modules.parts import blocks_of
from framework.runtime.exits import Unfit
from framework.runtime.problem import install_command, missing

_MULTIPLE = 16  # the kernels need a multiple of this number of features


def float8_fault(devices: Sequence[torch.device]) -> str | None:
    """Return why these devices or this installation do not support float8; None if they do."""
    if any(device.type != "cuda" for device in devices):
        return "it needs a CUDA device of compute capability 8.9 or later"
    old = [device for device in devices if torch.cuda.get_device_capability(device) < (8, 9)]
    if old:
        return f"{torch.cuda.get_device_name(old[0])} is older than compute capability 8.9 (Ada, Hopper)"
    if missing("float8"):
        return f"torchao is not installed ({install_command('float8')})"
    return None


def convert_linear(model: nn.Module, *, to: Literal["float8"] | None, devices: Sequence[torch.device]) -> None:
    """Let a model's linear layers multiply in this type on these devices; None: change nothing. Unfit if they cannot."""
    if to is None:
        return
    if fault := float8_fault(devices):
        raise Unfit(f"precision: float8, but {fault} (precision=bf16)")
    if not multiply_in_float8(model):
        what = f"has no linear layer in its blocks with multiples of {_MULTIPLE} features"
        raise Unfit(f"precision: float8, but {type(model).__name__} {what} (precision=bf16)")


def multiply_in_float8(model: nn.Module, *, emulate: bool = False) -> list[str]:
    """Replace the linear layers in the model's blocks, in place; return their names. Parameters stay, with their names.

    Heads and embeddings are not replaced, because their errors go directly into the loss; nor are layers with a number of
    features that is not a multiple of 16. Each tensor has one scale, from its largest number in this micro-batch. `emulate`
    works on any device, but slowly. Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    inside = {module for block in blocks_of(model) for module in block.modules()}
    fitting = {name for name, layer in model.named_modules() if layer in inside and type(layer) is nn.Linear
               and layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0}  # fmt: skip
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda _, name: name in fitting
    )
    return sorted(fitting)
