"""Compiling a model's blocks, and recomputing their activations in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.modules.structure import blocks_of


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's blocks and run their forward again in the backward pass: memory for time.

    Wraps the blocks' `forward`, not the blocks: parameter names stay the model's own.
    """
    for block in blocks_of(model):
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]  # that is the purpose


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def has_compiler() -> bool:
    """Return whether torch.compile finds the C++ compiler (`CXX`, else g++) without which it fails at the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_blocks(model: nn.Module) -> None:
    """Compile the model's blocks (or the whole, if it has none) in place: names stay, and equal blocks compile once."""
    _without_caches()
    for block in blocks_of(model) or [model]:
        # not block.compile(): it does nothing, without a word, for torch's own modules, such as nn.Sequential
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def _without_caches() -> None:
    """Have torch.compile read nothing that an earlier process left: pickles, in a folder of a guessable name in /tmp."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # not torch.compiler.config.force_disable_caches, which warns in every process
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.automatic_dynamic_local_pgo = False
