"""TensorBoard event files in `tensorboard/` of the run directory."""

import ctypes
from pathlib import Path
from typing import Any

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import Row, read_rows


class TensorBoard:
    """Scalars as SPLIT/METRIC over the step, a few samples, and when the run has finished its hparams with the final metrics."""

    def open(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.directory / "tensorboard"
        rows = [row for row in read_rows(run.directory / "metrics.jsonl") if row["step"] <= run.step]
        missing = _missing(rows, directory)
        # what a kill has lost, and what an interrupted run wrote after the checkpoint from which it now continues, goes
        # out of sight from purge_step on, and is written again
        purge_step = missing[0]["step"] if missing else run.step + 1 if run.step else 0
        self._run = run
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        if run.step == 0:
            self._show_samples()
        for row in rows:
            if row["step"] >= purge_step:
                self.log(row)

    def log(self, row: Row) -> None:
        for tag, value in _scalars(row).items():
            self._writer.add_scalar(tag, value, global_step=row["step"])
        if row["split"] != "train":
            self._writer.flush()

    def close(self, summary: dict[str, Any]) -> None:
        if summary.get("status") == "finished":
            self._compare(summary)
        self._writer.close()

    def _show_samples(self) -> None:
        import numpy as np

        samples = self._run.samples
        if samples is not None and samples.images is not None:
            self._writer.add_images("samples", np.array(samples.images, dtype=np.uint8), global_step=0)
        elif samples is not None and samples.texts is not None:
            texts = [
                "\n".join(f"    {line}" for line in text.splitlines()) for text in samples.texts
            ]  # Markdown: as it is
            self._writer.add_text("samples", "\n\n---\n\n".join(texts), global_step=0)

    def _compare(self, summary: dict[str, Any]) -> None:
        """Write a line of the HPARAMS page: the configuration, with the final and the best metrics."""
        from torch.utils.tensorboard.summary import hparams

        metrics = {
            f"{which}/{tag}": value
            for rows in summary["metrics"].values()
            for which in ("final", "best")
            for tag, value in _scalars(rows["last" if which == "final" else "best"]).items()
        }
        for part in hparams(_flat(self._run.config), metrics):
            self._writer._get_file_writer().add_summary(part)  # what `add_hparams` does, in a directory beside this one
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, global_step=summary["step"])


def _scalars(row: Row) -> dict[str, float]:
    return {
        f"{row['split']}/{name}": value
        for name, value in row.items()
        if name not in ("step", "split") and value is not None
    }


def _missing(rows: list[Row], directory: Path) -> list[Row]:
    """Return the rows from the first on that the event files do not hold as it is."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]  # unannotated

    if not rows or not directory.is_dir():
        return rows
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    held = {(tag, event.step): event.value for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)}
    for number, row in enumerate(rows):
        # repr: NaN is NaN
        if any(repr(held.get((tag, row["step"]))) != repr(_float32(value)) for tag, value in _scalars(row).items()):
            return rows[number:]
    return []


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, (str, int, float)) else str(value)
    return flat
