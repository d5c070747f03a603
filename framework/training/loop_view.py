"""The view of the loop that the parts of a run get."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.checkpoint.canonical import gathered
from framework.checkpoint.state import Progress
from framework.data.loader import Splits
from framework.data.source import Dataset
from framework.distributed.world import World
from framework.engine.buffers import Buffers
from framework.engine.engine import Engine
from framework.engine.seam import Step, Task
from framework.engine.sums import Sums, means, weight_of
from framework.modules.tensors import Tree, gradient_of, map_tensors, whole
from framework.optim.update import AveragedWeights, Update
from framework.randomness import generator_states, set_generator_states
from framework.runs.media import NAME
from framework.training import encoding
from framework.training.evaluation import totals
from framework.training.recorder import Recorder


class Loop:
    """The loop's interface for parts. All ranks call a part at the same moment, and must call the same methods."""

    def __init__(
        self, *, world: World, engine: Engine, task: Task, dataset: Dataset, splits: Splits, update: Update,
        directory: Path, seed: int, total_steps: int, progress: Progress, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.engine, self.task, self.dataset, self.splits = engine, task, dataset, splits
        self.optimizer, self.directory = update.optimizer, directory
        self.seed, self.total_steps, self.progress = seed, total_steps, progress
        self.has_row = False  # the current step gets a row of metrics.jsonl
        self.split = ""  # the split that is or was last measured
        self.stopped = ""  # why a part has ended the run
        self.is_ending = False  # the run is to end after this step: the last step, or stopped by a part or early stopping
        self.has_begun = False  # every part has had `begun`
        self.step_begun = 0  # the number of the step under way, and of its row; `step` is less until it is taken
        self._world, self._update, self._recorder = world, update, recorder
        self._buffers = Buffers(*(module for module in (engine.module, engine.task) if module is not None))
        self._sums: Sums = {}
        self._under_way = Step(0, 1, [])
        self._call_earlier: Callable[[], None] = lambda: None  # calls the parts before the current part
        self._only_reads = False  # the current call comes with the rows, and trainer.log_every is not part of the run's id

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self.progress.step

    @property
    def samples_seen(self) -> int:
        """The number of samples in the steps taken, over all processes."""
        return self.progress.samples_seen

    @property
    def wall_s(self) -> float:
        """The seconds that the run has taken until its last row or checkpoint, over all its starts, by this rank's clock."""
        return self.progress.wall_s

    @property
    def turn(self) -> str:
        """The turn (optimizer.turns) with gradients that are ready; empty without turns."""
        return self._under_way.turn

    @property
    def lr_share(self) -> float:
        """The share of the scheduled learning rates that the next step uses. Set it on all ranks, before a step."""
        return self._update.lr_share

    @lr_share.setter
    def lr_share(self, share: float) -> None:
        self._require_acting("lr_share")
        self._update.lr_share = share

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
        """Whether the current micro-batch does not count, because it repeats a micro-batch as padding."""
        return self.engine.forward.is_padding

    @property
    def device(self) -> torch.device:
        return self._world.device

    def trained(self) -> dict[str, nn.Parameter]:
        """Return this rank's trained parameters by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def averaged(self) -> dict[str, Tensor]:
        """Return the averaged weights of this rank's trained parameters by name; {} if the run averages none itself."""
        average = self._update.average
        found = average.tensors if isinstance(average, AveragedWeights) else {}
        return {name: found[name] for name in self.trained() if name in found}

    def loss(self) -> float:
        """Return the loss of the current step, over the whole global batch, after its gradients are ready. Collective."""
        mine = {name: value for name, value in self._sums.items() if name in ("loss", weight_of("loss"))}
        return means(totals(mine, world=self._world), num_samples=self._under_way.num_samples)["loss"]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of a tensor of any shape, on the CPU, in float64. Collective."""
        return self._world.agreement.sum(values.detach().cpu().double())

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of the ranks. Collective. For small values only: see `distinct`."""
        return self._world.agreement.gather(value)

    def distinct(self, value: Any) -> list[Any]:
        """Return the different values of the ranks, as plain data, in the order of the first rank with each value. Collective.

        If many ranks have the same value, for example the same names, it is sent only once.
        """
        return list(self._world.agreement.distinct(value).values())

    def on_main(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all ranks' tensors by name, on the CPU, on the rank that writes files; nothing on other ranks. Collective."""
        return dict(zip(*gathered(tensors, world=self._world)))

    def any(self, flag: bool) -> bool:
        """Return whether any rank's `flag` is true. Use it for decisions about things that differ between ranks. Collective."""
        return bool(self.sum(torch.tensor(float(flag))))

    def gradient_norms(self) -> dict[str, float]:
        """Return the L2 norm of every trained parameter's whole gradient, by name, on every rank. Collective."""
        found = {name: gradient_of(p) for name, p in self.trained().items()}
        norms = {name: whole(torch.linalg.vector_norm(g)) for name, g in found.items() if g is not None}
        mine = dict(zip(norms, torch.stack(list(norms.values())).tolist() if norms else []))
        return {name: norm for part in self.distinct(mine)[::-1] for name, norm in part.items()}

    def recompute(self) -> None:
        """Compute the step's gradients again, with the same batch and draws, but with the current weights. Collective.

        Call it when the gradients are ready. The parts before the calling part get `gradients_ready` again, so that their
        changes hold for the new gradients too. Buffers such as running statistics do not change a second time.
        """
        before, states, call_earlier = self._buffers.values(), generator_states(devices=[self.device]), self._call_earlier
        for parameter in self.trained().values():
            parameter.grad = None
        step, update = self._under_way, self._update
        self.engine.train(step, index=self.step, loss_scale=update.loss_scale.value, measure=False)
        finish_gradients(step=step, engine=self.engine, update=update)
        self._buffers.set(before)
        call_earlier()
        self._call_earlier = call_earlier
        set_generator_states(states, devices=[self.device])  # so that the part's own draws continue

    def outputs(self, inputs: Tree) -> Tree:
        """Return the model's outputs for inputs that are the same on every rank, without gradients. Collective."""
        states = generator_states(devices=[self.device])
        outputs = self.engine.outputs(map_tensors(lambda tensor: tensor.to(self.device), inputs))
        set_generator_states(states, devices=[self.device])  # so that the part's own draws continue
        return outputs

    def log_image(self, name: str, image: Any) -> None:
        """Log a picture, or a batch of pictures as a grid: see `png_of_pixels` in framework/training/encoding.py.

        This and the other `log_` methods write media/NAME/step_STEP.* in the run's directory, and send it to the loggers. The
        rank that writes files takes its own arguments, and other ranks do nothing: gather what only they have.
        """
        self._log(name, ".png", lambda: encoding.png_of_pixels(image))

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a figure of matplotlib as a picture, and close it if pyplot holds it."""
        self._log(name, ".png", lambda: encoding.png_of_figure(figure))
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close(figure)

    def log_audio(self, name: str, samples: Any, *, rate: int) -> None:
        """Log sound of `rate` samples a second: (T,) or (C, T), int16 or floats from -1 to 1."""
        self._log(name, ".wav", lambda: encoding.wav_of_samples(samples, rate=rate))

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of numbers and texts."""
        self._log(name, ".csv", lambda: encoding.csv_of_rows(columns, rows))

    def log_text(self, name: str, text: str) -> None:
        """Log a text."""
        self._log(name, ".txt", text.encode)

    def _log(self, name: str, suffix: str, encode: Callable[[], bytes]) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of media (letters, digits, _, - and ., in parts that / separates)")
        if not self.has_begun:
            raise ValueError(f"{name}: logged in begun(), when the run's step is not known yet (log it in a later method)")
        if self.is_main:
            try:
                content = encode()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            self._recorder.log_media(name, content, suffix=suffix, step=max(self.step, self.step_begun))

    def stop(self, why: str) -> None:
        """End the run after this step as finished, with an evaluation and a checkpoint. One rank's call is enough."""
        self._require_acting("stop()")
        self.stopped = self.stopped or why

    def _require_acting(self, what: str) -> None:
        if self._only_reads:
            raise ValueError(f"{what}: row() of a task's or a strategy's part only reads (act in step_taken(), in every step)")


def finish_gradients(*, step: Step, engine: Engine, update: Update) -> None:
    """Undo the loss scale in the gradients that the engine has computed, and keep those of the step's turn."""
    update.loss_scale.unscale(nn.Module.parameters(engine.module))
    if step.turn:
        update.keep(next(turn for turn in update.turns if turn.name == step.turn))
