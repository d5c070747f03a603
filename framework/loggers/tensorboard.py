"""TensorBoard event files in `tensorboard/` of the run directory."""

from typing import Any

from framework.loggers.sink import RunInfo


class TensorBoard:
    """Scalars as SPLIT/METRIC over the step."""

    def open(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted run wrote after the checkpoint from which it now continues
        purge_step = run.step + 1 if run.step else None
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge_step)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name not in ("step", "split") and value is not None:
                self._writer.add_scalar(f"{row['split']}/{name}", value, global_step=row["step"])
        if row["split"] != "train":
            self._writer.flush()

    def close(self, summary: dict[str, Any]) -> None:
        self._writer.close()
