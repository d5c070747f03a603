"""The plan of a run's memory: the bytes that each rank keeps between steps. The strategy is really built for each rank."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from framework.build import components
from framework.build.training import Builder
from framework.cli.plan_world import planned_world
from framework.modules.structure import freeze_parameters
from framework.modules.tensors import local
from framework.optim.optimizers import hidden_matrices, trainable
from framework.optim.turns import InTurns
from framework.optim.update import AveragedWeights
from framework.preflight.child import Found, in_child

KINDS_OF_BYTES = ("parameters", "buffers", "gradients", "optimizer", "average")
_COLORS = dict(zip(KINDS_OF_BYTES, ("#4c9be8", "#b0b8c0", "#63b97a", "#f0a04b", "#b58be0")))
_MOST_RANKS = 8  # the most ranks that are built
_COPIES = 5  # of the parameters, while a rank is built: two, the gradients, and two of the optimizer
_LEFT_OUT = ("not included: activations, gathered layers, messages in transit, and other memory of the strategy "
             "(such as older weights)")  # fmt: skip


@dataclass(frozen=True)
class PlannedMemory:
    """The bytes by kind, for each rank that was built. `num_ranks` is the number of all ranks."""

    ranks: dict[int, dict[str, int]]
    num_ranks: int

    def lines(self) -> list[str]:
        """Return a table, with one line per rank or per group of equal ranks, and what the table does not include."""
        kinds = [kind for kind in KINDS_OF_BYTES if any(found[kind] for found in self.ranks.values())]
        same: dict[str, list[int]] = {}
        for rank, found in self.ranks.items():
            values = [found[kind] for kind in kinds]
            same.setdefault("".join(f"{_shown(value):>14}" for value in [*values, sum(values)]), []).append(rank)
        lines = [f"{'ranks':>16}" + "".join(f"{name:>14}" for name in [*kinds, "together"])]
        lines += [f"{', '.join(map(str, ranks)):>16}{text}" for text, ranks in same.items()]
        if len(self.ranks) < self.num_ranks:
            lines.append(f"of {self.num_ranks} ranks, these {len(self.ranks)} were examined")
        return [*lines, _LEFT_OUT]

    def drawn(self) -> Any:
        """Return the figure: one bar per rank."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 1.3 + 0.32 * len(self.ranks)), layout="constrained")
        axes, left = figure.add_subplot(), [0.0] * len(self.ranks)
        most = max(sum(found.values()) for found in self.ranks.values())
        power = min(3, int(math.log(max(most, 1), 1024)))
        names = [f"rank {rank}" for rank in self.ranks]
        for kind in KINDS_OF_BYTES:
            sizes = [found[kind] / 1024**power for found in self.ranks.values()]
            if any(sizes):
                axes.barh(names, sizes, left=left, label=kind, color=_COLORS[kind], height=0.75)
                left = [before + size for before, size in zip(left, sizes)]
        axes.invert_yaxis()
        axes.set(xlabel=f"{_UNITS[power]}, without activations")
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
        return figure


_UNITS = ("bytes", "KiB", "MiB", "GiB")


def _shown(count: int) -> str:
    power = min(3, int(math.log(count, 1024))) if count else 0
    return f"{count / 1024**power:.2f} {_UNITS[power]}" if power else f"{count} bytes"


def planned_memory(build: Builder) -> PlannedMemory:
    """Return the bytes that ranks keep. Each rank is really built, one after the other, with storage, on the CPU.

    Raise ValueError if this needs more memory than is free, or if the strategy cannot be built without the other processes.
    """
    model = components.shapes_of(build.config.model, seed=build.config.seed)
    needed, free = (
        _COPIES * sum(parameter.nbytes for parameter in nn.Module.parameters(model)),
        psutil.virtual_memory().available,
    )
    if needed > free:
        raise ValueError(f"model: building a rank takes up to {_shown(needed)}, and {_shown(free)} are free here; draw a "
                         "smaller model with the same layer widths, or use a larger machine")  # fmt: skip
    count = build.config.launch.most_processes
    chosen = sorted({round(place * (count - 1) / (_MOST_RANKS - 1)) for place in range(_MOST_RANKS)})
    ranks = {}
    for rank in chosen:
        found, fate = in_child(partial(_kept, build, rank), is_silent=True)
        if fate:
            raise ValueError(f"parallel: rank {rank} cannot be built without the other processes: {fate}")
        ranks[rank] = found[0]
    return PlannedMemory(ranks, count)


def _kept(build: Builder, rank: int) -> Found:
    """Build a rank, take a step of zeros, and return its bytes by kind. Do not compile, because that writes into a folder."""
    trainer = build.config.trainer.model_copy(update={"compile": False})
    build = build.altered(world=planned_world(build, rank=rank), trainer=trainer)
    module = build.model(on_meta=build.is_sent and rank > 0)
    module.train()
    freeze_parameters(module, build.config.trainer.freeze)
    hidden = hidden_matrices(module)
    engine = build.engine(module)
    update = build.update(engine, trainable(engine.module, hidden=hidden), total_steps=1, epochs_before=lambda step: step)
    for name in [turn.name for turn in update.turns] or [""]:
        if isinstance(update.optimizer, InTurns):
            update.optimizer.turn = name
        for parameter in nn.Module.parameters(engine.module):
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        update.take(0, grad_norm=torch.zeros(()))
    return [bytes_by_kind(engine.module, update.optimizer, update.average)]


def bytes_by_kind(module: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Any) -> dict[str, int]:
    """Return this rank's bytes of parameters, buffers, gradients, optimizer state and averages."""
    parameters = [*nn.Module.parameters(module)]
    averages = average.tensors.values() if isinstance(average, AveragedWeights) else []
    found = (parameters, module.buffers(), (p.grad for p in parameters), optimizer.state.values(), averages)
    return dict(zip(KINDS_OF_BYTES, map(_bytes, found)))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return local(value).nbytes
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_bytes, value)) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else 0
