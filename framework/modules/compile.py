"""Compiling a model's blocks, and recomputing their activations in the backward pass."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.modules.structure import blocks_of
from framework.runtime.torch_internals import compile_without_caches


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's blocks and run their forward again in the backward pass: memory for time.

    Wraps the blocks' `forward`, not the blocks: parameter names stay the model's own.
    """
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]  # that is the purpose


def compile_blocks(model: nn.Module) -> None:
    """Compile the model's blocks (or the whole, if it has none) in place: names stay, and equal blocks compile once."""
    compile_without_caches()
    for block in blocks_of(model) or [model]:
        # not block.compile(): it does nothing, without a word, for torch's own modules, such as nn.Sequential
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
