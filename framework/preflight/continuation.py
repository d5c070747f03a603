"""A second process that continues a run from its state without earlier computations, as after a restart."""

import math
import multiprocessing
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.build.training import Builder
from framework.checkpoint.plain_state import PlainState
from framework.engine.seam import Step
from framework.engine.sums import Sums
from framework.preflight.child import end_of
from framework.preflight.differences import same
from framework.preflight.findings import Finding, Refused, blamed
from framework.preflight.player import Player
from framework.preflight.training_samples import TrainingSamples, batch_tensors
from framework.runtime.exits import error_text, place_of
from framework.runtime.forks import begin_child

BEFORE, AFTER = (2.0, 1.0), (1.5,)  # factors of the rows that parts get before and after a save: a best value is from before


def validation_step(build: Builder, *, micro_batch_size: int | None = None) -> Step:
    """Return the first batch of the validation split."""
    with blamed("dataset", "its validation split cannot be fetched", "see dataset.*"):
        loader = build.loader(build.source("val"), "val", dp_rank=0, dp_size=1)
        loader.num_workers, loader.micro_batch_size = 0, micro_batch_size or loader.micro_batch_size
        return next(loader.evaluate())


class Computed(NamedTuple):
    """The results of a step: its sums, gradients and buffers, by name."""

    sums: Sums
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, player: Player, sums: Sums) -> "Computed":
        module = player.module
        return cls(
            {name: value.clone() for name, value in sums.items()},
            {name: p.grad.clone() if p.grad is not None else None for name, p in module.named_parameters()},
            {name: buffer.clone() for name, buffer in module.named_buffers()},
        )

    def first_difference(self, other: "Computed") -> str:
        """Return the first difference after the same step: a sum, a gradient or a buffer; an empty text if there is none."""
        for name, value in self.sums.items():
            if not same(value, other.sums[name]):
                return "the loss" if name == "loss" else name
        for name, mine in self.gradients.items():
            gradient = other.gradients[name]
            if (mine is None) != (gradient is None) or (mine is not None and gradient is not None and not same(mine, gradient)):
                return f"the gradient of {name}"
        return next((name for name, buffer in self.buffers.items() if not same(buffer, other.buffers[name])), "")


class Updated(NamedTuple):
    """The results of the updates of a step: the number of the later ones, the weights, and the columns of the parts."""

    num_more: int
    weights: dict[str, Tensor]
    columns: dict[str, Any]

    @classmethod
    def of(cls, player: Player, num_more: int) -> "Updated":
        return cls(num_more, _weights(player), player.columns)


class Evaluated(NamedTuple):
    """The results of an evaluation: its sums, the values of the metrics, and the weights if a part may have changed them."""

    sums: Sums
    measured: dict[str, Any]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, player: Player, sums: Sums) -> "Evaluated":
        return cls(sums, dict(player.measured), _weights(player) if player.parts.by_name else {})


def _weights(player: Player) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in player.module.named_parameters()}


class Continuation:
    """The second process. It forks immediately; nothing may have been computed before. Its exceptions are raised here too."""

    def __init__(self, build: Builder, *, run: Builder, index: int) -> None:
        """Fork. `index` is the number of the step to run."""
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(_Continued(build, run, index), theirs))
        self._process.start()
        theirs.close()

    def samples(self) -> tuple[list[Tensor], list[Tensor]]:
        """Load the validation split and then the training split; return samples of the first, and of another epoch."""
        validation, later = self._ask("samples")
        return list(validation), list(later)

    def restore(self, tensors: dict[str, Tensor], kept: PlainState) -> None:
        """Build the run's objects, and restore this state."""
        self._ask("restore", tensors, kept.model_dump())

    def step(self, index: int) -> Computed:
        """Run the second batch as the step with this number; return its results."""
        return self._ask("step", index)  # type: ignore[no-any-return]

    def twice(self, index: int) -> tuple[Sums, Sums]:
        """Run the step twice more, from the same state."""
        return self._ask("twice", index)  # type: ignore[no-any-return]

    def take(self, index: int, more: int) -> Updated:
        """Take the optimizer's step, and `more` updates with the same gradients; return the results."""
        return self._ask("take", index, more)  # type: ignore[no-any-return]

    def evaluate(self) -> Evaluated:
        """Evaluate a batch of the validation split; return the results."""
        return self._ask("evaluate")  # type: ignore[no-any-return]

    def numbers(self) -> dict[tuple[str, str], str]:
        """Return the numbers in plain attributes of the run's objects."""
        return self._ask("numbers")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _ask(self, what: str, *arguments: Any) -> Any:
        self._ours.send((what, _packed(arguments)))
        try:
            answer, fault = self._ours.recv()
        except EOFError:
            self._process.join()
            kind = MemoryError if self._process.exitcode == -signal.SIGKILL else RuntimeError
            raise kind(f"its second process {end_of(self._process.exitcode or 0)}") from None
        if isinstance(fault, Finding):
            raise Refused(fault.key, fault.what, fault.cure, is_certain=fault.refuses)
        if fault:
            raise RuntimeError(fault)
        return _unpacked(answer)


class _Continued:
    """The work of the second process."""

    def __init__(self, build: Builder, run: Builder, index: int) -> None:
        self._build, self._run, self._index = build, run, index

    def samples(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        validation = batch_tensors(validation_step(self._build))
        later, self._following = TrainingSamples(self._build, run=self._run).late(self._index)
        return tuple(validation), tuple(later)

    def restore(self, tensors: dict[str, Tensor], kept: dict[str, Any]) -> None:
        self._player = Player(self._build)
        self._player.restore(tensors, PlainState.model_validate(kept))

    def step(self, index: int) -> Computed:
        return Computed.of(self._player, self._player.forward_backward(self._following, index=index))

    def twice(self, index: int) -> tuple[Sums, Sums]:
        def once() -> Sums:
            with self._player.untouched():
                return self._player.forward_backward(self._following, index=index)

        return once(), once()

    def take(self, index: int, more: int) -> Updated:
        self._player.take(index)
        return Updated.of(self._player, self._player.take_more(more, first=index + 1, within_s=math.inf))

    def numbers(self) -> dict[tuple[str, str], str]:
        return self._player.numbers()

    def evaluate(self) -> Evaluated:
        return Evaluated.of(self._player, self._player.evaluate(validation_step(self._build), shares=AFTER))


def _serve(continued: _Continued, theirs: Connection) -> None:
    begin_child()
    with suppress(EOFError):
        while True:
            what, arguments = theirs.recv()
            answer: Any = None
            fault: Finding | str = ""
            try:
                answer = _packed(getattr(continued, what)(*_unpacked(arguments)))
            except Refused as refused:
                fault = refused.finding
            except Exception as error:
                fault = f"{error_text(error)} (at {place_of(error)})"
            theirs.send((answer, fault))


class _Packed(NamedTuple):
    """A tensor to send to another process: torch would share its memory, with one open file for each tensor."""

    content: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def _packed(tree: Any) -> Any:
    """Return a tree of tuples and dictionaries with its tensors packed."""
    if isinstance(tree, Tensor):
        flat = tree.detach().to("cpu").contiguous().reshape(-1)
        return _Packed(bytes(flat.view(torch.uint8).numpy()), tree.dtype, tuple(tree.shape))
    if isinstance(tree, dict):
        return {name: _packed(value) for name, value in tree.items()}
    if isinstance(tree, tuple):
        items = map(_packed, tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def _unpacked(tree: Any) -> Any:
    if isinstance(tree, _Packed):
        if not tree.content:
            return torch.empty(tree.shape, dtype=tree.dtype)
        return torch.frombuffer(bytearray(tree.content), dtype=tree.dtype).reshape(tree.shape)
    if isinstance(tree, dict):
        return {name: _unpacked(value) for name, value in tree.items()}
    if isinstance(tree, tuple):
        items = map(_unpacked, tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree
