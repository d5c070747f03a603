"""A model's first weights: rank 0 builds the model, and sends each rank the part that its strategy keeps.

The other ranks build the model with parameters on the "meta" device, which take no memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.buckets import broadcast_all, buckets_of
from framework.modules.tensors import local
from framework.runtime.torch_internals import shard_offsets


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to "meta" when a module registers it. Buffers and other tensors of a constructor stay as they are."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not nn.parameter.is_lazy(parameter):
            _to_meta(parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(make: Callable[[], Any], *, on_meta: bool) -> Any:
    """Return the result of `make`; of a module, the parameters are on "meta" if asked for.

    A constructor that reads its parameters does not run on "meta". Then it runs as it is, and the numbers are dropped.
    """
    if not on_meta:
        return make()
    states = torch.get_rng_state()
    try:
        with parameters_on_meta():
            return make()
    except Exception:  # a user's constructor may raise anything
        torch.set_rng_state(states)
        module = make()
        if isinstance(module, nn.Module):
            _release_parameters(module)
            for parameter in nn.Module.parameters(module):
                _to_meta(parameter)
        return module


def _release_parameters(module: nn.Module) -> None:
    """Drop what refers to a module's parameters, which could not be swapped.

    Recurrent layers have weak references; `fill` makes new ones. A tensor that a hook computes from parameters before each
    forward (pruning, weight_norm) has them in its graph.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = []
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(part)[name] = value.detach()


def _to_meta(parameter: nn.Parameter) -> Tensor:
    """Turn a parameter into one without numbers; it stays the same object. Return its numbers."""
    numbers = parameter.data
    if not parameter.is_meta:
        empty = nn.Parameter(torch.empty_like(numbers, device="meta"), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
    return numbers


@dataclass
class _Aside:
    """The tensors of a whole model, in the same order on all ranks, and on rank 0 their numbers."""

    kinds: dict[str, tuple[torch.Size, torch.dtype]]
    first_name: dict[str, str]  # of a tensor with several names
    numbers: dict[str, Tensor]


_ASIDE: WeakKeyDictionary[nn.Module, _Aside] = WeakKeyDictionary()


def put_aside(model: nn.Module) -> None:
    """Leave a model's parameters without numbers until `fill`; rank 0 keeps the numbers. Not collective."""
    _release_parameters(model)
    named, first = named_tensors(model), dict[int, str]()
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items() if first[id(tensor)] == name}
    numbers = {name: _to_meta(value) if isinstance(value := named[name], nn.Parameter) else value for name in kinds}
    if dist.is_initialized() and dist.get_rank() > 0:
        numbers.clear()
    _ASIDE[model] = _Aside(kinds, {name: first[id(tensor)] for name, tensor in named.items()}, numbers)


@torch.no_grad()
def fill(
    model: nn.Module, *, device: torch.device, parameters_on: torch.device | None = None, stages: Sequence[nn.Module] = ()
) -> None:
    """Move a model to a device (its parameters to `parameters_on`, if given), and fill in rank 0's numbers; of a shard, a part.

    Call this after the model is cut, and before other code refers to its tensors, because they are replaced. `stages` hold
    modules of the model too, and may be sharded. Collective.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # also keeps the old tensor, so that no other gets its id

    def there(tensor: Tensor) -> Tensor:
        target = (parameters_on if isinstance(tensor, nn.Parameter) else None) or device
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor, torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)
        return moved[id(tensor)][1]

    replace_tensors(model, there, stages=stages)
    if (aside := _ASIDE.pop(model, None)) is None:
        return
    targets = {aside.first_name[name]: tensor for name, tensor in named_tensors(model).items()}
    shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in aside.kinds.items()}
    names = {id(tensor): name for name, tensor in shapes.items()}
    is_source, is_alone = bool(aside.numbers), not dist.is_initialized() or dist.get_world_size() == 1
    for bucket in buckets_of(shapes.values()):
        there_now = [
            aside.numbers.pop(names[id(t)]).to(device) if is_source else torch.empty_like(t, device=device) for t in bucket
        ]
        if not is_alone:
            broadcast_all({0: there_now})
        for like, whole in zip(bucket, there_now):
            if (target := targets.get(names[id(like)])) is not None:
                local(target).copy_(whole[_place(target)])


def _place(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of a whole tensor that this rank has of it; empty: all of it."""
    if not hasattr(tensor, "device_mesh"):
        return ()
    return tuple(slice(at, at + size) for at, size in zip(shard_offsets(tensor), local(tensor).shape))


def replace_tensors(module: nn.Module, change: Callable[[Tensor], Tensor], *, stages: Sequence[nn.Module] = ()) -> None:
    """Replace a model's parameters and buffers. `stages` also contain modules of the model. Shared tensors stay shared.

    `change` is called for each place that has a tensor. The replacement uses `_apply`, which informs sharded and recurrent
    modules. But `_apply` makes one parameter for each place.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept: list[Tensor] = []  # keeps the tensors alive, so that no other object gets their ids
    for inner in (inner for root in (*stages, module) for inner in root.modules()):
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((inner, name))
                kept.append(tensor)
    for root in (*stages, module):
        root._apply(change)
    for (first, own_name), *others in places.values():
        for inner, name in others:
            setattr(inner, name, getattr(first, own_name))


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers; tied tensors have an entry for each of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
