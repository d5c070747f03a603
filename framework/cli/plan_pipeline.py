"""The plan of a pipeline: the micro-batch on which each process works at each time, and how long each process waits."""

import inspect
from dataclasses import dataclass
from typing import Any

from framework.build.training import Builder
from framework.config.folders import option_of
from framework.config.targets import locate
from framework.data.order import parts
from framework.distributed.mesh import resolve_axes
from framework.parallel.pipelining.schedules import order_of, owners
from framework.parallel.pipelining.timetable import Placed, timetable, waiting_in
from framework.preflight.processes import axes_of

_COLORS = {"FORWARD": "#7db4e6", "FULL_BACKWARD": "#f0a04b", "BACKWARD_INPUT": "#f0a04b", "BACKWARD_WEIGHT": "#7cc48f"}
_LIGHTER = {"FORWARD": "#cfe3f6", "FULL_BACKWARD": "#fadcb8", "BACKWARD_INPUT": "#fadcb8", "BACKWARD_WEIGHT": "#cdeacf"}
_NAMES = {"FORWARD": "forward (1)", "FULL_BACKWARD": "backward (2)", "BACKWARD_INPUT": "backward: inputs (1)",
          "BACKWARD_WEIGHT": "backward: weights (1)"}  # fmt: skip
_MOST_UNITS = 80  # the most units of time that are drawn; a number fits into each unit


@dataclass(frozen=True)
class PlannedPipeline:
    """The timetable of a pass, or of the strategy's own `planned_order`, and the text about it."""

    placed: dict[int, list[Placed]]  # by the process's position along the pipeline axis
    num_micro_batches: int  # per step
    num_stages: int
    said: list[str]

    @property
    def waiting(self) -> float:
        """The fraction of the time in which a process waits."""
        return waiting_in(self.placed)

    def lines(self) -> list[str]:
        """Return the main numbers."""
        share = f"bubble: a process waits {100 * self.waiting:.1f} % of the time"
        return [*self.said, f"{share}, if all stages take the same time and sending takes no time"]

    def drawn(self) -> Any:
        """Return the figure: one row per process, with time to the right."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        end = max(row[-1].end for row in self.placed.values())
        units, count = min(end, _MOST_UNITS), len(self.placed)
        width = max(6.5, min(15.0, 1.2 + 0.26 * units))
        figure = Figure(figsize=(width, 1.25 + 0.34 * count), layout="constrained")
        axes = figure.add_subplot()
        size = min(8.0, 45 * width / units / 0.9 / 1.2)
        for rank, row in self.placed.items():
            for action in row:
                if action.start < units:
                    colors = _LIGHTER if action.stage >= count else _COLORS
                    axes.barh(rank, action.end - action.start, left=action.start, height=0.9, color=colors[action.kind],
                              edgecolor="white", linewidth=0.6)  # fmt: skip
                    axes.text((action.start + action.end) / 2, rank, str(action.micro_batch + 1), ha="center", va="center",
                              fontsize=size, clip_on=True)  # fmt: skip
        axes.set(xlim=(0, units), ylim=(count - 0.5, -0.5), yticks=range(count), xlabel="time, in forward passes of a stage")
        axes.set_yticklabels([f"rank {rank}" for rank in self.placed] if count < 33 else [""] * count)
        axes.set_facecolor("#eef1f4")
        axes.spines[:].set_visible(False)
        kinds = [kind for kind in _COLORS if any(action.kind == kind for row in self.placed.values() for action in row)]
        looks = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
        if self.num_stages > count:
            looks.append(Patch(color=_LIGHTER["FORWARD"], label="lighter: the process's second stage"))
        figure.legend(handles=looks, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
        return figure


def planned_pipeline(build: Builder) -> PlannedPipeline:
    """Return the timetable of a step of the run that `build` would build. Raise ValueError without a pipeline."""
    config, parallel = build.config, build.config.parallel
    own_order = getattr(inspect.getmodule(locate(parallel["_target_"])), "planned_order", None)
    name = option_of("parallel", parallel) if own_order is not None else parallel.get("schedule")
    sizes = resolve_axes(axes_of(parallel), world_size=config.launch.most_processes)
    if name is None or "pipeline" not in sizes:
        raise ValueError("parallel: has no pipeline to draw (parallel=pipeline, ddp+pp or pp+fsdp+tp)")
    num_ranks, dp_size = sizes["pipeline"], sizes.get("replicate", 1) * sizes.get("shard", 1)
    size = config.micro_batch_size
    lengths = [
        part.stop - part.start for part in parts(config.global_batch_size, micro_batch_size=size, dp_rank=0, dp_size=dp_size)
    ]
    is_cut = len({*lengths}) > 1 and own_order is None
    count = len(lengths) - is_cut  # a shorter micro-batch has its own pass
    what = f"{count} micro-batch{'es' * (count != 1)} of {lengths[0]} sample{'s' * (lengths[0] != 1)}"
    if own_order is not None:
        order, about = own_order(num_ranks=num_ranks, num_micro_batches=count, **parallel)
        num_stages, asked, more = num_ranks, "", [about]
    else:
        (order, asked), num_stages = (
            order_of(name, num_ranks=num_ranks, num_micro_batches=count),
            len(owners(name, num_ranks=num_ranks)),
        )
        more = (
            [f"a micro-batch of {lengths[-1]} sample{'s' * (lengths[-1] != 1)} follows, in a separate pass"] if is_cut else []
        )
    if asked:
        more.append(
            f"{name} cannot run {count}, so the picture shows its plain kind; {name} takes {asked} (micro_batch_size decides)"
        )
    said = [
        f"{name}: {num_stages} stages on {num_ranks} process{'es' * (num_ranks != 1)}, {what} in a "
        f"{'pass' if own_order is None else 'step'}",
        *more,
    ]
    return PlannedPipeline(timetable(order), count, num_stages, said)
