"""What a run leaves behind while it goes: rows to every sink, and the summary. Rank 0 writes; elsewhere it is silent."""

from collections.abc import Sequence
from typing import Any

from framework.log import LOGGER
from framework.loggers.sink import RunInfo, Sink
from framework.metrics import MetricsFile, Row
from framework.run_directory import RunDirectory


class Recorder:
    """Takes the same calls on every rank, and acts on rank 0."""

    def __init__(self, directory: RunDirectory, *, rank: int, sinks: Sequence[Sink]) -> None:
        self.directory = directory
        self.is_writer = rank == 0
        self._sinks = list(sinks) if self.is_writer else []
        self._metrics: MetricsFile | None = None

    def open(self, run: RunInfo, **facts: Any) -> None:
        """Start or continue the record at `run.step`; `facts`, the counters among them, go into the summary."""
        if not self.is_writer:
            return
        before = self.directory.read_summary()
        restarts = before.get("restarts", -1) + 1
        self.directory.update_summary(status="running", restarts=restarts, error=None, **facts)
        self._metrics = MetricsFile(self.directory.metrics, step=run.step)
        self._sinks = [sink for sink in self._sinks if self._survives(sink, sink.open, run)]

    def log(self, row: Row) -> None:
        if self._metrics is not None:
            self._metrics.log(row)
        self._sinks = [sink for sink in self._sinks if self._survives(sink, sink.log, row)]

    def _survives(self, sink: Sink, call: Any, argument: Any) -> bool:
        """Return whether a sink still works: a logger's failure is a warning, not the end of a run."""
        try:
            call(argument)
        except Exception as error:  # a sink is somebody else's library: anything can come out of it
            LOGGER.warning("logger %s is off for the rest of this run: %s", type(sink).__name__, error)
            return False
        return True

    def flush(self, **values: Any) -> None:
        """Put the rows on the disk and `values` into the summary: before a checkpoint that counts on them."""
        if self._metrics is not None:
            self._metrics.flush()
            self.directory.update_summary(**values)

    def close(self, **values: Any) -> None:
        """Write the summary's last values and stop every sink."""
        if not self.is_writer:
            return
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self.directory.update_summary(**values)
        summary = self.directory.read_summary()
        for sink in self._sinks:
            self._survives(sink, sink.close, summary)
        self._sinks = []
