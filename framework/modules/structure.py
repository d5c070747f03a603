"""A model's random draws and couplings between samples, and the changes that are made before training."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from framework.modules.parts import nearest_name
from framework.runtime.torch_compiler import compile_into
from framework.runtime.torch_internals import BATCH_NORMS, DROPOUTS


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that normalise over the samples of a micro-batch."""
    return [layer for layer in model.modules() if isinstance(layer, BATCH_NORMS)]


def only_dropouts(unit: nn.Module) -> list[nn.Module] | None:
    """Return a unit's dropout layers, if it consists of torch's own layers and draws nowhere else; otherwise None."""
    layers = [module for module in unit.modules() if not isinstance(module, DROPOUTS)]
    is_torchs = all(type(layer).__module__.startswith("torch.nn.modules.") for layer in layers)
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in unit.modules())
    if not is_torchs or has_hooks or any(isinstance(layer, _RANDOM) for layer in layers):
        return None
    return [module for module in unit.modules() if isinstance(module, DROPOUTS)]


_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, nn.RNNBase)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode within the context, and restore the mode of each of its modules afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        if modes[model]:
            model.train()  # call it, because an author may have overridden it
        for module, is_training in modes.items():
            module.training = is_training


# --- changes


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match one of the patterns (`*` and `?`, over the whole name).

    For a tied weight, any of its names counts. ValueError for a pattern that matches no name, and if no parameter can be
    trained.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ValueError(f"{pattern!r} matches no parameter of the model ({_expected(pattern, model)})")
        for name in matching:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"{', '.join(patterns)}: every parameter is frozen, and nothing is left to train")


def _expected(pattern: str, model: nn.Module) -> str:
    of_modules = [
        f"{name}.*" for name, module in model.named_modules() if name and any(True for _ in nn.Module.parameters(module))
    ]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if f"{pattern}.*" in of_modules:
        return f"did you mean {pattern}.*?"
    return nearest_name(pattern, [*of_modules, *names])


def compile_blocks(units: Sequence[nn.Module], *, folder: Path, mode: str | None, dynamic: bool | None) -> None:
    """Compile a model's blocks, or the whole model, in place: names do not change, and equal blocks are compiled once.

    Compiled code is stored below `folder`, where a restart and other runs find it. With `dynamic` False, each shape is compiled
    separately: with one program for any shape, another number of processes may compute with another program.
    """
    compile_into(folder, num_versions=8 * (1 + len(units)))
    for block in units:
        # not block.compile(): for torch's own modules, such as nn.Sequential, it silently does nothing
        block.forward = torch.compile(block.forward, mode=mode, dynamic=dynamic)  # type: ignore[method-assign]


def switch_off_dropout(model: nn.Module) -> None:
    """Set dropout to 0 in a model that will not be trained, so that no strategy refuses it because of random draws."""
    for layer in model.modules():
        if isinstance(layer, DROPOUTS):
            layer.p = 0.0


def names_of_trained(module: nn.Module) -> list[str]:
    """Return the names of the parameters that require a gradient."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]
