"""What a model draws and couples, and how it is changed before it is trained."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from framework.modules.parts import nearest_name
from framework.runtime.torch_compiler import compile_into
from framework.runtime.torch_internals import BATCH_NORMS, DROPOUTS


def batch_dependent_layers(model: nn.Module) -> list[str]:
    """Return the kinds of layers, sorted, that couple the samples of a micro-batch or draw randomness for it."""
    return sorted({type(layer).__name__ for layer in model.modules() if isinstance(layer, BATCH_NORMS) or _draws(layer)})


def has_dropout(model: nn.Module) -> bool:
    return any(map(_draws, model.modules()))


def _draws(layer: nn.Module) -> bool:
    return isinstance(layer, DROPOUTS) and layer.p > 0


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and each of its modules back into its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    yield
    if modes[model]:
        model.train()  # an author may have overridden it
    for module, is_training in modes.items():
        module.training = is_training


# --- changes


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Do not train the parameters that match one of the patterns (`*` and `?`, over the whole name).

    Any name of a tied weight counts. ValueError for a pattern that matches no name, and if nothing is left to train.
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
    of_modules = [f"{name}.*" for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if f"{pattern}.*" in of_modules:
        return f"did you mean {pattern}.*?"
    return nearest_name(pattern, [*of_modules, *names])


def compile_blocks(units: Sequence[nn.Module], *, folder: Path) -> None:
    """Compile a model's blocks, or the whole of it, in place: names stay, and equal blocks compile once.

    What is compiled stays in `folder`, where a restart finds it. Each shape is compiled for itself: with a shape for any size
    another number of processes would compute by another program.
    """
    compile_into(folder, num_versions=8 * (1 + len(units)))
    for block in units:
        # not block.compile(): for torch's own modules, such as nn.Sequential, it silently does nothing
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]


def switch_off_dropout(model: nn.Module) -> None:
    """Remove dropout from a model that will not be trained: then no strategy refuses it for its random draws."""
    for layer in model.modules():
        if isinstance(layer, DROPOUTS):
            layer.p = 0.0


def names_of_trained(module: nn.Module) -> list[str]:
    """Return the names of the parameters that want a gradient."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]
