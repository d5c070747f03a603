"""TensorBoard event files in `tensorboard/` in the run directory."""

import wave
from ctypes import c_float
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extras.loggers.shared import Histogram, histograms, read_table
from framework.config.identity import flat
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media, list_media
from framework.runs.metrics_file import Row, best_of_monitor, is_curve, iterate_rows, scalars


class TensorBoard:
    """TensorBoard: scalars as SPLIT/METRIC over the step, histograms if rows have them, some samples, and the final hparams."""

    extra = "tensorboard"  # the extra that installs the package
    takes_lists = True

    def open(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.directory / "tensorboard"
        # TensorBoard hides what was written earlier for steps from purge_step on: what a kill has lost, and what follows the
        # checkpoint from which an interrupted run continues. The run writes the later steps again
        purge_step = _first_missing(run, directory) if run.step else 0
        self._run = run
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        if run.step == 0:
            self._show_samples()
        replay(self, run, first=purge_step)

    def log(self, row: Row) -> None:
        for tag, value in scalars(row).items():
            self._writer.add_scalar(tag, value, global_step=row["step"])
        for tag, found in histograms(row).items():
            self._show_histogram(tag, found, step=row["step"])
        if row["split"] != "train":
            self._writer.flush()

    def media(self, item: Media) -> None:
        if item.kind == "image":
            from PIL import Image

            with Image.open(item.path) as picture:
                self._writer.add_image(item.name, np.asarray(picture.convert("RGBA")), item.step, dataformats="HWC")
        elif item.kind == "audio":
            with wave.open(str(item.path)) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
                mean = torch.from_numpy(samples.mean(axis=1, keepdims=True).T / 32767)
                self._writer.add_audio(item.name, mean, item.step, sample_rate=file.getframerate())
        elif item.kind == "table":
            columns, *rows = read_table(item.path)
            lines = [columns, ["---"] * len(columns), *rows]
            self._writer.add_text(item.name, "\n".join(f"| {' | '.join(line)} |" for line in lines), item.step)
        else:
            self._writer.add_text(item.name, _verbatim(item.path.read_text()), item.step)

    def close(self, summary: dict[str, Any]) -> None:
        if summary.get("status") == "finished":
            self._compare(summary)
        self._writer.close()

    def _show_histogram(self, tag: str, found: Histogram, *, step: int) -> None:
        middles = np.convolve(found.edges, [0.5, 0.5], mode="valid")
        counts = np.array(found.counts)
        self._writer.add_histogram_raw(
            tag, min=found.lowest, max=found.highest, num=int(counts.sum()), sum=float(counts @ middles),
            sum_squares=float(counts @ middles**2), bucket_limits=found.edges[1:], bucket_counts=found.counts,
            global_step=step,
        )  # fmt: skip

    def _show_samples(self) -> None:
        samples = self._run.samples
        if samples is not None and samples.images is not None:
            self._writer.add_images("samples", np.array(samples.images, dtype=np.uint8), global_step=0)
        elif samples is not None and samples.texts is not None:
            self._writer.add_text("samples", "\n\n---\n\n".join(map(_verbatim, samples.texts)), global_step=0)

    def _compare(self, summary: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # the page shows the latest value of a tag, so a logged value needs no other tag
        metrics = {tag: value for rows in summary["metrics"].values() for tag, value in scalars(rows["last"]).items()
                   if is_curve(tag.partition("/")[2])}  # fmt: skip
        value, _ = best_of_monitor(summary)
        best = {} if value is None else {f"best/{summary['monitor']}": value}
        settings = flat(self._run.config).items()
        shown = {key: value if isinstance(value, (str, int, float)) else str(value) for key, value in settings}
        for part in hparams(shown, metrics | best):
            self._writer._get_file_writer().add_summary(part)  # as `add_hparams` does, but that writes to another directory
        for tag, value in best.items():
            self._writer.add_scalar(tag, value, global_step=summary["step"])


def _verbatim(text: str) -> str:
    """Return Markdown that shows a text unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _first_missing(run: RunInfo, directory: Path) -> int:
    """Return the first step of which the event files lack a row or media; the step after `run.step` if they have all."""
    # TensorBoard's own reader, for which everything is a tensor
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # type: ignore[import-untyped]  # unannotated

    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    if directory.is_dir():
        reader.Reload()
    held = {(tag, event.step): event.tensor_proto for tag in reader.Tags()["tensors"] for event in reader.Tensors(tag)}
    media = list_media(run.directory / "media", until=run.step)
    missing = [
        item.step for item in media if not {(item.name, item.step), (f"{item.name}/text_summary", item.step)} & held.keys()
    ]
    for row in iterate_rows(run.directory / "metrics.jsonl", until=run.step):
        for tag, value in scalars(row).items():
            found = held.get((tag, row["step"]))
            # with repr, NaN equals NaN
            if found is None or repr(found.float_val[0]) != repr(c_float(value).value):
                return min([row["step"], *missing])
    return min([run.step + 1, *missing])
