"""The run's own trainer in a rehearsal: with small steps, in a folder of its own, and with a name for what is to blame."""

import functools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from framework.build.training import Builder
from framework.checkpoint.canonical import misfit, restore, state_tensors
from framework.checkpoint.format import dtype_name
from framework.checkpoint.manifest import directory_name
from framework.checkpoint.plain_state import NotSerializable, plain_state_of
from framework.checkpoint.state import stored_plain_state
from framework.config.schema import Node
from framework.data.loader import Loader, Splits
from framework.data.source import Selected, Source, Split
from framework.engine.engine import Engine
from framework.engine.seam import Step
from framework.engine.sums import Sums
from framework.modules.tensors import local
from framework.optim.update import Update
from framework.preflight.differences import Place, plain_numbers
from framework.preflight.refused import Refused, blamed
from framework.runs.metrics_file import MACHINE, Row
from framework.runtime.exits import Diverged, Unfit
from framework.training.parts import LoopParts
from framework.training.speed import Speed

SINGLE: Node = {"_target_": "framework.parallel.parallelize.parallelize"}
_STEP_FAILS = "a step fails", "does it run in a plain script? then please report it"
_BLAMED = {  # by the phase of the loop; in other phases, the model
    "optimizer": ("optimizer", "its step fails", "see the optimizer's own documentation"),
    "loop": ("task", "its metrics fail on a batch of this dataset", "a task that fits the model"),
    "evaluation": ("model", "an evaluation fails", "does it run in a plain script? then please report it"),
}


def _require_own_memory(tensors: Mapping[str, Tensor], *, key: str, cure: str) -> None:
    """Refuse two tensors in the same memory: after a restore or sharding, they would have separate memory."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        memory = local(tensor).data_ptr()  # 0: it has no memory
        first = names.setdefault(memory, name)
        if first != name and memory:
            raise Refused(key, f"{first} and {name} share their memory: a restore or a shard would separate them", cure)


def in_whole_batches(build: Builder, source: Source) -> Builder:
    """Return a rehearsal's builder that leaves out a short last batch, if there is a whole one: the run has its own sizes."""
    return build.altered(drop_last=len(source) >= build.config.global_batch_size)


class Watch:
    """The gradients of a step, by turn, before a part or the clipping changes them. It can give them again in later steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._train, self._evaluate = engine, engine.train, engine.evaluate
        engine.train, engine.evaluate = self._watch_step, self._watch_evaluation  # type: ignore[method-assign]
        self.repeats = False  # whether a step gets the gradients of the last other step, and nothing is computed
        self.factor = 1.0  # of these gradients
        self.sums: dict[str, Sums] = {}
        self.gradients: dict[str, dict[str, Tensor | None]] = {}
        self.computed: set[nn.Parameter] = set()  # by the latest backward pass: their gradients
        self.around: AbstractContextManager[Any] = nullcontext()  # around the computation of gradients
        self.around_evaluation: AbstractContextManager[Any] = nullcontext()

    def _watch_step(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        parameters = dict(self._engine.module.named_parameters())
        if self.repeats:
            for name, gradient in self.gradients[step.turn].items():
                parameters[name].grad = gradient * self.factor if gradient is not None else None
            return self.sums[step.turn]
        with self.around:
            sums = self._train(step, index=index, loss_scale=loss_scale, measure=measure)
        self.computed = {parameter for parameter in parameters.values() if parameter.grad is not None}
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        if sparse := [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]:
            raise Refused("model", f"{sparse[0]} has a sparse gradient, which is not supported", "sparse=False")
        if step.turn not in self.gradients:  # a part may compute them again
            self.sums[step.turn] = {name: value.clone() for name, value in sums.items()}
            self.gradients[step.turn] = {n: g.detach().clone() if g is not None else None for n, g in gradients.items()}
        return sums

    def _watch_evaluation(self, step: Step) -> Sums:
        with self.around_evaluation:
            sums = self._evaluate(step)
        training = [name or "the model" for name, part in self._engine.module.named_modules() if part.training]
        if training and not getattr(self._engine.forward.task, "evaluates_in_training_mode", False):
            what = f"an evaluation puts {training[0]} into training mode and leaves it there"
            raise Refused("model", what, "leave modes to the loop")
        return sums


class _Stage(Builder):
    """A builder of a rehearsal's trainer. Exceptions in the user's code become findings."""

    watch: Watch

    def engine(self, module: nn.Module) -> Engine:
        engine = super().engine(module)
        self.watch = Watch(engine)
        return engine

    def splits(self, *, dp_rank: int = 0, dp_size: int = 1) -> Splits:
        return replace(super().splits(), load=partial(self._small, dp_rank=dp_rank, dp_size=dp_size))

    def _small(self, split: Split, *, dp_rank: int, dp_size: int) -> Loader:
        """Return the loader of the training split, or of the first batch of another split."""
        stored: Split = split if self.config.trainer.overfit_batches is None else "train"
        source, build = self.source(stored), self
        if split == "train":
            build = in_whole_batches(self, source)  # type: ignore[assignment]
        else:
            source = Selected(source, np.arange(min(len(source), self.config.global_batch_size)))
        loader = build.loader(source, split, dp_rank=dp_rank, dp_size=dp_size)
        loader.num_workers = 0
        return loader

    def parts(self, engine: Engine, update: Update, **named: Any) -> LoopParts:
        return super().parts(engine, update, **named | {"blame": self._of_part})

    @contextmanager
    def _of_part(self, name: str) -> Iterator[None]:
        """Blame a part for its exceptions, and refuse it if it brings back a gradient that has been taken away.

        A ValueError already says what is wrong with the part's arguments.
        """
        key, removed = f"part.{name}", [parameter for parameter in self.watch.computed if parameter.grad is None]
        with blamed(key, "it fails in a rehearsal", "see docs/training.md"):
            try:
                yield
            except ValueError as error:
                raise Unfit(f"{key}.{error}") from error
        if any(parameter.grad is not None for parameter in removed):
            what = "it brings back the gradient of a parameter that its turn or an earlier part does not train in this step"
            raise Refused(key, what, "leave gradients that are None; loop.recompute() does")

    def stopwatch(self) -> Speed:
        return Speed(self.world.device)


class Player:
    """A rehearsal's trainer. `sources` are the splits that are loaded already. Without a `folder`, it makes its own."""

    def __init__(self, build: Builder, *, sources: Mapping[Split, Source], folder: Path | None = None) -> None:
        run = build.config.run
        place = folder if folder is not None else tempfile.mkdtemp(dir=run.dir)
        self._stage = _Stage(build.config, world=build.world).altered(run=run.model_copy(update={"dir": str(place)}))
        self._stage.loaded |= sources
        with blamed("model", "it, or its optimizer, cannot be built", "does a plain script build them? then please report it"):
            self.trainer = self._stage.trainer()
        self.engine, self.update, self.parts = self.trainer.engine, self.trainer.update, self.trainer.parts
        self.module, self.task, self.watch = self.engine.module, self._stage.task, self._stage.watch
        _require_own_memory(dict(self.module.named_parameters()), key="model", cure="assign the parameter, not its .data")
        self.rows: list[Row] = []
        self.diverged = ""  # why a row was not finite
        self.trainer.recorder.log = self._log  # type: ignore[method-assign]
        self._shares: Sequence[float] = ()
        self._evaluated, self.parts.evaluated = self.parts.evaluated, self._call_parts  # type: ignore[method-assign]

    def _log(self, row: Row) -> None:
        self.rows.append({name: value for name, value in row.items() if name not in MACHINE})

    def _call_parts(self, split: str, row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        columns: list[tuple[str, dict[str, Any]]] = []
        for share in self._shares:
            shown = {name: value * share if isinstance(value, float) else value for name, value in row.items()}
            columns = self._evaluated(split, shown)
        return columns

    @contextmanager
    def _blamed(self, split: str, of_model: tuple[str, str] = _STEP_FAILS) -> Iterator[None]:
        """Blame the object that the trainer was using for an exception. A row of numbers that are not finite is a row here."""
        try:
            yield
        except Diverged as error:
            self.diverged = str(error)
            self.rows.append({"step": self.trainer.progress.step, "split": split, "loss": math.nan})
        except Exception:
            with blamed(*_BLAMED.get(self.trainer.speed.phase, ("model", *of_model))):
                raise

    def begin(self, index: int) -> tuple[Step, Iterator[Step]]:
        """Start at a step with this number: return it, and an iterator of the following steps. Collective."""
        order, progress = self.trainer.splits.loader("train").order, self.trainer.progress
        for _ in range(index):
            progress.samples_seen += order.size(progress.samples_seen)
        progress.step = index
        steps = self.trainer.begin()
        return next(steps), steps

    def gradients(self, step: Step, *, index: int, measure: bool = True) -> Sums:
        """Compute the gradients of a step's first turn (without turns, of all parameters), and change nothing else."""
        turn = next((turn.name for turn in self.update.turns), "")
        return self.engine.train(step._replace(turn=turn), index=index, loss_scale=1.0, measure=measure)

    def take(self, step: Step, *, of_model: tuple[str, str] = _STEP_FAILS) -> None:
        """Take a step and log its row, as the run does. `of_model`: what a failure means, and the remedy."""
        self.watch.gradients.clear()
        with self._blamed("train", of_model):
            self.trainer.take(step)
            self.parts.can_save(is_ending=False)

    def repeat(self, step: Step, count: int, *, within_s: float) -> int:
        """Take `count` more steps by the last gradients, fewer if they take long; return their number. Collective."""
        first, until, self.watch.repeats = self.trainer.progress.step, time.monotonic() + within_s, True
        while self.trainer.progress.step < first + count and time.monotonic() < until:
            self.advance(step)
        self.watch.repeats = False
        return self.trainer.progress.step - first

    def advance(self, step: Step) -> None:
        """Take a step that has no row."""
        with self._blamed("train"):
            self.trainer.train_step(step, measure=False)

    def evaluate(self, *, shares: Sequence[float], splits: Sequence[Split] = ("val",)) -> None:
        """Evaluate the first batch of validation splits; for each share, call the parts with a row times this share."""
        self._shares = shares
        for split in splits:
            with self._blamed(split):
                self.trainer.evaluate(split)

    @property
    def _holders(self) -> dict[str, Any]:
        """The run's objects, by key."""
        holders: dict[str, Any] = {"model": self.module, "task": self.task, "optimizer": self.update.optimizer}
        holders |= {"part": SimpleNamespace(loop=self.parts.loop)}
        holders |= {f"metric.{name}": metric for name, metric in self.trainer.tracker.metrics.by_name.items()}
        return holders | {f"part.{name}": part for name, part in self.parts.by_name.items()}

    def numbers(self) -> dict[Place, str]:
        """Return the numbers in plain attributes of the run's objects, by key and path: they may explain a fault."""
        return plain_numbers(self._holders) | {Place("part", "loop.lr_share"): repr(self.update.lr_share)}

    def replace_number(self, place: Place, number: int) -> None:
        """Put a number, as one of the same type, in a plain attribute; a flag becomes the other. TypeError for a tensor."""
        *above, name = place.path.split(".")
        holder = functools.reduce(getattr, above, self._holders[place.key])
        before = getattr(holder, name)
        if not isinstance(before, (bool, int, float)):
            raise TypeError(f"{name} is a {type(before).__name__}")
        setattr(holder, name, not before if isinstance(before, bool) else type(before)(number))

    def save(self) -> Path:
        """Save a checkpoint, as the run does; return its path. Refused if a checkpoint cannot hold all of it. Collective."""
        trainer = self.trainer
        with blamed("part", "its state cannot be saved", "see docs/training.md"):
            try:
                plain_state_of(trainer.held, initial=self.update.initial)
            except NotSerializable as error:
                what = f"its state, or the model's extra state, holds {error}, which no checkpoint can hold"
                raise Refused("optimizer", what, "keep numbers, text and tensors, in lists or dictionaries") from None
            tensors = state_tensors(trainer.held)
            of_optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
            _require_own_memory(of_optimizer, key="optimizer", cure="keep a tensor for each parameter")
            if odd := [name for name, tensor in tensors.items() if dtype_name(tensor.dtype) is None]:
                what = f"{odd[0].partition('/')[2]} is {tensors[odd[0]].dtype}, a type that no checkpoint supports"
                raise Refused("model", what, "precision=fp32, or a real tensor of two parts (torch.view_as_real)")
            trainer.commit(is_scheduled=True)
        return trainer.saver.store.directory / directory_name(trainer.progress.step)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint, as the run does. Collective."""
        trainer, world = self.trainer, self.trainer.world
        _, state = trainer.saver.store.named(path)
        if fault := misfit(path, trainer.held, world=world):
            name = fault.split()[0].partition("/")[2]
            what = f"{name} appears, or changes its shape, in training: no run could continue"
            raise Refused("model", what, "make it in the constructor, in its full size")
        with blamed("optimizer", "its state cannot be restored", "load_state_dict() accepts the result of state_dict()"):
            restore(path, stored_plain_state(state), trainer.held, world=world)
        trainer.load_state_dict(state)
        trainer.speed.begin(step=trainer.progress.step, samples_seen=trainer.progress.samples_seen)
