"""The second half of a rehearsal: compare two steps with the run's strategy, on a few processes, with two on one process."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from framework.build.training import Builder
from framework.config.folders import option_node
from framework.config.schema import Node
from framework.config.targets import asked
from framework.distributed.mesh import resolve_axes
from framework.preflight.differences import other_column
from framework.preflight.player import SINGLE
from framework.preflight.processes import axes_of
from framework.preflight.ranks import fault_of_ranks, observe_ranks
from framework.preflight.sketches import far
from framework.preflight.two_steps import Seen, difference
from framework.runtime.problem import Problem, shown

_SMALL = 2  # processes along an axis
_MOST = 4  # the largest number of processes
_FIRST = ("pipeline", "tensor", "context", "expert", "shard", "replicate")  # the axes that cut most of the model come first
_ALIKE = "act alike on every process: loop.sum(), loop.any() or full_tensor() of local values; none of loop.is_padding"
_NONE = "launch.nproc_per_node=1: ddp and fsdp do not either"


def small_strategy(parallel: Node, *, num_processes: int) -> tuple[Node, int] | None:
    """Return the run's strategy on the smallest number of processes that shows its work, and this number.

    None if the run has one process, or if the strategy declares that it does not compute the same as one process.
    """
    options: Node | None = asked(parallel, "exact_options", otherwise=parallel)
    if options is None:
        return None
    sizes, count = dict[str, int](), 1
    degrees = resolve_axes(axes_of(options), world_size=num_processes)
    for axis in sorted(degrees, key=_FIRST.index):
        sizes[axis] = _SMALL if degrees[axis] > 1 and count * _SMALL <= _MOST else 1
        count *= sizes[axis]
    return ({"_target_": parallel["_target_"], **options, **sizes}, count) if count > 1 else None


def compare(build: Builder) -> list[Problem]:
    """Return why the run's strategy does not compute the same with this model as one process. `build` is a rehearsal's."""
    found = small_strategy(build.config.parallel, num_processes=build.config.launch.most_processes)
    return _Comparison(build, parallel=found[0], count=found[1]).findings() if found is not None else []


class _Comparison:
    """Two steps with a strategy on `count` processes, and on one process, in float64: rounding hides nothing there."""

    def __init__(self, build: Builder, *, parallel: Node, count: int) -> None:
        self._build, self._parallel, self._count, config = build, parallel, count, build.config
        # arrays are loaded once, as in a run; any other source by each process: it may hold files, threads or connections
        loaded = build.source("train")
        self._source = loaded if dataclasses.is_dataclass(loaded) else None
        double = config.precision.model_copy(update={"name": "fp64"})
        # three micro-batches: two processes do not have as many, and one of them repeats one as padding
        alone = build.altered(precision=double, global_batch_size=config.global_batch_size * 3 // 2, parallel=SINGLE)
        # statistics over all processes are those of one micro-batch
        self._alone = alone.altered(micro_batch_size=None) if config.trainer.sync_batchnorm else alone
        (self._expected,) = observe_ranks(self._alone, self._source, count=1)
        self._found = list[Problem]()  # beside the strategy's own fault
        inexact = {name: value for name, value in config.parallel.items() if parallel.get(name) is None}
        self._own = build.altered(parallel=parallel | inexact)  # in the run's own precision
        self._runs_so = False  # in this precision, without a fault

    def findings(self) -> list[Problem]:
        """Return the faults and warnings."""
        what = ""
        if self._expected.fault:  # for example a model that does not run in float64
            why = f"the strategy was not compared with one process: a step in float64 fails there: {self._expected.fault}"
            self._found.append(Problem("parallel", why, "a run starts without the comparison", is_warning=True))
        else:
            what = self._fault(self._parallel, then=self._own)
        if (is_equal := not what) and not self._runs_so:
            what = self._failure(self._own.config.parallel)
        found = [*self._found]  # what is tried below may find more
        if what and all(finding.is_warning for finding in found):
            found.append(self._explained(what, is_equal=is_equal))
        return found

    def _fault(
        self, node: Node, *, alone: Builder | None = None, expected: Seen | None = None, then: Builder | None = None
    ) -> str:
        """Return what a strategy computes otherwise than one process, or why it fails; "": neither."""
        alone, expected = alone or self._alone, expected or self._expected
        ranks = self._ranks(alone.altered(parallel=node), like=expected, then=then)
        # a fault in processes that have computed before may have this cause
        self._runs_so |= bool(later := ranks[0].then) and not (fault_of_ranks(later) or _lost(later) or later[0].finding)
        if first := fault_of_ranks(ranks):
            why = " (its forwards do not all enter the same modules)" if expected.do_part else ""
            return f"a step on {self._count} processes fails with this model{why}: {first}"
        differing = difference(expected, ranks)
        if differing and any(map(other_column, ranks[0].rows, expected.rows)):
            (again,) = observe_ranks(alone, self._source, count=1, like=expected)  # a column of a clock differs each time
            differing = difference(expected, ranks, but_not=again)
        return differing and f"{self._count} processes compute different results with this model than one process: {differing}"

    def _failure(self, node: Node) -> str:
        """Return why a step in the run's own precision fails: what float64 makes equal may not be: a parameter, a cast."""
        ranks = self._ranks(self._build.altered(parallel=node), like=Seen(num_updates=1))
        if first := fault_of_ranks(ranks):
            return f"a step in {self._build.config.precision.name} on {self._count} processes fails: {first}"
        if lost := _lost(ranks):
            self._found.append(Problem("parallel", f"{self._count} processes {lost}", "parallel.hook=null"))
        return ""

    def _ranks(self, build: Builder, *, like: Seen, is_watched: bool = False, then: Builder | None = None) -> list[Seen]:
        ranks = observe_ranks(build, self._source, count=self._count, like=like, is_watched=is_watched, then=then)
        self._found.extend(Problem(*rank.finding) for rank in ranks[:1] if rank.finding is not None)
        return ranks

    def _is_equal(self, alone: Builder) -> bool:
        (computed,) = observe_ranks(alone, self._source, count=1)
        return not computed.fault and not self._fault(self._parallel, alone=alone, expected=computed)

    def _explained(self, what: str, *, is_equal: bool) -> Problem:
        """Return a fault with what causes it, and the remedy. `is_equal`: in float64 there is none."""
        alone, parallel, config = self._alone, self._parallel, self._build.config
        if self._expected.fault or is_equal:  # it is of the run's own precision
            return Problem("parallel", what, _cure(_others(parallel), self._failure))
        watched = self._ranks(alone.altered(parallel=parallel), like=self._expected, is_watched=True)
        if asking := next((rank.asks for rank in watched if rank.asks), ""):
            cure = "an option of that code that leaves the processes to the strategy, such as sync=false"
            return Problem("model", f"{what}; its own code asks torch.distributed: {asking}", cure)
        if "pipeline" in parallel and (crossing := next((rank.crossing for rank in watched if rank.crossing), "")):
            what = f"{what}; {crossing} uses a tensor of an earlier stage, which has not been handed from block to block"
        for name in config.part:
            if self._is_equal(alone.altered(part={other: node for other, node in config.part.items() if other != name})):
                return Problem(f"part.{name}", f"{what}; without it, they compute the same", _ALIKE)
        own = asked(parallel, "remedies", otherwise=())
        options = [*((_line(remedy), parallel | remedy) for remedy in own), *_others(parallel)]
        with _without_dropout():
            is_dropout = self._is_equal(alone)
        if is_dropout:
            why = "without dropout, they compute the same: each would drop values of its own part of an activation"
            return Problem("parallel", f"{what}; {why}", f"no dropout, or {_cure(options, self._fault)}")
        sgd = alone.altered(optimizer=option_node("optimizer", "sgd") | {"lr": 1e-3})
        if not config.optimizer.get("turns") and self._is_equal(sgd):
            why = "with optimizer=sgd they compute the same: this one needs whole tensors, or several, or it amplifies rounding"
            return Problem("optimizer", f"{what}; {why}", _cure(options, self._fault))
        one_unit = alone.altered(model=config.model | {"parts": {**(config.model.get("parts") or {}), "blocks": []}})
        if "DTensor" in what and not self._fault(parallel, alone=one_unit):
            cure = "model.parts.blocks=[], because its code uses the weights of a block outside the block's forward"
            return Problem("parallel", what, cure)
        return Problem("parallel", what, _cure(options, self._fault))


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Let torch's functions drop nothing, in this process and in those that it forks."""
    functional: Any = nn.functional
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def attend(*given: Any, dropout_p: float = 0.0, **named: Any) -> Any:  # it is the fifth argument
        return attention(*given[:4], *(0.0 for _ in given[4:5]), *given[5:], **named)

    functional.dropout, functional.scaled_dot_product_attention = lambda input, *_, **__: input, attend
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention


def _cure(options: list[tuple[str, Node]], fault: Callable[[Node], str]) -> str:
    """Return the text of the first of these strategies without a fault."""
    return next((line for line, node in options if not fault(node)), _NONE)


def _lost(ranks: list[Seen]) -> str:
    """Return what the ranks compute otherwise after a save and a restore, or an empty text."""
    for rank in ranks:
        if rank.restored and (differing := far(rank.gradients[-1], rank.restored, what="the gradient of", tolerance=1e-4)):
            return f"keep something that no checkpoint holds: restored from one, {differing}"
    return ""


def _others(parallel: Node) -> list[tuple[str, Node]]:
    """Return the strategies for most models, with their texts for the command line. Zero saves memory as a sharded one does."""
    nodes = {name: option_node("parallel", name) for name in (*(["zero"] if "shard" in parallel else []), "ddp", "fsdp")}
    return [(" ".join(filter(None, [f"parallel={name}", _line(more)])), node | more)
            for name, node in nodes.items() for more in ({}, *asked(node, "remedies", otherwise=()))]  # fmt: skip


def _line(options: Node) -> str:
    return " ".join(f"parallel.{key}={shown(value)}" for key, value in options.items())
