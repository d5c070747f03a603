"""Activations that are not kept on the device until the backward pass: they are recomputed, or stored in CPU memory."""

import copy
import functools
import random
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from framework.modules.tensors import local
from framework.runtime.torch_internals import copy_all, is_of

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Recomputed = bool | int | Literal["operations"]

_LEAST_BYTES = 1 << 16  # smaller tensors are not worth a copy


def recompute_activations(blocks: Sequence[nn.Module], *, which: Recomputed) -> None:
    """Keep fewer activations of the blocks, and run their forward again in the backward pass: less memory, more time.

    `which`: True keeps only the blocks' inputs. A number N does the same for every N-th block, starting with the first.
    `operations` also keeps the results of expensive operations and recomputes only cheap ones. Expensive operations are those
    with floating-point operations that torch counts: matrix products, convolutions and attention. Source: Chen et al. 2016;
    Korthikanti et al. 2022, section 5.

    The blocks' `forward` is wrapped, not the blocks, so the parameter names stay the model's own. The second forward reads the
    same buffers and draws the same numbers as the first (checkpoint() itself handles torch's numbers), and does not change
    them.
    """
    every = which if isinstance(which, int) else 1  # True is 1
    for block in blocks[::every]:
        contexts = functools.partial(_twice_the_same, block, keeps_products=which == "operations")
        block.forward = functools.partial(_recomputed, block.forward, contexts)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Contexts], *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward with recomputation. The second call gets lists, mappings and objects as the first got them."""
    before: list[Any] | None = None

    def run(*given: Any, **named: Any) -> Any:
        nonlocal before
        items = [*given, *named.values()]
        if before is None:
            before = _copied([None if isinstance(item, Tensor) else item for item in items], {})
        else:
            items = [new if isinstance(new, Tensor) else held for new, held in zip(items, _copied(before, {}))]
        return forward(*items[: len(given)], **dict(zip(named, items[len(given) :])))

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Return new lists, mappings and objects (such as a cache of keys and values) with the same tensors and modules.

    `known` maps the id of an object to its copy, so that two references to an object stay references to one object.
    """
    if id(value) in known:
        return known[id(value)]
    new: Any
    if isinstance(value, tuple):
        items = [_copied(item, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        known[id(value)] = new = copy.copy(value)
        new[:] = [_copied(item, known) for item in value]
    elif isinstance(value, dict):
        known[id(value)] = new = copy.copy(value)
        new.update({key: _copied(item, known) for key, item in value.items()})
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _SHARED):
        try:
            known[id(value)] = new = copy.copy(value)
        except Exception:  # such an object stays the same object
            return value
        vars(new).update({name: _copied(item, known) for name, item in vars(value).items()})
    return known.get(id(value), value)


_SHARED = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, torch.Generator)


def offload_activations(blocks: Sequence[nn.Module]) -> None:
    """Copy the tensors that the blocks keep for their backward pass to CPU memory, and back when needed: more transfers.

    Call this after `recompute_activations`: for a recomputed block, its inputs are copied. Weights, buffers, small tensors and
    tensors on the CPU are not copied. The bits are the same.
    """
    for block in blocks:
        block.forward = functools.partial(_held_by_cpu, block, block.forward)  # type: ignore[method-assign]


def _held_by_cpu(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    own = [*nn.Module.parameters(block), *block.buffers()]

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        is_on_device = tensor.device.type != "cpu" and local(tensor) is tensor  # a shard is bound to the mesh of its device
        if not is_on_device or tensor.nbytes < _LEAST_BYTES or is_of(tensor, own):
            return tensor.device, tensor
        held = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return tensor.device, held.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, held = packed
        if held.device == device:
            return held
        return torch.empty_like(held, device=device).copy_(held, non_blocking=True)  # on the stream that has filled it

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


@functools.cache
def _takes_long(operation: Any) -> bool:
    from torch.utils.flop_counter import flop_registry

    return operation in flop_registry or getattr(operation, "overloadpacket", None) in flop_registry


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _takes_long(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def _twice_the_same(block: nn.Module, *, keeps_products: bool) -> Contexts:
    """Return the contexts for a block's first forward, which starts immediately, and for each later forward."""
    first, again = create_selective_checkpoint_contexts(_policy) if keeps_products else (nullcontext(), nullcontext())
    return first, _As(_Surroundings(block), inner=again)


class _Surroundings:
    """The state that a block's forward reads besides its arguments: its buffers, and the generators of Python and numpy."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._buffers = [(buffer.data, buffer.clone()) for buffer in block.buffers()]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        copy_all(*([list(column) for column in zip(*self._buffers)] or ([], [])))
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class _As(AbstractContextManager[None]):
    """A context that restores this state inside, and puts the newer state back at its end. It can be entered several times."""

    def __init__(self, then: _Surroundings, *, inner: AbstractContextManager[Any]) -> None:
        self._then, self._inner = then, inner

    def __enter__(self) -> None:
        self._now = _Surroundings(self._then.block)
        self._then.restore()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._now.restore()
