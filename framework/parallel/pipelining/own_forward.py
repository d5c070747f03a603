"""A model's own forward as a chain: each block, with what the forward does before the first one and after each.

This is for models that are not a list of modules to call one after the other; most libraries' models are not. Every stage
runs the model's forward, but skips the blocks of other stages. What a stage sends are the arguments of the next stage's first
block that come from the block before it; there its own forward ends. So every stage computes the other arguments of the blocks
(masks, positions) again. Weights that a stage does not have, and results that it has skipped, are not a number: a forward that
needs another tensor of the stage before, such as a connection over several blocks, has no result.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from framework.modules.parts import blocks_of, chain_of
from framework.modules.tensors import Tree, call, map_tensors, tensors_in
from framework.modules.trace import Trace, copied_with, follow, on_meta, traced
from framework.parallel.first_weights import fill, named_tensors
from framework.parallel.pipelining.chain import Listed, Stage, costs_of, cut, links_of_tensors
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import copy_all


class Uncut(ValueError):
    """The error for a model with a forward that cannot be cut at its blocks; the message says why."""


class _Left(BaseException):
    """The exception that ends a forward after a stage's last block. (Not an Exception, because a model may catch these.)"""


@dataclass
class _Window:
    """The blocks of the running stage, and the tensors that it has received, in the places of the first block's arguments."""

    span: range
    received: tuple[Tensor, ...]  # () in the first stage
    calls: "Sequence[_Call]"  # of all blocks, for a batch of this shape
    is_placed: bool = False  # what is received, in the forward


@dataclass
class _Call:
    """The call of a block in the forward: which arguments come from the block before, and what the block returns.

    The first of these arguments is the hidden state, which the forward may also compute from the outputs of the block before.
    """

    places: Sequence[int | str]
    outputs: Any
    given: tuple[Tensor, ...]  # without storage: the arguments of these places
    is_passed_on: bool  # the hidden state is an output of the block before, as the other arguments are

    def of(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the arguments of these places in another call."""
        return tuple(named[place] if isinstance(place, str) else arguments[place] for place in self.places)

    def with_received(
        self, arguments: Sequence[Any], named: Mapping[str, Any], received: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        instead = dict(zip(self.places, received))
        positional = tuple(instead.get(place, value) for place, value in enumerate(arguments))
        return positional, {name: instead.get(name, value) for name, value in named.items()}

    def skipped(self, received: Sequence[Tensor], *, following: "_Call", is_sent: bool) -> Any:
        """Return the outputs of this block, if it is skipped: not a number, but what is received if the next block gets it."""

        def instead(output: Tensor) -> Tensor:
            for tensor, value in zip(received, following.given) if is_sent else ():
                if output is value:
                    return tensor
            number = _no_number(output, device=received[0].device).clone()
            return number.to(received[0].dtype) if number.is_floating_point() else number  # autocast is not in a trace

        return map_tensors(instead, self.outputs)


class OwnForward:
    """The chain of a model's own forward: each block is a link, with what the forward does before the first and after each.

    The constructor raises Uncut if the blocks are not called once each, in order, each with a tensor. The rehearsal finds other
    values that a stage may need of another stage (a bias of positions, a state, a connection over several blocks).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trace = traced(model)
        if trace is None:
            raise Uncut("the shape of an input is not known from the dataset's facts, and the model does not take its samples "
                        "without their numbers")  # fmt: skip
        _require_whole(trace)
        self.blocks = _row_of_blocks(model)
        self._calls = _calls(self.blocks, trace)
        self._links = links_of_tensors(model, self.blocks, trace)
        self._copy, copies = on_meta(model)
        self._copied_blocks = [copies[id(block)] for block in self.blocks]
        self._traced: dict[str, tuple[list[_Call], Any]] = {}  # the calls and the model's outputs, for each shape of a batch
        self._window: _Window | None = None

    @property
    def num_links(self) -> int:
        return len(self.blocks)

    def outputs(self, inputs: Tree) -> list[Any]:
        """Return what each link sends, a tuple of meta tensors, for a batch like `inputs`; of the last link, its outputs."""
        calls, outputs = self._trace_of(inputs)
        return [*(called.given for called in calls[1:]), outputs]

    def _trace_of(self, inputs: Tree) -> tuple[list[_Call], Any]:
        key = repr(map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs))
        if key not in self._traced:
            trace = follow(self._copy, inputs)
            self._traced[key] = _calls(self._copied_blocks, trace), trace.events[-1].value
        return self._traced[key]

    def types(self, inputs: Tree, *, stand_in: Callable[[Tensor], Tensor]) -> list[tuple[torch.dtype, ...]]:
        """Return the dtypes of what each link sends, except the last link. The inputs must be stand-ins too."""
        copied, copies = copied_with(self._copy, stand_in)
        types: list[tuple[torch.dtype, ...]] = []
        for block, called in zip(self._copied_blocks[1:], self._calls[1:]):

            def enter(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], called: _Call = called) -> None:
                types.append(tuple(value.dtype for value in called.of(arguments, named)))

            copies[id(block)].register_forward_pre_hook(enter, with_kwargs=True)
        call(copied, inputs)
        return types

    def costs(self, example: Tree | None) -> list[int]:
        """Return the cost of each link, as `costs_of` counts it."""
        costs = costs_of(self.model, self.blocks, example=example)
        rest = costs_of(self.model, [self.model], example=example)[0] - sum(costs)
        return [*costs[:-1], costs[-1] + max(0, rest)]  # most of the rest is the head; the embedding only looks up

    def spans(self, costs: Sequence[int], *, num_stages: int) -> list[range]:
        """Return the numbers of each stage's links, for these costs of the links."""
        return cut(costs, num_stages=num_stages)

    def keep_own(self, spans: Sequence[range], *, own: Collection[int], device: torch.device) -> dict[int, Stage]:
        """Return, by number, the stages that a process of the pipeline has; `own` has their numbers.

        The model keeps only the weights and buffers of these stages. The substitutes of the others are on the device.
        """
        links = {link for number in own for link in spans[number]}
        for module in self.model.modules():
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in tensors:
                if not self._links[id(tensor)] & links:
                    delattr(module, name)
                    has_numbers = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
                    module.__dict__[name] = tensor.to(device) if has_numbers else _no_number(tensor, device=device)
        inside, stages = {module for block in self.blocks for module in block.modules()}, {}
        for number, span in ((number, spans[number]) for number in own):
            stages[number] = Stage([self.blocks[link] for link in span])
            stages[number].rest = nn.ModuleList(
                module
                for module in self.model.modules()
                if module not in inside
                and any(self._links[id(p)] & {*span} for p in nn.Module.parameters(module, recurse=False))
            )
        for number, block in enumerate(self.blocks):
            block.forward = self._unless_skipped(number, block.forward)  # type: ignore[method-assign]
        self._links_of = {name: self._links[id(tensor)] for name, tensor in named_tensors(self.model).items()}
        return stages

    def fill(self, stages: Sequence[Stage], *, device: torch.device) -> None:
        """Move the rest of the model to the device, and fill it with its numbers. Call this after the stages are sharded."""
        fill(self.model, device=device, stages=stages)
        for number, block in enumerate(self.blocks):  # before FSDP's hook, which gives the block other tensors than the forward
            block.register_forward_pre_hook(partial(self._enter, number), prepend=True, with_kwargs=True)
        self._links = defaultdict(set, {id(tensor): self._links_of[name] for name, tensor in named_tensors(self.model).items()})

    def links_of_parameters(self) -> dict[int, set[int]]:
        """Return the numbers of the links that use each parameter, by the parameter's id."""
        return {id(parameter): self._links[id(parameter)] for parameter in nn.Module.parameters(self.model)}

    def buffers(self, stage: Stage, span: range) -> set[int]:
        """Return the ids of the buffers of a stage."""
        return {id(buffer) for buffer in self.model.buffers() if self._links[id(buffer)] & set(span)}

    def run(self, stage: Stage, span: range, arguments: tuple[Any, ...], inputs: Tree) -> Any:
        """Run a stage's part of the forward; return the tuple that it sends, or the model's output."""
        self._window = _Window(span, arguments, self._trace_of(inputs)[0])
        own = self.buffers(stage, span)
        others = [buffer for buffer in self.model.buffers() if id(buffer) not in own]  # buffers of this process's other stages
        before = [buffer.clone() for buffer in others]
        try:
            result: Any = call(self.model, inputs)
        except _Left as left:
            result = left
        finally:
            window, self._window = self._window, None
            copy_all([buffer.data for buffer in others], before)
        has_left = isinstance(result, _Left)
        if has_left != (span.stop < self.num_links) or window.is_placed != (span.start > 0):
            raise Unfit("model: a step calls no block after the place where the pipeline is cut (parallel=ddp or fsdp)")
        return result.args[0] if has_left else result

    def _enter(self, number: int, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before a block: end the forward after the running stage's last block; give its first one what it has received."""
        called, window = self._calls[number], self._window
        if window is None:  # a recomputation by the model's own code, with the arguments of the first time
            return None
        if number >= window.span.stop:
            raise _Left(called.of(arguments, named))
        if not window.received or number < window.span.start or window.is_placed:
            return None
        window.is_placed = True  # a forward may leave blocks out
        hidden = called.of(arguments, named)[0]
        if not called.is_passed_on and _becomes(hidden, window.received[0]):
            return called.with_received(arguments, named, [hidden, *window.received[1:]])
        return called.with_received(arguments, named, window.received)

    def _unless_skipped(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            window = self._window
            if window is None or not window.received or number >= window.span.start:
                return forward(*arguments, **named)
            is_sent = number + 1 == window.span.start
            return window.calls[number].skipped(window.received, following=window.calls[number + 1], is_sent=is_sent)

        return run


def _becomes(given: Tensor, received: Tensor) -> bool:
    """Let a tensor become the received one: the forward may use it again, as in x = x + block(x). Return whether it did."""
    if (given.shape, given.dtype) != (received.shape, received.dtype):
        return False
    try:
        given.detach_().copy_(received)
    except RuntimeError:  # a view
        return False
    return True


def _no_number(like: Tensor, *, device: torch.device) -> Tensor:
    """Return a tensor of this shape without a number, and without storage."""
    nothing = torch.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), nothing, dtype=like.dtype, device=device).expand(like.shape)


def chain_for(model: nn.Module) -> Listed | OwnForward:
    """Return the model's chain: the modules that it lists, or its own forward. Raise Uncut if it has neither."""
    links = chain_of(model)
    return OwnForward(model) if links is None else Listed(model, links)


def _row_of_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the most frequent class, in the order of the model's tree."""
    blocks = blocks_of(model)
    if not blocks:
        raise Uncut(f"{type(model).__name__} has no blocks (model.parts.blocks names them)")
    kind, _ = Counter(type(block) for block in blocks).most_common(1)[0]
    return [block for block in blocks if type(block) is kind]


def _require_whole(trace: Trace) -> None:
    if not trace.is_whole:
        what = "it reads the values of its tensors, not only their shapes, or it does not accept a batch of this shape"
        raise Uncut(f"{what} ({trace.why})")


def _calls(blocks: Sequence[nn.Module], trace: Trace) -> list[_Call]:
    """Return how each block is called. Raise Uncut if they are not called once each, or one of them not with a tensor."""
    _require_whole(trace)
    numbers = {block: number for number, block in enumerate(blocks)}
    entered = [event for event in trace.events if event.kind == "enter" and event.what in numbers]
    left = [event for event in trace.events if event.kind == "leave" and event.what in numbers]
    if [numbers[event.what] for event in entered] != list(range(len(blocks))):
        raise Uncut("its blocks are not called once each, in their order")
    calls, known = list[_Call](), set[int]()
    for before, enter, leave in zip([None, *left], entered, left):
        arguments, named = enter.value
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **named}
        tensors = {place: value for place, value in places.items() if isinstance(value, Tensor)}
        sent = _hidden_in(before.value) if before is not None else None
        passed_on = [place for place, value in tensors.items() if value is sent]
        new = [place for place, value in tensors.items() if value.is_floating_point() and id(value) not in known]
        if not passed_on and not new:
            raise Uncut("a block does not get a tensor that the forward has computed for it")
        rest = {id(value) for value in tensors_in(before.value) if value is not sent} if before is not None else set()
        handed = [(passed_on or new)[0], *(place for place, value in tensors.items() if id(value) in rest)]
        if whole := next((place for place in handed if not tensors[place].is_floating_point()), None):
            raise Uncut(f"a block gets whole numbers from the block before it (its argument {whole})")
        known.update(map(id, tensors.values()))
        calls.append(_Call(handed, leave.value, tuple(tensors[place] for place in handed), bool(passed_on)))
    return calls


def _hidden_in(outputs: Any) -> Tensor:
    hidden = outputs[0] if type(outputs) in (tuple, list) and outputs else outputs
    if not isinstance(hidden, Tensor):
        raise Uncut(f"a block returns a {type(outputs).__name__}")
    return hidden
