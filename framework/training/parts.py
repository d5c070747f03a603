"""Parts of a run: objects of the user that the loop calls at named moments."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from torch import Tensor, nn

from framework.checkpoint.plain_state import NotSerializable, decoded, encoded
from framework.engine.seam import Step
from framework.engine.sums import Sums
from framework.modules.structure import in_eval_mode
from framework.randomness import key, seed_generators
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import version_of
from framework.training.loop_view import Loop

MOMENTS = ("begun", "step_begun", "gradients_ready", "step_taken", "row", "evaluating", "evaluated", "saving", "ended")
ANSWERS = ("batch", "batch_size", "average_share", "observe", "can_save")  # methods that are called at other times
_IN_STEPS = ("begun", "step_begun", "batch", "gradients_ready", "step_taken", "can_save")  # a part may stop the run in any step
Blame = Callable[[str], AbstractContextManager[None]]


class LoopParts:
    """A run's parts by name, in their order, and then those of the strategy. Each moment is collective.

    A part's random draws at a moment depend on the run's seed, the part's name, the moment and the step. `blame` surrounds each
    call.
    """

    def __init__(
        self, parts: Mapping[str, Any], loop: Loop, *, blame: Blame = lambda name: nullcontext(), by_clock: bool = False
    ) -> None:
        """`by_clock`: it is the time that decides when the run evaluates."""
        self.loop, self._blame = loop, blame
        learning = [name for name, part in parts.items() if hasattr(part, "evaluated") and hasattr(part, "state_dict")]
        if by_clock and learning:
            what = "keeps what it sees of evaluations; trainer.eval_every is a time, so it would not compute the same again"
            raise Unfit(f"part.{learning[0]}: {what} (steps, epochs, samples or tokens)")
        of_task = {f"task:{name}": part for name, part in getattr(loop.task, "parts", {}).items()}
        self.by_name = {**parts, **{f"parallel:{name}": part for name, part in loop.engine.parts.items()}, **of_task}
        self._may_stop = any(hasattr(part, moment) for part in (*parts.values(), *of_task.values()) for moment in _IN_STEPS)
        self._may_stop_in_rows = self._may_stop or any(hasattr(part, "row") for part in parts.values())
        self._shards = {name: p for name, p in loop.trained().items() if hasattr(p, "device_mesh")}
        self._at = {moment: list(self._having(moment)) for moment in (*MOMENTS, "batch", "can_save")}
        hooks = self._hooks()
        self._each("begun")
        loop.has_begun = True
        observing = [part for part in self.by_name.values() if hasattr(part, "evaluating") or hasattr(part, "observe")]
        keeps = any(type(module).get_extra_state is not nn.Module.get_extra_state for module in self._modules())
        keeps |= bool(observing) or self._hooks() > hooks or hasattr(loop.task, "measured")
        self.can_break_off = not loop.any(keeps)  # nobody keeps what it sees of an evaluation; a rank may have only a stage

    def _modules(self) -> Iterator[nn.Module]:
        roots = (root for root in (self.loop.module, self.loop.task) if isinstance(root, nn.Module))
        return (module for root in roots for module in root.modules())

    def _hooks(self) -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules())

    def _having(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        return ((name, found) for name, part in self.by_name.items() if callable(found := getattr(part, method, None)))

    def _each(self, moment: str, *arguments: Any) -> list[Any]:
        return [self._call(moment, name, call, *arguments) for name, call in self._at[moment]]

    def _call(self, moment: str, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        seed_generators(key(self.loop.seed, "part", name, moment, self.loop.step), devices=[self.loop.device])
        storages = [parameter.untyped_storage() for parameter in self._shards.values()]
        with self._blame(name):
            returned = call(self.loop, *arguments)
            for (own, parameter), storage in zip(self._shards.items(), storages):
                if (
                    parameter.untyped_storage() is not storage
                ):  # the local tensor, which the strategy uses, is still the old one
                    what = f"replaces the data of {own}, of which each process has a shard"
                    raise Unfit(f"part.{name}: {what} (write into it: copy_)")
        return returned

    @property
    def changing_batches(self) -> list[str]:
        """The names of the parts that change batches."""
        return [name for name, _ in self._at["batch"]]

    def watch_batches(self, watched: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Call the parts' batch() as `watched` returns it."""
        self._at["batch"] = [(name, watched(change)) for name, change in self._at["batch"]]

    def begin_step(self, step: Step, *, has_row: bool) -> Step:
        """Start a step, and return it with the parts' changes of its batches."""
        self.loop.has_row, self.loop.step_begun = has_row, self.loop.step + 1
        self._each("step_begun")
        for name, change in self._at["batch"]:
            changed = []
            for micro_batch in step.micro_batches:
                number = micro_batch.number
                seed_generators(key(self.loop.seed, "part", name, "batch", self.loop.step, number), devices=[self.loop.device])
                with self._blame(name):
                    inputs, targets = change(self.loop, micro_batch.inputs, micro_batch.targets)
                changed.append(micro_batch._replace(inputs=inputs, targets=targets))
            step = step._replace(micro_batches=changed, targets=None)
        return step

    def gradients_ready(self, sums: Sums, step: Step) -> None:
        """Call the parts when the gradients are those of the whole global batch, and not yet clipped."""
        self.loop._sums, self.loop._under_way = sums, step
        self._gradients_ready(len(self._at["gradients_ready"]))

    def _gradients_ready(self, count: int) -> None:
        for number, (name, call) in enumerate(self._at["gradients_ready"][:count]):
            self.loop._call_earlier = functools.partial(self._gradients_ready, number)
            self._call("gradients_ready", name, call)

    def step_taken(self) -> None:
        self._each("step_taken")

    def columns(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the columns that each part adds to a training row, with the part's key."""
        returned = []
        for name, call in self._at["row"]:
            self.loop._only_reads = ":" in name  # it is not one of `part`, with which trainer.log_every is part of the run's id
            before = self._versions() if self.loop._only_reads else []
            returned.append(self._call("row", name, call))
            if self.loop._only_reads and self._versions() != before:
                raise Unfit(f"part.{name}: row() writes into the weights (write in step_taken(), in every step)")
        self.loop._only_reads = False
        return self._columns("row", returned)

    def _versions(self) -> list[int]:
        return [version_of(parameter) for parameter in nn.Module.parameters(self.loop.module)]

    def _columns(self, moment: str, returned: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
        """Return what the parts have returned at a moment as columns. Unfit if a value is not a number."""
        found: list[tuple[str, dict[str, Any]]] = []
        for (part, _), columns in zip(self._at[moment], returned):
            found.append((f"part.{part}", {}))
            for column, value in (columns or {}).items():
                value = value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
                if not isinstance(value, (bool, int, float, list, type(None))) or (
                    isinstance(value, list) and not all(isinstance(item, (int, float, list)) for item in value)
                ):
                    raise Unfit(
                        f"part.{part}: its column {column} is a {type(value).__name__} (a number, or a list of numbers)"
                    )
                found[-1][1][column] = value
        return found

    def agree_on_end(self) -> None:
        """Let every rank know if a part on any rank has stopped the run; without such a part, do nothing. Collective."""
        if self._may_stop_in_rows if self.loop.has_row else self._may_stop:
            self._agree()

    def _agree(self) -> None:
        if self.loop.any(bool(self.loop.stopped)):
            self.loop.stopped = next(filter(None, self.loop.distinct(self.loop.stopped)))

    def can_save(self, *, is_ending: bool) -> bool:
        """Return whether a checkpoint can be saved after this step. `is_ending`: the run is to end after it."""
        self.loop.is_ending = is_ending
        return all(self._each("can_save"))

    def evaluating(self, split: str) -> None:
        """Prepare for the measurement of a split."""
        self.loop.split = split
        self._each("evaluating", split)

    def evaluated(self, split: str, row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Call the parts after a split has been measured, with the evaluated weights in place. Return the columns they add."""
        if not self._at["evaluated"]:
            return []
        with in_eval_mode(self.loop.module):
            returned = self._each("evaluated", split, row)
        self._agree()
        return self._columns("evaluated", returned)

    def saving(self) -> None:
        """Call the parts before a checkpoint. How often a run saves is not part of its id, so that they may only look."""
        before = (self._versions(), self.loop.lr_share) if self._at["saving"] else None
        for name, call in self._at["saving"]:
            self._call("saving", name, call)
            if (self._versions(), self.loop.lr_share) != before:
                raise Unfit(f"part.{name}: saving() changes the weights or the learning rate (write in step_taken())")

    def ended(self) -> None:
        self._each("ended")

    # --- state

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in the parts' states, as NAME/PATH."""
        return {path: value for path, value in self._leaves() if isinstance(value, Tensor)}

    def plain(self) -> dict[str, Any]:
        """Return the other values in the parts' states, as NAME/PATH, encoded. Unfit if a value is not plain data."""
        kept: dict[str, Any] = {}
        for path, value in self._leaves():
            try:
                kept |= {path: encoded(value)} if not isinstance(value, Tensor) else {}
            except NotSerializable as error:
                key = path.replace("/", ".")
                raise Unfit(
                    f"part.{key}: is {error}, which no checkpoint can hold (numbers, text, tensors, in lists or dictionaries)"
                ) from None
        return kept

    def give_back(self, plain: Mapping[str, Any], loaded: Mapping[str, Tensor]) -> None:
        """Restore the parts' states: other values, and tensors, which state_dict() may not return a second time."""
        for name, state_dict in self._having("state_dict"):
            kept = {path.partition("/")[2]: decoded(value) for path, value in plain.items() if path.split("/")[0] == name}
            with self._blame(name):
                state = state_dict() | kept
                for path, tensor in loaded.items():
                    part, entry, *inner = path.split("/", 2)
                    if part == name and inner:
                        state[entry] = {**(state[entry] if isinstance(state.get(entry), dict) else {}), inner[0]: tensor}
                    elif part == name:
                        state[entry] = tensor
                self.by_name[name].load_state_dict(state)

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for name, state_dict in self._having("state_dict"):
            with self._blame(name):
                state = state_dict()
                if not isinstance(state, dict):
                    raise Unfit(f"part.{name}: state_dict() returns a {type(state).__name__} (a dictionary)")
            for entry, value in state.items():
                is_of_tensors = isinstance(value, dict) and value and all(isinstance(one, Tensor) for one in value.values())
                for own in (entry, *(value if is_of_tensors else ())):  # names in a file
                    if not isinstance(own, str) or "/" in own:
                        raise Unfit(f"part.{name}: state_dict() has the key {own!r} (a text without /)")
                if is_of_tensors:
                    yield from ((f"{name}/{entry}/{inner}", item) for inner, item in value.items())
                else:
                    yield f"{name}/{entry}", value
