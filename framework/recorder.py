"""What a run leaves behind while it goes: rows to every sink, and the summary. Rank 0 writes; elsewhere it is silent."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from framework.log import LOGGER
from framework.loggers.sink import RunInfo, Sink
from framework.metrics import MetricsFile, Row
from framework.run_directory import RunDirectory
from framework.world import World


class Recorder:
    """Takes the same calls on every rank, and acts on rank 0. `open`, `rewind` and `flush` are collective."""

    def __init__(self, directory: RunDirectory, *, world: World, sinks: Sequence[Sink]) -> None:
        self.directory = directory
        self._world = world
        self._sinks = sinks
        self._open_sinks: list[Sink] = []
        self._metrics: MetricsFile | None = None

    def open(self, run: RunInfo, **facts: Any) -> None:
        """Start or continue the record at `run.step`; `facts`, the counters among them, go into the summary."""
        self._run = run
        what = "the run's record could not be opened"
        self._world.together(lambda: self._open_files(run.step, facts), what=what, rank_0_only=True)
        if self._world.rank == 0:
            self._open_sinks = [sink for sink in self._sinks if self._survives(sink, sink.open, run)]

    def _open_files(self, step: int, facts: dict[str, Any]) -> None:
        restarts = self.directory.read_summary().get("restarts", -1) + 1
        self.directory.update_summary(status="running", restarts=restarts, error=None, **facts)
        self._metrics = MetricsFile(self.directory.metrics, step=step)

    def rewind(self, step: int) -> None:
        """Take back the rows after `step`, from where the run goes on. Collective."""
        what = "the run's record could not be cut back"
        self._world.together(lambda: self._cut_back(step), what=what, rank_0_only=True)
        summary = self.directory.read_summary()
        again = dataclasses.replace(self._run, step=step)
        self._open_sinks = [
            sink
            for sink in self._open_sinks
            if self._survives(sink, sink.close, summary) and self._survives(sink, sink.open, again)
        ]

    def _cut_back(self, step: int) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = MetricsFile(self.directory.metrics, step=step)

    def log(self, row: Row) -> None:
        if self._metrics is not None:
            self._metrics.log(row)
        self._open_sinks = [sink for sink in self._open_sinks if self._survives(sink, sink.log, row)]

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
        self._world.together(lambda: self._flush_files(values), what="metrics not written", rank_0_only=True)

    def _flush_files(self, values: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.flush()
            self.directory.update_summary(**values)

    def close(self, **values: Any) -> None:
        """Write the summary's last values and stop every sink. Raises nothing: the run has ended, this only tells it."""
        if self._world.rank != 0:
            return
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self.directory.record_end(**values)
        summary = self.directory.read_summary()
        for sink in self._open_sinks:
            self._survives(sink, sink.close, summary)
        self._open_sinks = []
