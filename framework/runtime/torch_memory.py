"""More names of torch that are not public: of a model's tensors and their memory (see torch_internals.py)."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@contextmanager
def as_one_operation(put_off: Callable[[Any, Tensor, tuple[Any, ...], dict[str, Any]], bool]) -> Iterator[None]:
    """Offer torch's initialisations that read what they have drawn to `put_off`, whole: if it returns True, they wait."""

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


HeldMemory = StorageWeakRef  # of a tensor's memory, which it does not keep; but no other memory gets its number meanwhile


def memory_of(tensor: Tensor) -> int:
    """Return the number of a tensor's memory, which views share; 0 if it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, ValueError):  # sparse, or of a lazy module
        return 0


def replace_tensors(module: nn.Module, change: Callable[[Tensor], Tensor], *, stages: Sequence[nn.Module] = ()) -> None:
    """Replace a model's parameters and buffers; `stages` have modules of it too. What is shared stays shared.

    `change` is called for each place that has a tensor. Through `_apply`, by which sharded modules and recurrent ones
    learn of it; but that makes a parameter for each place.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept: list[Tensor] = []  # their ids are not given to others meanwhile
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
