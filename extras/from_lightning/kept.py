"""What a LightningModule keeps besides its parameters and buffers, and a context that changes nothing of a module."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """Restore, after the context, a module's tensors, and the numbers, texts and lists among its own attributes."""
    attributes, lists = plain_attributes(module), lists_of(module)
    tensors = (*nn.Module.parameters(module), *nn.Module.buffers(module))
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    buffers = [(part, dict(part.named_buffers(recurse=False))) for part in module.modules()]
    yield
    for part, own in buffers:
        for name, buffer in own.items():
            setattr(part, name, buffer)
    for tensor, value in values:
        tensor.data.copy_(value)
    for name, attribute in attributes.items():
        setattr(module, name, attribute)
    for name, items in lists.items():
        getattr(module, name)[:] = items


def plain_attributes(module: Any) -> dict[str, Any]:
    """Return the numbers and texts among a module's own attributes."""
    own = ((name, value) for name, value in vars(module).items() if name[0] != "_" and name != "training")
    return {name: value for name, value in own if type(value) in (bool, int, float, str)}


def lists_of(module: Any) -> dict[str, list[Any]]:
    """Return copies of the lists among a module's own attributes."""
    return {name: [*value] for name, value in vars(module).items() if name[0] != "_" and type(value) is list}
