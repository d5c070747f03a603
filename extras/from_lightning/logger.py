"""What `self.logger` of a LightningModule can log: media of the run, by the names of TensorBoard and of WandbLogger."""

from collections.abc import Sequence
from typing import Any

import torch

from framework.training.loop_view import Loop


class Logger:
    """Methods that log as the loop does, in the step of the run. Without a loop (mode=eval), they do nothing."""

    def __init__(self, loop: Loop | None = None) -> None:
        self._loop = loop

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
        what = "media: log_image, log_table, log_text; experiment.add_image, add_images, add_figure, add_audio, add_text"
        raise AttributeError(f"self.logger.{name}: is not available (numbers: self.log; {what}; logger=... gets both)")

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
