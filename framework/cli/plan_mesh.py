"""The plan of a run's mesh: the groups of ranks along each axis, and the nodes of the ranks."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from framework.build import components
from framework.build.training import Builder
from framework.cli.plan_world import planned_world
from framework.config.targets import component
from framework.distributed.world import World
from framework.preflight.child import Found, in_child
from framework.preflight.processes import axes_of

_COLORS = ("#7db4e6", "#f0a04b", "#7cc48f", "#c3a5e3", "#e88f8f", "#d9c75c", "#8fd0d0", "#e3a5c8", "#b0b8c0", "#c49a6c")
_MOST_ACROSS, _MOST_NODES = 16, 16  # the most that are drawn
_MOST_GROUPS, _MOST_LISTED = 8, 8  # the most that are printed: groups of an axis, and ranks of a group


@dataclass(frozen=True)
class PlannedMesh:
    """The sizes of the axes, outermost first, and an array of the ranks with these sizes."""

    axes: dict[str, int]
    ranks: np.ndarray
    num_nodes: int

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks along an axis, sorted by their first rank."""
        place = [*self.axes].index(axis)
        found: list[list[int]] = np.moveaxis(self.ranks, place, -1).reshape(-1, self.axes[axis]).tolist()
        return sorted(found)

    def lines(self) -> list[str]:
        """Return the main numbers."""
        sizes = " x ".join(f"{name}={size}" for name, size in self.axes.items())
        found = [f"{sizes}: {self.ranks.size} ranks on {self.num_nodes} node{'s' * (self.num_nodes != 1)}"]
        for axis in self.axes:
            groups = self.groups(axis)
            num_apart = sum(len({self._node(rank) for rank in group}) > 1 for group in groups)
            where = f"{num_apart} of them over several nodes" if num_apart else "each on one node"
            text = "  ".join(map(_listed, groups[:_MOST_GROUPS])) + "  ..." * (len(groups) > _MOST_GROUPS)
            counted = f"{len(groups)} group{'s' * (len(groups) != 1)} of {self.axes[axis]}"
            found.append(f"{axis}: {counted}, {where}: {text}")
        return found

    def _node(self, rank: int) -> int:
        return rank // (self.ranks.size // self.num_nodes)

    def drawn(self) -> Any:
        """Return the figure: for each axis, the ranks, with one or more rows per node. A group's ranks have the same colour.

        If there are more groups than colours, a small number shows the group.
        """
        from matplotlib.figure import Figure

        num_local = self.ranks.size // self.num_nodes
        across, rows_each = min(num_local, _MOST_ACROSS), -(-num_local // _MOST_ACROSS)
        nodes = min(self.num_nodes, _MOST_NODES)
        panel = max(1.6, 0.42 * across), 0.42 * nodes * rows_each + 0.12 * (nodes - 1)
        count = len(self.axes)
        figure = Figure(figsize=(count * (panel[0] + 0.3) + 0.9, panel[1] + 1.0), layout="constrained")
        for number, axis in enumerate(self.axes):
            axes = figure.add_subplot(1, count, number + 1)
            group_of = {rank: place for place, group in enumerate(self.groups(axis)) for rank in group}
            for rank in range(nodes * num_local):
                node, place = divmod(rank, num_local)
                x, y = place % across, (node * rows_each + place // across) + 0.25 * node
                axes.add_patch(_box(x, y, _COLORS[group_of[rank] % len(_COLORS)]))
                axes.text(x, y, str(rank), ha="center", va="center", fontsize=8)
                if len(self.groups(axis)) > len(_COLORS):
                    axes.text(x + 0.41, y + 0.41, str(group_of[rank]), ha="right", va="bottom", fontsize=5)
            end = nodes * rows_each + 0.25 * (nodes - 1)
            axes.set(xlim=(-0.55, across - 0.45), ylim=(end - 0.45, -0.55), xticks=[], yticks=[], aspect="equal")
            axes.set_title(f"{axis} = {self.axes[axis]}", fontsize=9)
            if not number:
                axes.set_yticks([node * (rows_each + 0.25) + (rows_each - 1) / 2 for node in range(nodes)],
                                [f"node {node}" for node in range(nodes)], fontsize=8)  # fmt: skip
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        figure.supxlabel("along an axis, ranks of the same colour are a group", fontsize=8)
        return figure


def _listed(group: list[int]) -> str:
    shown = [*map(str, group)] if len(group) <= _MOST_LISTED else [*map(str, group[:3]), "...", str(group[-1])]
    return "{" + ", ".join(shown) + "}"


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.45, y - 0.45), 0.9, 0.9, facecolor=color, linewidth=0)


class _MeshKnown(Exception):
    """Not an error: a strategy has requested its mesh, and nothing else is needed."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh


class _AskedForMesh(World):
    """A world that stops the construction of a strategy when the strategy requests its mesh."""

    def mesh(self, **axes: int | None) -> DeviceMesh:
        raise _MeshKnown(super().mesh(**axes))


def planned_mesh(build: Builder) -> PlannedMesh:
    """Return the mesh that the strategy requests. Raise ValueError for a strategy without a mesh."""
    if not axes_of(build.config.parallel):
        raise ValueError("parallel: has no mesh to draw (ddp, fsdp, tensor, pipeline, ... have one)")
    found, fate = in_child(partial(_mesh, build), is_silent=True)
    if not found:
        raise ValueError(f"parallel: makes no mesh without the other processes: {fate or 'its processes need none'}")
    axes, ranks = found[0]["axes"], np.array(found[0]["ranks"])
    return PlannedMesh(dict(zip(axes, ranks.shape)), ranks, build.config.launch.node_counts[-1])


def _mesh(build: Builder) -> Found:
    build = build.altered(world=planned_world(build, rank=0, kind=_AskedForMesh))
    without_storage = partial(components.shapes_of, build.config.model, seed=build.config.seed)
    error: Exception | None = None
    for make in (without_storage, build.model):  # a strategy may move the model before it requests the mesh
        try:
            component(build.config.parallel)(make(), world=build.world, forward=build.forward())
        except _MeshKnown as known:
            return [{"axes": [*(known.mesh.mesh_dim_names or ())], "ranks": known.mesh.mesh.tolist()}]
        except Exception as failed:
            error = failed
    if error is not None:
        raise error
    return []
