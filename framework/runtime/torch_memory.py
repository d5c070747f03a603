"""More names of torch that are not public, for a model's tensors and their memory (see torch_internals.py)."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@contextmanager
def as_one_operation(put_off: Callable[[Any, Tensor, tuple[Any, ...], dict[str, Any]], bool]) -> Iterator[None]:
    """Offer `put_off` the initialisations of torch that read their random numbers. If it returns True, the call must wait."""

    def offered(function: Any) -> Any:
        @functools.wraps(function)
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return tensor if put_off(function, tensor, args, kwargs) else function(tensor, *args, **kwargs)

        return run

    names = [name for name in ("_no_grad_trunc_normal_", "orthogonal_") if hasattr(nn.init, name)]
    originals = {name: getattr(nn.init, name) for name in names}
    for name, function in originals.items():
        setattr(nn.init, name, offered(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(nn.init, name, function)


HeldMemory = StorageWeakRef  # keeps the number of a tensor's memory from reuse, but does not keep the memory


def memory_of(tensor: Tensor) -> int:
    """Return the number of a tensor's memory, which is the same for views. Return 0 if the tensor has no memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, ValueError):  # a sparse tensor, or a tensor of a lazy module
        return 0


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
