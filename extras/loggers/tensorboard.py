"""TensorBoard event files in `tensorboard/` in the run directory."""

from ctypes import c_float
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.identity import flat
from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import Histogram, Row, best_of_monitor, histograms, is_curve, iterate_rows, scalars


class TensorBoard:
    """TensorBoard: scalars as SPLIT/METRIC over the step, histograms if rows have them, some samples, and the final hparams."""

    extra = "tensorboard"  # the extra that installs the package
    takes_lists = True

    def open(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.directory / "tensorboard"
        rows = list(iterate_rows(run.directory / "metrics.jsonl", until=run.step))
        missing = _missing(rows, directory)
        # TensorBoard hides what was written earlier for steps from purge_step on: rows that a kill has lost, and rows after
        # the checkpoint from which an interrupted run continues. The run writes these rows again
        purge_step = missing[0]["step"] if missing else run.step + 1 if run.step else 0
        self._run = run
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        if run.step == 0:
            self._show_samples()
        for row in rows:
            if row["step"] >= purge_step:
                self.log(row)

    def log(self, row: Row) -> None:
        for tag, value in scalars(row).items():
            self._writer.add_scalar(tag, value, global_step=row["step"])
        for tag, found in histograms(row).items():
            self._show_histogram(tag, found, step=row["step"])
        if row["split"] != "train":
            self._writer.flush()

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
            texts = ["\n".join(f"    {line}" for line in text.splitlines()) for text in samples.texts]  # Markdown: unchanged
            self._writer.add_text("samples", "\n\n---\n\n".join(texts), global_step=0)

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


def _missing(rows: list[Row], directory: Path) -> list[Row]:
    """Return the rows from the first row that the event files do not have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]  # unannotated

    if not rows or not directory.is_dir():
        return rows
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    held = {(tag, event.step): event.value for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)}
    for number, row in enumerate(rows):
        # with repr, NaN equals NaN
        if any(repr(held.get((tag, row["step"]))) != repr(c_float(value).value) for tag, value in scalars(row).items()):
            return rows[number:]
    return []
