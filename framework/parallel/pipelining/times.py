"""The measured time of each link of a chain, for stages of equal time instead of equal operation counts."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.modules.tensors import Tree, call, map_tensors, tensors_in
from framework.modules.trace import copied_with
from framework.parallel.pipelining.chain import Listed
from framework.parallel.pipelining.own_forward import OwnForward
from framework.randomness import generator_states, set_generator_states
from framework.runtime.log import LOGGER

Balance = Literal["operations", "time"]
_NUM_SAMPLES = 8
_REPEATS = 3  # the shortest time counts, because other programs share the machine
_WHOLE = 3  # the time of a forward and backward pass, in times of the forward pass


def agreed_spans(
    chain: Listed | OwnForward, *, owners: Sequence[int], balance: Balance, forward: Forward, world: World
) -> list[range]:
    """Return the numbers of each stage's links. Collective.

    Measured times differ between processes and between starts, so rank 0's times decide. Different cuts at different starts are
    safe, because a cut does not change any result.
    """
    if balance == "operations":
        return chain.spans(chain.costs(forward.example), num_stages=len(owners))
    found, fault = None, None
    if world.rank == 0:
        try:
            found = measured_costs(chain, forward=forward)
        except Exception as error:  # a user's model may raise anything; the other ranks wait
            fault = error
    costs = world.agreement.from_rank_0(found)
    if costs is None:
        if fault is not None:
            LOGGER.warning("parallel.balance: time, but the model cannot be run to measure it (%s): operations are counted",
                           f"{type(fault).__name__}: {fault}")  # fmt: skip
        return chain.spans(chain.costs(forward.example), num_stages=len(owners))
    spans = chain.spans(costs, num_stages=len(owners))
    if found is not None:
        stages = [f"{number} (process {rank}) {sum(costs[link] for link in span) / 1e6:.3g} ms"
                  for number, (span, rank) in enumerate(zip(spans, owners))]  # fmt: skip
        LOGGER.info("pipeline: time of each stage for %d samples, forward and backward: %s", _NUM_SAMPLES, ", ".join(stages))
    return spans


def measured_costs(chain: Listed | OwnForward, *, forward: Forward) -> list[int]:
    """Return the nanoseconds that each link takes forward and backward, for 8 samples of the data's kind.

    A copy of the model runs, so nothing of the model changes, nor do the random draws. The model's exceptions pass through.
    """
    assert forward.example is not None
    states = generator_states(devices=forward.devices)
    try:
        copied, copies = copied_with(chain.model, partial(_cloned, device=forward.device))
        copied.train()
        watch = _Watch(forward)
        inputs = _inputs(forward.example, device=forward.device)
        if isinstance(chain, Listed):
            return watch.in_turn([copies.get(id(link), link) for link in chain.links], inputs)
        return watch.within(copied, [copies[id(block)] for block in chain.blocks], inputs)
    finally:
        set_generator_states(states, devices=forward.devices)


def _cloned(tensor: Tensor, *, device: torch.device) -> Tensor:
    """Return a copy on the device; if a tensor has no numbers, the copy has some (their values do not matter here)."""
    clone = torch.full_like(tensor, 0.01, device=device) if tensor.is_meta else tensor.detach().to(device, copy=True)
    return nn.Parameter(clone, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone


def _inputs(example: Tensor, *, device: torch.device) -> Tensor:
    shape = (_NUM_SAMPLES, *example.shape[1:])
    if not example.is_floating_point():
        return torch.zeros(shape, dtype=example.dtype, device=device)  # the first class, or the first token of any vocabulary
    return torch.rand(shape, dtype=example.dtype, device=device)


class _Watch:
    """A timer for modules, on an idle device."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def in_turn(self, links: list[nn.Module], inputs: Tree) -> list[int]:
        """Time links; each link gets the output of the link before it."""
        times, value = [], inputs
        for link in links:
            taken, value = self._timed(lambda given, link=link: call(link, given), value)  # type: ignore[misc]
            times.append(taken)
        return times

    def within(self, model: nn.Module, blocks: list[nn.Module], inputs: Tree) -> list[int]:
        """Time the part of a forward before the blocks, each block, and the part after them."""
        given: dict[nn.Module, Any] = {}
        marks: dict[str, int] = {}

        def enter(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given[block] = arguments, named
            if block is blocks[0]:
                marks["first"] = self._now()

        def leave(block: nn.Module, *_: Any) -> None:
            marks["last"] = self._now()

        hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
        hooks.append(blocks[-1].register_forward_hook(leave))
        ends: list[int] = []
        for _ in range(_REPEATS):
            start = self._now()
            with torch.no_grad():
                self._forward.under_autocast(lambda: call(model, inputs))
            ends += [marks["first"] - start, self._now() - marks["last"]]
        for hook in hooks:
            hook.remove()
        times = [self._timed(lambda item, block=block: block(*item[0], **item[1]), given[block])[0]  # type: ignore[misc]
                 for block in blocks]  # fmt: skip
        return [min(ends[::2]) * _WHOLE, *times, min(ends[1::2]) * _WHOLE]

    def _timed(self, run: Callable[[Tree], Tree], given: Tree) -> tuple[int, Tree]:
        """Return the nanoseconds of `run` and its backward pass, and the outputs of `run`."""
        times: list[int] = []
        outputs: Tree = None
        for _ in range(1 + _REPEATS):  # the first repeat warms up
            inputs = map_tensors(_leaf, given)
            start = self._now()
            outputs = self._forward.under_autocast(lambda: run(inputs))  # noqa: B023  # called at once
            differentiable = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
            if differentiable:
                torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
            times.append(self._now() - start)
        return min(times[1:]), map_tensors(Tensor.detach, outputs)

    def _now(self) -> int:
        if self._forward.device.type == "cuda":
            torch.cuda.synchronize(self._forward.device)
        return time.perf_counter_ns()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
