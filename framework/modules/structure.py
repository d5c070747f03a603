"""What a model draws and couples, and how it is changed before it is trained."""

import fnmatch
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.modules.parts import blocks_of, nearest_name
from framework.runtime.torch_compiler import compile_into
from framework.runtime.torch_internals import BATCH_NORMS, DROPOUTS, copy_all


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


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's blocks and run their forward again in the backward pass: memory for time.

    Wraps the blocks' `forward`, not the blocks: parameter names stay the model's own. The second forward reads the buffers
    and draws the numbers that the first one did (checkpoint() itself sees to torch's), and leaves no trace in them.
    """
    for block in blocks_of(model):
        contexts = partial(_twice_the_same, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)  # type: ignore[method-assign]


def _twice_the_same(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the first forward of a block, which begins at once, and each later one."""
    return nullcontext(), _As(_Surroundings(block))


class _Surroundings:
    """What a block's forward reads that is no argument: its buffers, and the generators of Python and numpy; as it is now."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._buffers = [(buffer.data, buffer.clone()) for buffer in block.buffers()]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        copy_all(*([list(column) for column in zip(*self._buffers)] or ([], [])))
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def now(self) -> "_Surroundings":
        return _Surroundings(self._block)


class _As(AbstractContextManager[None]):
    """Makes the surroundings what they were, and puts them back. It may be entered several times."""

    def __init__(self, then: _Surroundings) -> None:
        self._then = then

    def __enter__(self) -> None:
        self._now = self._then.now()
        self._then.restore()

    def __exit__(self, *_: object) -> None:
        self._now.restore()


def compile_blocks(model: nn.Module, *, folder: Path) -> None:
    """Compile the model's blocks (the whole model if it has none) in place: names stay, and equal blocks compile once.

    What is compiled stays in `folder`, where a restart finds it. Each shape is compiled for itself: with a shape for any size
    another number of processes would compute by another program.
    """
    units = blocks_of(model) or [model]
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
