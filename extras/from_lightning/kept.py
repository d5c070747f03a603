"""What a LightningModule keeps besides its parameters and buffers, and a context that changes nothing of a module."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric


@contextmanager
def unchanged(module: Any, *, as_saved: bool = False) -> Iterator[None]:
    """Restore, after the context, a module's tensors, and the numbers, texts and lists among its own attributes.

    `as_saved`: restore what a checkpoint holds. This includes the states of metrics, and no buffer that is not persistent.
    """
    attributes, lists, saved = plain_attributes(module), lists_of(module), module.state_dict().keys() if as_saved else ()
    buffers = [
        (part, name, buffer)
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if not as_saved or f"{prefix}.{name}".removeprefix(".") in saved
    ]
    tensors = (*nn.Module.parameters(module), *(buffer for _, _, buffer in buffers))
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    metrics = [part for part in module.modules() if as_saved and isinstance(part, Metric)]
    states = [(metric, metric._copy_state_dict() | {"_update_count": metric._update_count}) for metric in metrics]
    yield
    for part, name, buffer in buffers:
        setattr(part, name, buffer)
    for tensor, value in values:
        tensor.data.copy_(value)
    for name, attribute in attributes.items():
        setattr(module, name, attribute)
    for name, items in lists.items():
        getattr(module, name)[:] = items
    for metric, state in states:
        for name, value in state.items():
            setattr(metric, name, value)


def plain_attributes(module: Any) -> dict[str, Any]:
    """Return the numbers and texts among a module's own attributes."""
    own = ((name, value) for name, value in vars(module).items() if name[0] != "_" and name != "training")
    return {name: value for name, value in own if type(value) in (bool, int, float, str)}


def lists_of(module: Any) -> dict[str, list[Any]]:
    """Return copies of the lists among a module's own attributes."""
    return {name: [*value] for name, value in vars(module).items() if name[0] != "_" and type(value) is list}
