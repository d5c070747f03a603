"""Parts of a run: objects of the user's own that the loop calls at named moments, and what they see of the loop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from framework.checkpoint.kept import Unkept, decoded, encoded
from framework.checkpoint.state import Progress
from framework.data.source import Dataset
from framework.distributed.world import World
from framework.engine.buffers import Buffers
from framework.engine.seam import Engine, Step
from framework.engine.sums import Sums, means, weight_of
from framework.modules.structure import in_eval_mode
from framework.modules.tensors import Tree, gradient_of, map_tensors, whole
from framework.optim.update import Update
from framework.randomness import generator_states, key, seed_generators, set_generator_states
from framework.runs.metrics_file import NOT_CURVES
from framework.runtime.exits import Unfit
from framework.training.evaluation import totals
from framework.training.guard import Guard

MOMENTS = ("begun", "step_begun", "gradients_ready", "step_taken", "row", "evaluated", "saving", "ended")
ANSWERS = ("batch", "batch_size", "average_share")  # pure functions: what the loop asks
Blame = Callable[[str], AbstractContextManager[None]]


class Loop:
    """What a part sees of the loop, and can ask of it. Every rank is at the same moment, and must ask for the same."""

    def __init__(
        self, *, world: World, engine: Engine, dataset: Dataset, update: Update, directory: Path, seed: int, total_steps: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.engine, self.dataset, self.optimizer, self.directory = engine, dataset, update.optimizer, directory
        self.seed, self.total_steps, self.progress = seed, total_steps, progress
        self.has_row = False  # the step under way gets a row of metrics.jsonl
        self.stopped = ""  # why a part has ended the run
        self._world, self._loss_scale = world, update.loss_scale
        self._buffers = Buffers(*(module for module in (engine.module, engine.task) if module is not None))
        self._sums: Sums = {}
        self._under_way = Step(0, 1, [])

    @property
    def step(self) -> int:
        """The optimizer steps taken."""
        return self.progress.step

    @property
    def samples_seen(self) -> int:
        """The samples in the steps taken, over all processes."""
        return self.progress.samples_seen

    @property
    def wall_s(self) -> float:
        """The seconds that the run has taken by its last row or checkpoint, over all its starts; by this rank's clock."""
        return self.progress.wall_s

    @property
    def turn(self) -> str:
        """The turn (optimizer.turns) whose gradients are ready; empty without turns."""
        return self._under_way.turn

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, under the model's own names: its tensors may be shards (DTensor)."""
        return self.engine.module

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes files."""
        return self._world.rank == 0

    @property
    def is_padding(self) -> bool:
        """Whether the micro-batch that is going through the model does not count: another rank's, repeated."""
        return self.engine.is_padding

    @property
    def device(self) -> torch.device:
        return self._world.device

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters of this rank by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def loss(self) -> float:
        """Return the loss of the step under way, over the whole global batch, once its gradients are ready. Collective."""
        mine = {name: value for name, value in self._sums.items() if name in ("loss", weight_of("loss"))}
        return means(totals(mine, world=self._world), num_samples=self._under_way.num_samples)["loss"]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of a tensor of any shape, on the CPU, in float64. Collective."""
        return self._world.agreement.sum(values.detach().double().cpu())

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of the ranks. Collective. For small values: see `distinct`."""
        return self._world.agreement.gather(value)

    def distinct(self, value: Any) -> list[Any]:
        """Return the different values that ranks have, plain data, in the order of the first rank with each. Collective.

        Many ranks with the same names, for example, cost no more than one.
        """
        return list(self._world.agreement.distinct(value).values())

    def any(self, flag: bool) -> bool:
        """Return whether any rank's `flag` is true: the way to decide by what ranks see differently. Collective."""
        return bool(self.sum(torch.tensor(float(flag))))

    def gradient_norms(self) -> dict[str, float]:
        """Return the L2 norm of every trained parameter's whole gradient, by name, on every rank. Collective."""
        found = {name: gradient_of(p) for name, p in self.trained().items()}
        norms = {name: whole(torch.linalg.vector_norm(g)) for name, g in found.items() if g is not None}
        mine = dict(zip(norms, torch.stack(list(norms.values())).tolist() if norms else []))
        return {name: norm for part in self.distinct(mine)[::-1] for name, norm in part.items()}

    def recompute(self) -> None:
        """Take the step's gradients anew, of the same batch and the same draws, with the weights as they are now. Collective.

        When the gradients are ready; buffers such as running statistics do not move a second time.
        """
        step, before = self._under_way, self._buffers.values()
        parameters = list(self.trained().values())
        for parameter in parameters:
            parameter.grad = None
        scale = self._loss_scale.value
        sums = self.engine.forward_backward(step, index=self.step, loss_scale=scale, measure=False)
        self.engine.weigh(sums, num_samples=step.num_samples)
        self._loss_scale.unscale(parameters)
        self._buffers.set(before)

    def outputs(self, inputs: Tree) -> Tree:
        """Return what the model returns for the same inputs on every rank, without gradients. Collective."""
        states = generator_states(devices=[self.device])
        outputs = self.engine.outputs(map_tensors(lambda tensor: tensor.to(self.device), inputs))
        set_generator_states(states, devices=[self.device])  # so that the part draws on
        return outputs

    def stop(self, why: str) -> None:
        """End the run after this step, as finished: evaluated, and saved. It is enough that one rank asks."""
        self.stopped = self.stopped or why


class LoopParts:
    """A run's parts by name, in their order. Each moment is collective.

    What a part draws at a moment is drawn by the run's seed, the part's name, the moment and the step. `blame` surrounds
    each call.
    """

    def __init__(
        self, parts: Mapping[str, Any], loop: Loop, guard: Guard, *, blame: Blame = lambda name: nullcontext()
    ) -> None:
        self.loop, self.by_name, self._guard, self._blame = loop, dict(parts), guard, blame
        self._at = {moment: list(self._having(moment)) for moment in (*MOMENTS, "batch")}
        self._each("begun")

    def _having(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        return ((name, found) for name, part in self.by_name.items() if callable(found := getattr(part, method, None)))

    def _each(self, moment: str, *arguments: Any) -> list[Any]:
        returned = []
        for name, call in self._at[moment]:
            seed_generators(key(self.loop.seed, "part", name, moment, self.loop.step), devices=[self.loop.device])
            with self._blame(name):
                returned.append(call(self.loop, *arguments))
        return returned

    def begin_step(self, step: Step, *, has_row: bool) -> Step:
        """Begin a step, and return it as the parts change its batches."""
        self.loop.has_row = has_row
        self._each("step_begun")
        for name, change in self._at["batch"]:
            changed = []
            for micro_batch in step.micro_batches:
                number = micro_batch.number
                seed_generators(key(self.loop.seed, "part", name, "batch", self.loop.step, number), devices=[self.loop.device])
                with self._blame(name):
                    inputs, targets = change(self.loop, micro_batch.inputs, micro_batch.targets)
                changed.append(micro_batch._replace(inputs=inputs, targets=targets))
            step = step._replace(micro_batches=changed)
        return step

    def gradients_ready(self, sums: Sums, step: Step) -> None:
        """The gradients are those of the whole global batch, and not yet clipped."""
        self.loop._sums, self.loop._under_way = sums, step
        self._each("gradients_ready")

    def step_taken(self) -> None:
        self._each("step_taken")
        self._guard.step_taken()

    def columns(self) -> dict[str, Any]:
        """Return what the parts add to a training row. Unfit for what is no number, and for a name that is taken."""
        found: dict[str, Any] = {}
        for (part, _), columns in zip(self._at["row"], self._each("row")):
            for column, value in columns.items():
                value = value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
                if not isinstance(value, (bool, int, float, str, list, type(None))) or (
                    isinstance(value, list) and not all(isinstance(item, (int, float, list)) for item in value)
                ):
                    raise Unfit(
                        f"part.{part}: its column {column} is a {type(value).__name__} (a number, or a list of numbers)"
                    )
                if column in found or column in (*NOT_CURVES, "loss"):
                    raise Unfit(f"part.{part}: its column {column} is another's (a name of its own)")
                found[column] = value
        return found

    def agree_on_end(self) -> None:
        """Let every rank know that a part, on any of them, has stopped the run."""
        if self.by_name and self.loop.any(bool(self.loop.stopped)):
            self.loop.stopped = next(filter(None, self.loop.distinct(self.loop.stopped)))

    def evaluating(self) -> None:
        """A split is about to be measured."""
        self._guard.evaluating()

    def evaluated(self, split: str, row: Mapping[str, Any]) -> None:
        """A split has been measured; the weights that were evaluated are still in place."""
        if self._at["evaluated"]:
            with in_eval_mode(self.loop.module):
                self._each("evaluated", split, row)
            self.agree_on_end()
        self._guard.evaluated(split)

    def saving(self) -> None:
        self._each("saving")
        self._guard.saving(self._declared)

    def ended(self) -> None:
        self._each("ended")

    # --- state

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in the parts' states, as NAME/PATH."""
        return {path: value for path, value in self._leaves() if isinstance(value, Tensor)}

    def plain(self) -> dict[str, Any]:
        """Return the rest of the parts' states, as NAME/PATH, encoded. Unfit for what is no plain value."""
        kept: dict[str, Any] = {}
        for path, value in self._leaves():
            try:
                kept |= {path: encoded(value)} if not isinstance(value, Tensor) else {}
            except Unkept as error:
                key = path.replace("/", ".")
                raise Unfit(
                    f"part.{key}: is {error}, which no checkpoint can hold (numbers, text, tensors, in lists or dictionaries)"
                ) from None
        return kept

    def give_back(self, plain: Mapping[str, Any], late: Mapping[str, Tensor]) -> None:
        """Give the parts their states; most tensors have been loaded in place, `late` has the others."""
        for name, state_dict in self._having("state_dict"):
            kept = {path.partition("/")[2]: decoded(value) for path, value in plain.items() if path.split("/")[0] == name}
            with self._blame(name):
                state = state_dict() | kept
                for path, tensor in late.items():
                    part, _, entry = path.partition("/")
                    within, _, inner = entry.partition("/")
                    if part == name and inner and entry not in state:
                        state[within] = {**(state[within] if isinstance(state.get(within), dict) else {}), inner: tensor}
                    elif part == name:
                        state[entry] = tensor
                self.by_name[name].load_state_dict(state)

    def _declared(self) -> dict[str, list[Any]]:
        extra = self.loop.module.state_dict(keep_vars=True).values()
        found = {"model": [value for value in extra if not isinstance(value, Tensor)]}
        for path, value in self._leaves():
            found.setdefault(f"part.{path.partition('/')[0]}", []).append(value)
        return found

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for name, state_dict in self._having("state_dict"):
            with self._blame(name):
                state = state_dict()
                if not isinstance(state, dict):
                    raise Unfit(f"part.{name}: state_dict() returns a {type(state).__name__} (a dictionary)")
            for entry, value in state.items():
                if isinstance(value, dict) and value and all(isinstance(item, Tensor) for item in value.values()):
                    yield from ((f"{name}/{entry}/{inner}", item) for inner, item in value.items())
                else:
                    yield f"{name}/{entry}", value
