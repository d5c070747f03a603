"""Metrics of torchmetrics over a split: each sample counts once, and the value is the same for any number of processes."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from framework.distributed.world import World
from framework.engine.seam import MicroBatch
from framework.modules.tensors import WIDEST, Tree, map_tensors
from framework.randomness import key, seed_generators
from framework.runtime.exits import Unfit

if TYPE_CHECKING:
    from torchmetrics import Metric

Pairs = Callable[[Any, Any], Any]  # turns outputs and targets into the arguments of a metric's update()
_LARGEST = 65536  # the largest number of numbers in a value


class _State(NamedTuple):
    """A metric's state in one process: its tensors, and what each micro-batch has added to its lists, by number."""

    num_updates: int
    tensors: dict[str, Tensor]
    lists: dict[str, list[tuple[int, list[Tensor]]]]


@dataclass(eq=False)
class _Part:
    """A metric, or a metric inside it. It records which micro-batch has added which elements to its lists."""

    metric: "Metric"
    _ends: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))  # micro-batch, length after it

    def note(self, number: int) -> None:
        for name, value in self.metric.metric_state.items():
            if isinstance(value, list):
                self._ends[name].append((number, len(value)))

    def state(self) -> _State:
        tensors, lists = dict[str, Tensor](), dict[str, list[tuple[int, list[Tensor]]]]()
        for name, value in self.metric.metric_state.items():
            if not isinstance(value, list):
                tensors[name] = value.cpu()
                continue
            starts = [0, *(end for _, end in self._ends[name])]
            lists[name] = [
                (number, map_tensors(Tensor.cpu, value[start:end])) for start, (number, end) in zip(starts, self._ends[name])
            ]
        return _State(self.metric._update_count, tensors, lists)

    def set(self, states: list[_State], *, device: torch.device) -> None:
        """Set the states of all processes: lists in the order of the micro-batches, tensors reduced."""
        for name in states[0].tensors:
            values = torch.stack([state.tensors[name].to(device) for state in states])
            reduce: Any = self.metric._reductions[name]
            setattr(self.metric, name, values[0] if len(states) == 1 else values if reduce is None else reduce(values))
        for name in states[0].lists:
            added = sorted((item for state in states for item in state.lists[name]), key=lambda item: item[0])
            elements = [element for _, elements in added for element in elements]
            setattr(self.metric, name, map_tensors(lambda tensor: tensor.to(device), elements))
        self.metric._update_count = sum(state.num_updates for state in states)

    def forget(self) -> None:
        self._ends.clear()


class Metrics:
    """The run's metrics by name. `pairs` makes the arguments of their updates. The random draws of a value depend on `seed`."""

    def __init__(self, metrics: "Mapping[str, Metric]", *, pairs: Pairs, device: torch.device, seed: int) -> None:
        self.by_name = dict(metrics)
        self._pairs, self._device, self._seed = pairs, device, seed
        self._parts = {name: [_Part(part) for part in parts_of(metric)] for name, metric in metrics.items()}
        for name, metric in self.by_name.items():
            metric.to(device).set_dtype(WIDEST[device.type])
            for part in self._parts[name]:
                part.metric.distributed_available_fn = lambda: False  # `compute` already has the states of all processes here

    def observe(self, outputs: Tree, micro_batch: MicroBatch) -> None:
        """Update every metric with a micro-batch of an evaluation. Unfit if a metric does not accept it."""
        for name, metric in self.by_name.items():
            try:
                given = self._pairs(outputs, micro_batch.targets)
                metric.update(**given) if isinstance(given, Mapping) else metric.update(*given)
            except Exception as error:
                raise Unfit(f"metric.{name}: does not take this task's outputs and targets: {_line(error)} "
                            "(predictions() of the task may give it others)") from error  # fmt: skip
            for part in self._parts[name]:
                part.note(micro_batch.number)

    def compute(self, *, world: World) -> dict[str, Any]:
        """Return the values over everything that all processes have observed since the last call, by column. Collective.

        Rank 0 alone receives the states, which may be all predictions of a split, and computes the values.
        """
        if not self.by_name:
            return {}
        everyone = world.agreement.to_rank_0({name: [part.state() for part in parts] for name, parts in self._parts.items()})
        columns = world.agreement.on_rank_0(lambda: self._values(everyone))
        for name, metric in self.by_name.items():
            for part in self._parts[name]:
                part.forget()
            metric.reset()
        return columns

    def _values(self, everyone: list[dict[str, list[_State]]]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for name, metric in self.by_name.items():
            for number, part in enumerate(self._parts[name]):
                states = [states[name][number] for states in everyone]
                if len(states) > 1:
                    part.set([state for state in states if state.num_updates] or states[:1], device=self._device)
            seed_generators(key(self._seed, "metric", name), devices=[self._device])
            try:
                columns |= dict(_columns(name, metric.compute()))
            except Exception as error:
                raise Unfit(f"metric.{name}: its value cannot be computed: {_line(error)} (see its documentation)") from error
        return columns


def parts_of(metric: "Metric") -> "list[Metric]":
    """Return a metric and the metrics inside it (of a wrapper or a collection)."""
    from torchmetrics import Metric

    return [part for part in metric.modules() if isinstance(part, Metric)]


def averaged_state(metric: "Metric") -> str:
    """Return the name of a state that torchmetrics would average over processes without weights; or an empty text."""
    from torchmetrics.utilities.data import dim_zero_mean

    averaged = (name for part in parts_of(metric) for name, reduce in part._reductions.items() if reduce is dim_zero_mean)
    return next(averaged, "")


def _columns(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a metric's value: numbers, and (nested) lists of numbers; for a dictionary, one for each key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _columns(f"{name}_{key}", item)
        return
    if isinstance(value, Tensor):
        if value.numel() > _LARGEST:
            raise ValueError(f"{name} has {value.numel():,} numbers, and a row can have {_LARGEST:,}")
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        yield name, [item for part in value for _, item in _columns(name, part)]
    elif isinstance(value, (int, float)):
        yield name, float(value)
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, not a number")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def finite(value: Any) -> Any:
    """Return a value of a row with null for each number that is not finite, because JSON has no such numbers."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
