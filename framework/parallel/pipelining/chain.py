"""A model as a chain of modules, cut into stages of about equal cost, and the processes that have these stages."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from framework.modules.tensors import Tree, call, map_tensors
from framework.modules.trace import Trace, copied_with, on_meta, with_own_on_meta
from framework.parallel.first_weights import fill


def stray_parameters(model: nn.Module, links: Sequence[nn.Module]) -> list[str]:
    """Return the names of the parameters that belong to no link."""
    linked = {id(parameter) for link in links for parameter in nn.Module.parameters(link)}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in linked]


def costs_of(model: nn.Module, units: Sequence[nn.Module], *, example: Tree | None) -> list[int]:
    """Return the cost of each of the model's units: floating-point operations for a batch, plus one for each weight.

    Only weights count if no example batch is known, or if the model does not accept it on the meta device: the model reads
    numbers and not only shapes, or a task's own step gives it other inputs.
    """
    weights = [1 + sum(p.numel() for p in nn.Module.parameters(unit)) for unit in units]
    if example is None:
        return weights
    copied, copies = on_meta(model)
    units = [copies.get(id(unit), unit) for unit in units]  # a chain may have modules without weights that are not in the model
    paths: dict[nn.Module, list[str]] = {}  # a module in several places has several; its operations count under one
    for path, module in copied.named_modules(prefix=type(copied).__name__, remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(copied, example)
    except Exception:  # a user's model may raise anything
        return weights
    counts = counter.get_flop_counts()
    flops = [sum(sum(counts.get(path, {}).values()) for path in paths.get(unit, ())) for unit in units]
    return [size + count // units.count(unit) for size, count, unit in zip(weights, flops, units)]


def weighty(links: Sequence[nn.Module]) -> list[range]:
    """Group the links so that each group has weights: a link without weights joins the link before it, or the next."""
    starts = [i for i, link in enumerate(links) if any(True for _ in nn.Module.parameters(link))]
    return [range(start, end) for start, end in zip([0, *starts[1:]], [*starts[1:], len(links)])]


def cut(costs: Sequence[int], *, num_stages: int) -> list[range]:
    """Cut a list of costs into stages that are not empty, so that the largest cost of a stage is as small as possible."""
    # best[n]: with the first n links in the stages so far, the smallest possible largest cost, and the start of each stage
    totals = [0, *itertools.accumulate(costs)]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(1, num_stages + 1):
        before, best = best, {}
        for end in range(stage, len(costs) - (num_stages - stage) + 1):
            ways = [(max(largest, totals[end] - totals[start]), start) for start, (largest, _) in before.items() if start < end]
            largest, start = min(ways)
            best[end] = largest, [*before[start][1], start]
    starts = best[len(costs)][1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(costs)])]


class Stage(nn.Module):
    """Some links of the chain, as one module. The engine sets its `forward`, which runs the links."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(links)


class Listed:
    """The chain of a model that lists its modules: each module is a link, and gets the output of the link before it."""

    def __init__(self, model: nn.Module, links: Sequence[nn.Module]) -> None:
        self.model = model
        self.links = links
        self._copies = [on_meta(link)[0] for link in links]  # the links themselves may be cut or removed later
        self._shapes: dict[str, list[Any]] = {}

    def outputs(self, inputs: Tree) -> list[Any]:
        """Return what each link sends, a tuple of a meta tensor, for a batch like `inputs`; of the last link, its outputs."""
        value = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
        key, outputs = repr(value), []
        if key not in self._shapes:
            for link in self._copies:
                with torch.no_grad():
                    value = with_own_on_meta(partial(call, link, value))
                outputs.append(value)
            self._shapes[key] = [*((output,) for output in outputs[:-1]), outputs[-1]]
        return self._shapes[key]

    def types(self, inputs: Tree, *, stand_in: Callable[[Tensor], Tensor]) -> list[tuple[torch.dtype, ...]]:
        """Return the dtypes of what each link sends, except the last link. The inputs must be stand-ins too."""
        value, types = inputs, list[tuple[torch.dtype, ...]]()
        for link in self._copies[:-1]:
            value = call(copied_with(link, stand_in)[0], value)
            types.append((value.dtype,))
        return types

    def costs(self, example: Tree | None) -> list[int]:
        """Return the cost of each link, as `costs_of` counts it."""
        return costs_of(self.model, self.links, example=example)

    def spans(self, costs: Sequence[int], *, num_stages: int) -> list[range]:
        """Return the numbers of each stage's links, for these costs of the links."""
        groups = weighty(self.links)
        cuts = cut([sum(costs[i] for i in group) for group in groups], num_stages=num_stages)
        return [range(groups[part[0]][0], groups[part[-1]][-1] + 1) for part in cuts]

    def keep_own(self, spans: Sequence[range], *, own: Collection[int], device: torch.device) -> dict[int, Stage]:
        """Return, by number, the stages that a process of the pipeline has; `own` has their numbers.

        The parameters and buffers of the other links are removed from the model, except weights that the links of this process
        share: a weight keeps all its names.
        """
        links = self.links
        stages = {n: Stage([links[i] for i in span]) for n, span in enumerate(spans) if n in own}
        own_modules = {module for stage in stages.values() for module in stage.modules()}
        own_weights = {id(parameter) for module in own_modules for parameter in nn.Module.parameters(module, recurse=False)}
        others = {module for link in links for module in link.modules()} - own_modules
        for module in others:
            parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            for name, value in [*parameters, *buffers]:
                if id(value) not in own_weights:
                    setattr(module, name, None)
        return stages

    def fill(self, stages: Sequence[Stage], *, device: torch.device) -> None:
        """Move the rest of the model to the device, and fill it with its numbers."""
        fill(self.model, device=device, stages=stages)

    def buffers(self, stage: Stage, span: range) -> set[int]:
        """Return the ids of the buffers of a stage."""
        return {id(buffer) for buffer in stage.buffers()}

    def links_of_parameters(self) -> dict[int, set[int]]:
        """Return the numbers of the links that have each parameter, by the parameter's id."""
        found: dict[int, set[int]] = {}
        for number, link in enumerate(self.links):
            for parameter in nn.Module.parameters(link):
                found.setdefault(id(parameter), set()).add(number)
        return found

    def run(self, stage: Stage, span: range, arguments: tuple[Any, ...], inputs: Tree) -> Any:
        """Run a stage's links; `arguments` are the received values for the first link (nothing in the first stage).

        Return the tuple that the stage sends, or the model's output.
        """
        first, *rest = stage.links
        value = call(first, inputs) if span.start == 0 else first(*arguments)
        for link in rest:
            value = link(value)
        return value if span.stop == len(self.links) else (value,)


def shared_weights(model: nn.Module, *, mesh: DeviceMesh) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Return the weights that several processes of this pipeline have (tied weights), each with its group. Collective."""
    axes, mine = list(mesh.mesh_dim_names or ()), dict(model.named_parameters())
    group = mesh.get_group("pipeline")
    stages: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, list(mine), group=group)  # every pipeline has the same stages
    holders: dict[str, tuple[int, ...]] = {}  # places in the pipeline
    for place, names in enumerate(stages):
        for name in names:
            holders[name] = *holders.get(name, ()), place
    pipelines = mesh.mesh.movedim(axes.index("pipeline"), -1).reshape(-1, group.size()).tolist()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for places in sorted({places for places in holders.values() if len(places) > 1}):
        for ranks in pipelines:  # every rank must make every group
            made = dist.new_group([ranks[place] for place in places])
            if dist.get_rank() in ranks:
                groups[places] = made
    return [(parameter, groups[holders[name]]) for name, parameter in mine.items() if holders[name] in groups]


def links_of_tensors(model: nn.Module, blocks: Sequence[nn.Module], trace: Trace) -> defaultdict[int, set[int]]:
    """Return the numbers of the links that use each parameter and buffer, by its id."""
    links: defaultdict[int, set[int]] = defaultdict(set)
    for number, block in enumerate(blocks):
        for tensor in (*nn.Module.parameters(block), *block.buffers()):
            links[id(tensor)].add(number)
    numbers = {block: number for number, block in enumerate(blocks)}
    entered: dict[nn.Module, int] = {}  # the link in which a module is first entered
    num_left, inside = 0, False
    for event in trace.events:
        if event.kind != "use" and event.what in numbers:
            inside = event.kind == "enter"
            num_left += event.kind == "leave"
        elif event.kind == "enter":
            entered.setdefault(event.what, min(num_left, len(blocks) - 1))
        elif event.kind == "use" and not inside:  # what is read between two blocks may be used before or after the second
            links[id(event.what)] |= {max(num_left - 1, 0), min(num_left, len(blocks) - 1)}
    for module in model.modules():
        for tensor in (*nn.Module.parameters(module, recurse=False), *module.buffers(recurse=False)):
            if not links[id(tensor)]:  # not used in an evaluation
                links[id(tensor)].add(entered.get(module, 0))
    return links
