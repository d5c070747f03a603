"""A model without numbers, which are filled in after its strategy has cut it: a rank holds only its own numbers."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from framework.modules.draws import LaterDraws, fills_its_memory
from framework.modules.tensors import local
from framework.runtime.memory import give_back_freed
from framework.runtime.torch_internals import shard_offsets
from framework.runtime.torch_memory import memory_of, replace_tensors

Strategy = TypeVar("Strategy", bound=Callable[..., object])
Place = tuple[slice, ...]  # of a part in its tensor; empty: the whole tensor
Origin = Callable[[Place], Tensor]  # returns a part of a tensor, on the CPU; called once


class FirstWeights:
    """The origins of the first numbers of a model's parameters: `draws`, unless `give` has set another origin."""

    def __init__(self, module: nn.Module, draws: LaterDraws) -> None:
        """Leave the module's parameters without memory, on "meta". Draw buffers and tensors that share memory immediately."""
        named = named_tensors(module)
        first_names: dict[int, str] = {}
        for name, tensor in named.items():
            first_names.setdefault(id(tensor), name)
        uses = Counter(memory_of(named[name]) for name in first_names.values())
        self._first_name = {name: first_names[id(tensor)] for name, tensor in named.items()}
        self._origins: dict[str, Origin] = {}
        emptied: dict[int, Tensor] = {}
        for name in first_names.values():
            tensor = named[name]
            is_alone = uses[memory_of(tensor)] == 1 and fills_its_memory(tensor)
            if isinstance(tensor, nn.Parameter) and draws.holds(tensor) and is_alone:
                self._origins[name] = _Drawn(draws, tensor.detach(), name)
                emptied[id(tensor)] = torch.empty_like(tensor, device="meta")
            else:
                draws.draw(tensor, name)
        replace_tensors(module, lambda tensor: emptied.get(id(tensor), tensor))
        before = {name: weakref.ref(named[name]) for name in self._origins}
        del named, tensor
        for name, reference in before.items():  # the author has kept the parameter elsewhere, for example in a list: fill it
            if (kept := reference()) is not None:
                draws.draw(kept, name)
        draws.draw_rest(but=[origin.tensor for origin in self._origins.values() if isinstance(origin, _Drawn)])

    def give(self, name: str, origin: Origin) -> None:
        """Let a tensor, by any of its names, get its numbers from an origin."""
        self._origins[self._first_name[name]] = origin

    def take(self, name: str) -> Origin:
        """Return the origin of a tensor's numbers, and forget it."""
        return self._origins.pop(self._first_name[name])


@dataclass
class _Drawn:
    """A tensor that still has to be drawn, by this name."""

    draws: LaterDraws
    tensor: Tensor
    name: str

    def __call__(self, place: Place) -> Tensor:
        return self.draws.part(self.tensor, self.name, place)


_FIRST: WeakKeyDictionary[nn.Module, FirstWeights] = WeakKeyDictionary()


def build_drawn(make: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Return a model with its numbers; each tensor is drawn with its name as key. Return other objects unchanged."""
    draws = LaterDraws(seed)
    with draws:
        module = make()
    if not isinstance(module, nn.Module):
        return module
    for name, tensor in named_tensors(module).items():
        draws.draw(tensor, name)
    draws.draw_rest()
    return module


def build_empty(make: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Return the same model as far as possible without numbers; `fill` later gives it the same numbers."""
    draws = LaterDraws(seed)
    with draws:
        module = make()
    if isinstance(module, nn.Module):
        _FIRST[module] = FirstWeights(module, draws)
    return module


def first_weights(module: nn.Module) -> FirstWeights | None:
    """Return the origins of the numbers of a model without numbers; None if the model has its numbers."""
    return _FIRST.get(module)


def fills(strategy: Strategy) -> Strategy:
    """Mark a strategy that accepts a model without numbers, and fills it after the model is cut."""
    strategy.fills = True  # type: ignore[attr-defined]
    return strategy


@torch.no_grad()
def fill(
    model: nn.Module, *, device: torch.device, parameters_on: torch.device | None = None, stages: Sequence[nn.Module] = ()
) -> None:
    """Move a model to a device (its parameters to `parameters_on`, if given) and fill in its numbers; of a shard, this rank's.

    Call this after the model is cut, and before other code refers to its tensors, because they are replaced. `stages` hold
    modules of the model too, and may be sharded. Not collective.
    """
    weights = _FIRST.pop(model, None)
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    filled: dict[int, Tensor] = {}
    kept = [0]  # bytes of whole tensors that the C library may have kept

    def with_numbers(tensor: Tensor) -> Tensor:
        there = (parameters_on if isinstance(tensor, nn.Parameter) else None) or device
        if not tensor.is_meta:
            return tensor.to(there)
        if id(tensor) not in filled:
            assert weights is not None
            filled[id(tensor)] = new = torch.empty_like(tensor, device=there)
            local(new).copy_(weights.take(names[id(tensor)])(_place(tensor)))
            kept[0] += tensor.nbytes
            if kept[0] > _MOST_KEPT:
                kept[0] = 0
                give_back_freed()
        return filled[id(tensor)]

    replace_tensors(model, with_numbers, stages=stages)


_MOST_KEPT = 256 << 20


def _place(tensor: Tensor) -> Place:
    if not hasattr(tensor, "device_mesh"):
        return ()
    return tuple(slice(at, at + size) for at, size in zip(shard_offsets(tensor), local(tensor).shape))


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers; tied tensors have an entry for each of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
