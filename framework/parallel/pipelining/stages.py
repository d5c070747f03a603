"""The stages of a pipeline: which links of the chain are on which process, and which weights several of them hold."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from framework.parallel.pipelining.chain import cut, weighty


class Stage(nn.Module):
    """Some links of the chain, as one module. The engine, which knows what micro-batches come, runs them."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(links)
        self.run: Callable[["Stage", tuple[Any, ...], dict[str, Any]], Any] | None = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        assert self.run is not None
        return self.run(self, arguments, named)


def spans_of(links: Sequence[nn.Module], costs: Sequence[int], *, num_stages: int) -> list[range]:
    """Return the numbers of each stage's links."""
    groups = weighty(links)
    cuts = cut([sum(costs[i] for i in group) for group in groups], num_stages=num_stages)
    return [range(groups[part[0]][0], groups[part[-1]][-1] + 1) for part in cuts]


def keep_own(
    model: nn.Module, links: Sequence[nn.Module], spans: Sequence[range], *, rank: int, size: int
) -> dict[int, Stage]:
    """Return the stages of one of the pipeline's processes, by number; stages are dealt to them in turn.

    The parameters and buffers of the other links are taken out of the model, but for weights that its own share with
    them: a weight keeps all its names.
    """
    stages = {n: Stage([links[i] for i in span]) for n, span in enumerate(spans) if n % size == rank}
    own_modules = {module for stage in stages.values() for module in stage.modules()}
    own_weights = {id(parameter) for module in own_modules for parameter in module.parameters(recurse=False)}
    others = {module for link in links for module in link.modules()} - own_modules
    for module in others:
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, value in [*parameters, *buffers]:
            if id(value) not in own_weights:
                setattr(module, name, None)
    return stages


def shared_weights(model: nn.Module, *, mesh: DeviceMesh) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Return the weights that lie on several processes of this pipeline (tied ones), each with their group. Collective."""
    axes = mesh.mesh_dim_names or ()
    place = tuple(mesh.get_local_rank(axis) for axis in axes if axis != "pipeline")
    mine = dict(model.named_parameters())
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, (sorted(mine), place))
    holders: dict[tuple[Any, str], list[int]] = {}
    for rank, (names, its_place) in enumerate(everyone):
        for name in names:
            holders.setdefault((its_place, name), []).append(rank)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted({tuple(r) for r in holders.values() if len(r) > 1}):  # every rank makes every group
        groups[ranks] = dist.new_group(list(ranks))
    return [(parameter, groups[tuple(holders[place, name])]) for name, parameter in mine.items()
            if len(holders[place, name]) > 1]  # fmt: skip
