"""What `self.logger` of a LightningModule can log: numbers and media, by the names of TensorBoard and of WandbLogger."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from framework.runtime.exits import Unfit
from framework.training.loop_view import Loop


class NotAvailable(Unfit, AttributeError):
    """The error of a method of other loggers that this one does not have."""


class Logger:
    """Methods that log as the loop does, in the step of the run. Without a loop (mode=eval), those of media do nothing."""

    def __init__(self, loop: Loop | None = None) -> None:
        self._loop = loop
        self.module: Any = None  # the LightningModule with a method that is running

    name, version = "lightning_logs", 0

    @property
    def experiment(self) -> "Logger":
        return self

    @property
    def log_dir(self) -> str:
        """A folder in the run's directory for files of the module's own; every rank may write there. mode=eval has none."""
        if self._loop is None:
            raise AttributeError("self.logger.log_dir: only a training run has a directory")
        folder = self._loop.directory / self.name
        folder.mkdir(exist_ok=True)
        return str(folder)

    save_dir = root_dir = log_dir

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: every logger gets the whole configuration."""

    def __getattr__(self, name: str) -> Any:
        board = "experiment.add_image, add_images, add_figure, add_audio, add_text, add_histogram"
        what = f"numbers: self.log, log_metrics, experiment.add_scalar; media: log_image, log_table, log_text; {board}"
        raise NotAvailable(f"self.logger.{name}: is not available ({what}; logger=... gets both)")

    def log_metrics(self, metrics: Mapping[str, Any], step: Any = None) -> None:
        """Log numbers as `self.log` does: they are columns of the row of this step or evaluation."""
        for name, value in metrics.items():
            if self.module is not None:
                self.module.log(name, value)

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        self.log_metrics({tag: scalar_value})

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self.log_metrics({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()})

    def add_histogram(
        self,
        tag: str,
        values: Any,
        global_step: Any = None,
        bins: Any = "tensorboard",
        walltime: Any = None,
        max_bins: Any = None,
    ) -> None:
        """Log how many values are in each bin, as a table."""
        own = torch.as_tensor(values).detach().double().cpu().flatten().numpy()
        counts, edges = np.histogram(own, bins=64 if bins == "tensorboard" else bins)
        rows = [*zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist())]
        self.log_table(tag, columns=["from", "to", "count"], data=rows)

    def flush(self) -> None:
        """Do nothing: every row is written at once."""

    def add_image(
        self, tag: str, img_tensor: Any, global_step: Any = None, walltime: Any = None, dataformats: str = "CHW"
    ) -> None:
        axes = [dataformats.upper().index(axis) for axis in "NCHW" if axis in dataformats.upper()]
        if self._loop is not None:
            self._loop.log_image(tag, torch.as_tensor(img_tensor).permute(axes))

    def add_images(
        self, tag: str, img_tensor: Any, global_step: Any = None, walltime: Any = None, dataformats: str = "NCHW"
    ) -> None:
        self.add_image(tag, img_tensor, dataformats=dataformats)

    def add_figure(self, tag: str, figure: Any, global_step: Any = None, close: bool = True, walltime: Any = None) -> None:
        if self._loop is not None:
            self._loop.log_figure(tag, figure)

    def add_audio(
        self, tag: str, snd_tensor: Any, global_step: Any = None, sample_rate: int = 44100, walltime: Any = None
    ) -> None:
        if self._loop is not None:
            self._loop.log_audio(tag, snd_tensor, rate=sample_rate)

    def add_text(self, tag: str, text_string: str, global_step: Any = None, walltime: Any = None) -> None:
        if self._loop is not None:
            self._loop.log_text(tag, text_string)

    def log_image(self, key: str, images: Sequence[Any], step: Any = None, caption: Sequence[str] = ()) -> None:
        for number, image in enumerate(images):
            if self._loop is not None:
                self._loop.log_image(f"{key}/{number}", image)
        if caption:
            self.add_text(f"{key}/caption", "\n".join(caption))

    def log_table(self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None) -> None:
        if dataframe is not None:
            columns, data = [*dataframe.columns], dataframe.to_numpy().tolist()
        if self._loop is not None:
            self._loop.log_table(key, columns=columns, rows=data)

    log_text = log_table
