"""A model's own forward as a chain: the part before its blocks, each block, and the part after them.

This is for models that are not a list of modules to call one after the other; most libraries' models are not. Every stage
runs the model's forward, but skips the blocks of other stages. The first of its own blocks gets the tensor that the stage
before has sent; after its last block, the forward ends. So every stage computes the other arguments of the blocks (masks,
positions) again. Weights that a stage does not have are zeros without storage there.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from framework.modules.parts import blocks_of, chain_of
from framework.modules.tensors import Tree, call, map_tensors, tensors_in
from framework.modules.trace import Trace, copied_with, follow, on_meta, traced
from framework.parallel.first_weights import fill, named_tensors
from framework.parallel.pipelining.chain import Listed, Stage, costs_of, cut
from framework.runtime.torch_internals import copy_all


class Uncut(ValueError):
    """The error for a model with a forward that cannot be cut at its blocks; the message says why."""


class _Left(BaseException):
    """The exception that ends a forward after a stage's last block. (Not an Exception, because a model may catch these.)"""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class _Window:
    """The blocks of the running stage, and the tensor that it has received; with `is_last` the forward runs to its end."""

    start: int
    stop: int
    received: Tensor | None
    is_last: bool


@dataclass
class _Call:
    """The call of a block in the forward: which argument is the hidden state, and in which outputs it is returned."""

    place: int | str
    outputs: Any
    hidden: list[Tensor] = field(default_factory=list)  # without storage: the hidden state before and after the block

    def given(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
        return named[self.place] if isinstance(self.place, str) else arguments[self.place]

    def with_hidden(
        self, arguments: tuple[Any, ...], named: dict[str, Any], hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.place, str):
            return arguments, named | {self.place: hidden}
        return (*arguments[: self.place], hidden, *arguments[self.place + 1 :]), named

    def returned(self, hidden: Tensor) -> Any:
        """Return the outputs of a skipped block."""
        if isinstance(self.outputs, Tensor):
            return hidden
        return type(self.outputs)([hidden, *[None] * (len(self.outputs) - 1)])


class OwnForward:
    """The chain of a model's own forward: link 0 is before its blocks, each block is a link, the last link is after them.

    The constructor raises Uncut if the blocks are not called once each, in order, each with the output of the block before it.
    The rehearsal finds other values that a block may take from another block (a bias of positions, a state).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = _row_of_blocks(model)
        trace = traced(model)
        if trace is None:
            raise Uncut("the dataset's info does not give the shape of an input (in_channels and image_size, or vocab_size "
                        "and seq_len)")  # fmt: skip
        if not trace.is_whole:
            raise Uncut(
                "it reads the values of its tensors, not only their shapes, or it does not accept a batch of this shape"
            )
        self._calls = _calls(self.blocks, trace)
        self._links = _links_of_tensors(model, self.blocks, trace)
        self._copy = on_meta(model)[0]
        self._copied_blocks = [dict(self._copy.named_modules())[name] for name in self._names()]
        self._shapes: dict[str, list[Any]] = {}
        self._window: _Window | None = None

    def _names(self) -> list[str]:
        names = {module: name for name, module in self.model.named_modules()}
        return [names[block] for block in self.blocks]

    @property
    def num_links(self) -> int:
        return len(self.blocks) + 2

    def outputs(self, inputs: Tree) -> list[Any]:
        """Return each link's outputs, as meta tensors, for a batch like `inputs`; every link but the last has one tensor."""
        example = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
        key = repr(example)
        if key not in self._shapes:
            trace = follow(self._copy, example)
            calls = _calls(self._copied_blocks, trace)
            self._shapes[key] = [calls[0].hidden[0], *(called.hidden[1] for called in calls), trace.events[-1].value]
        return self._shapes[key]

    def types(self, inputs: Tree, *, stand_in: Callable[[Tensor], Tensor]) -> list[torch.dtype]:
        """Return the dtype of each link's hidden state, except the last link's. The inputs must be stand-ins too."""
        copied, copies = copied_with(self._copy, stand_in)
        types: list[torch.dtype] = []

        def enter(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            types[:] = types or [self._calls[0].given(arguments, named).dtype]

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            types.append(_hidden_in(outputs).dtype)

        for block in self._copied_blocks:
            copies[id(block)].register_forward_pre_hook(enter, with_kwargs=True)
            copies[id(block)].register_forward_hook(leave)
        call(copied, inputs)
        return types

    def costs(self, example: Tree | None) -> list[int]:
        """Return the cost of each link, as `costs_of` counts it."""
        sizes = [sum(tensor.numel() for tensor in self._tensors(link)) for link in range(self.num_links)]
        costs = costs_of(self.model, self.blocks, example=example)
        rest = costs_of(self.model, [self.model], example=example)[0] - sum(costs) - sizes[0]
        return [1 + sizes[0], *costs, max(1, rest)]

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
                    is_weight = isinstance(tensor, nn.Parameter)
                    delattr(module, name)
                    absent = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                    module.__dict__[name] = absent if is_weight else tensor.to(device)
        stages = {}
        for number, span in ((number, spans[number]) for number in own):
            stages[number] = Stage([self.blocks[link - 1] for link in span if 0 < link <= len(self.blocks)])
            outside = [tensor for link in {0, self.num_links - 1} & set(span) for tensor in self._tensors(link)]
            stages[number].rest = nn.ParameterList(tensor for tensor in outside if isinstance(tensor, nn.Parameter))
        for number, block in enumerate(self.blocks):
            block.forward = self._dispatch(number, block.forward)  # type: ignore[method-assign]
        return stages

    def fill(self, stages: Sequence[Stage], *, device: torch.device) -> None:
        """Move the rest of the model to the device, and fill it with its numbers."""
        links = {name: self._links[id(tensor)] for name, tensor in named_tensors(self.model).items()}
        fill(self.model, device=device, stages=stages)
        self._links = defaultdict(set, {id(tensor): links[name] for name, tensor in named_tensors(self.model).items()})

    def links_of_parameters(self) -> dict[int, set[int]]:
        """Return the numbers of the links that use each parameter, by the parameter's id."""
        return {id(parameter): self._links[id(parameter)] for parameter in nn.Module.parameters(self.model)}

    def _tensors(self, link: int) -> list[Tensor]:
        tensors = {id(t): t for t in nn.Module.parameters(self.model)}
        return [tensor for key, tensor in tensors.items() if link in self._links[key]]

    def buffers(self, stage: Stage, span: range) -> set[int]:
        """Return the ids of the buffers of a stage."""
        return {id(buffer) for buffer in self.model.buffers() if self._links[id(buffer)] & set(span)}

    def run(self, stage: Stage, span: range, arguments: tuple[Any, ...], inputs: Tree) -> Any:
        """Run a stage's part of the forward; return the hidden state after it, or the model's output."""
        count = len(self.blocks)
        start, stop, is_last = max(span.start, 1) - 1, min(span.stop, count + 1) - 1, span.stop == self.num_links
        self._window = _Window(start, stop, None if span.start == 0 else arguments[0], is_last)
        own = self.buffers(stage, span)
        others = [buffer for buffer in self.model.buffers() if id(buffer) not in own]  # buffers of this process's other stages
        before = [buffer.clone() for buffer in others]
        try:
            return call(self.model, inputs)
        except _Left as left:
            return left.hidden
        finally:
            self._window = None
            copy_all([buffer.data for buffer in others], before)

    def _dispatch(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        called = self._calls[number]

        def leave(hidden: Tensor) -> NoReturn:
            raise _Left(hidden)

        def run(*arguments: Any, **named: Any) -> Any:
            window = self._window
            assert window is not None
            if number < window.start:
                assert window.received is not None
                return called.returned(window.received)
            if number >= window.stop:
                leave(called.given(arguments, named))
            if number == window.start and window.received is not None:
                arguments, named = called.with_hidden(arguments, named, window.received)
            outputs = forward(*arguments, **named)
            if number == window.stop - 1 and not window.is_last:
                leave(_hidden_in(outputs))
            return outputs

        return run


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


def _calls(blocks: Sequence[nn.Module], trace: Trace) -> list[_Call]:
    """Return how each block is called. Raise Uncut if the forward does not pass one hidden state from block to block."""
    numbers = {block: number for number, block in enumerate(blocks)}
    entered = [event for event in trace.events if event.kind == "enter" and event.what in numbers]
    left = [event for event in trace.events if event.kind == "leave" and event.what in numbers]
    if [numbers[event.what] for event in entered] != list(range(len(blocks))):
        raise Uncut("its blocks are not called once each, in their order")
    calls: list[_Call] = []
    for before, enter, leave in zip([None, *left], entered, left):
        arguments, named = enter.value
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **named}
        sent = _hidden_in(before.value) if before is not None else None
        fitting = [place for place, value in places.items() if isinstance(value, Tensor) and (sent is None or value is sent)]
        if not fitting:
            what = "the output of the block before it" if before is not None else "a tensor"
            raise Uncut(f"a block does not get {what}")
        others = tensors_in(before.value)[1:] if before is not None else []
        if any(value is other for value in places.values() for other in others):
            raise Uncut("a block gets more than one tensor from the block before it")
        called = _Call(fitting[0], leave.value)
        called.hidden = [called.given(arguments, named), _hidden_in(leave.value)]
        calls.append(called)
    return calls


def _hidden_in(outputs: Any) -> Tensor:
    hidden = outputs[0] if type(outputs) in (tuple, list) and outputs else outputs
    if not isinstance(hidden, Tensor):
        raise Uncut(f"a block returns a {type(outputs).__name__}")
    return hidden


def _links_of_tensors(model: nn.Module, blocks: Sequence[nn.Module], trace: Trace) -> defaultdict[int, set[int]]:
    """Return the numbers of the links that use each parameter and buffer, by its id. Uncut for a use between two blocks."""
    links: defaultdict[int, set[int]] = defaultdict(set)
    for number, block in enumerate(blocks):
        for tensor in (*nn.Module.parameters(block), *block.buffers()):
            links[id(tensor)].add(number + 1)
    numbers = {block: number for number, block in enumerate(blocks)}
    entered: dict[nn.Module, int] = {}  # the link in which a module is first entered
    num_left, inside = 0, False
    for event in trace.events:
        if event.kind != "use" and event.what in numbers:
            inside = event.kind == "enter"
            num_left += event.kind == "leave"
        elif event.kind == "enter":
            entered.setdefault(event.what, 0 if num_left == 0 else len(blocks) + 1)
        elif event.kind == "use" and not inside:
            if 0 < num_left < len(blocks):
                raise Uncut("a weight or buffer is used between its blocks")
            links[id(event.what)].add(0 if num_left == 0 else len(blocks) + 1)
    for module in model.modules():
        for tensor in (*nn.Module.parameters(module, recurse=False), *module.buffers(recurse=False)):
            if not links[id(tensor)]:  # not used in an evaluation
                links[id(tensor)].add(entered.get(module, 0))
    return links
