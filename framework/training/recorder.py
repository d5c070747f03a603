"""The records of a run: rows for every sink, and the summary. Rank 0 writes; other ranks do nothing."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from framework.checkpoint.state import RECORD_ID
from framework.config.code import code_of, loaded_unseen
from framework.distributed.world import World
from framework.loggers.background import Background
from framework.loggers.sink import RunInfo, Sink
from framework.runs.directory import RunDirectory
from framework.runs.media import remove_media, write_media
from framework.runs.metrics_file import Mark, MetricsFile, Row, numbers_of
from framework.runs.provenance import CHANGED, WAYS, Provenance
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER


class Recorder:
    """The recorder of a run. Every rank makes the same calls; only rank 0 acts. `open`, `rewind` and `flush` are collective."""

    def __init__(self, directory: RunDirectory, *, world: World, sinks: Mapping[str, Sink], accepts_code: bool = False) -> None:
        self.directory, self._accepts_code = directory, accepts_code
        self.record_id: str | None = None  # from a checkpoint, or made by `open`; only rank 0 needs it
        self._mark: Mark | None = None  # of the rows that a checkpoint relies on
        self._world = world
        self._sinks = dict(sinks)  # the sinks that work
        self._lost: list[str] = []  # the other sinks
        self._metrics: MetricsFile | None = None
        self._loaded: dict[str, str] | None = None  # the user's modules that are in the provenance
        code_of(type(sink).__module__ for sink in sinks.values())  # modules that a logger loads must not count as the run's

    def open(self, run: RunInfo, **facts: Any) -> None:
        """Start or continue the record at `run.step`; `facts`, including the counters, go into the summary. Collective."""
        what = "the run's record could not be opened"
        self._world.agreement.on_rank_0(lambda: self._open_files(run, facts), what=what)
        self._run = dataclasses.replace(run, record_id=self.record_id or "")
        self._each(lambda sink: sink.open(self._run))

    def _open_files(self, run: RunInfo, facts: dict[str, Any]) -> None:
        before = self.directory.read_summary()
        known = str(before.get("record_id"))  # of a run that was killed before its first checkpoint
        self.record_id = self.record_id or (known if RECORD_ID.fullmatch(known) else f"{run.run_id}-{secrets.token_hex(4)}")
        restarts = before.get("restarts", -1) + 1
        facts |= {"continued_at": [*before.get("continued_at", []), run.step] if restarts else []}
        self.directory.update_summary(status="running", restarts=restarts, error=None, record_id=self.record_id, **facts)
        self._metrics = MetricsFile(self.directory.metrics, step=run.step, mark=self._mark)
        remove_media(self.directory.media, after=run.step)
        self._note_code()

    def state_dict(self) -> dict[str, Any]:
        return {"record_id": self.record_id, "rows": self._metrics.mark._asdict() if self._metrics is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the record of a checkpoint. Call it before `open`."""
        self.record_id = state.get("record_id") or self.record_id
        if state.get("rows") is not None:
            self._mark = Mark(**state["rows"])

    def rewind(self, step: int) -> None:
        """Remove the rows and the media after `step`, because the run continues from there. Collective."""

        def cut_back() -> None:
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = MetricsFile(self.directory.metrics, step=step)
                remove_media(self.directory.media, after=step)

        self._world.agreement.on_rank_0(cut_back, what="the run's record could not be cut back")
        summary = self.directory.read_summary()
        again = dataclasses.replace(self._run, step=step)
        self._each(lambda sink: sink.close(summary))
        self._each(lambda sink: sink.open(again))

    def log(self, row: Row) -> None:
        if self._metrics is not None:
            self._metrics.log(row)
        numbers = numbers_of(row)
        self._each(lambda sink: sink.log(row if isinstance(sink, Background) else numbers))

    def log_media(self, name: str, content: bytes, *, suffix: str, step: int) -> None:
        """Write a file of media, and send its name to the loggers. If the disk fails, print a warning; the run continues."""
        if self._metrics is None:  # in a rehearsal
            return
        try:
            item = write_media(self.directory.media, name, content, suffix=suffix, step=step)
        except OSError as error:
            LOGGER.warning("%s of step %d could not be written: %s", name, step, error.strerror)
        else:
            self._each(lambda sink: sink.media(item) if isinstance(sink, Background) else None)

    def _each(self, call: Callable[[Sink], None]) -> None:
        """Call every sink that works. If a logger fails, print a warning; the run continues."""
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # rich's errors from the console, SinkFailed from the others
                LOGGER.warning("logger %s is off for the rest of this run: %s", name, error)
                del self._sinks[name]
                self._lost.append(name)

    @property
    def is_open(self) -> bool:
        """Whether this process writes the record: rank 0, after `open`."""
        return self._metrics is not None

    def flush(self, **values: Any) -> None:
        """Write the rows to the disk and `values` into the summary, before a checkpoint that relies on them. Collective."""

        def write() -> None:
            if self._metrics is not None:
                self._metrics.flush()
                self.directory.update_summary(is_flushed=False, **values)  # a checkpoint has all of them
                self._note_code()

        self._world.agreement.on_rank_0(write, what="metrics not written")

    def _note_code(self) -> None:
        """Record what the code has loaded and read. Unfit if it is not what the run had at its last checkpoint."""
        loaded, provenance = loaded_unseen(), Provenance(self.directory.path)
        if loaded == self._loaded:
            return
        lines = provenance.changes_loaded(loaded, with_new=False)
        if lines and not self._accepts_code:
            raise Unfit(f"run.code: {CHANGED.format(self.directory.path)}: {'; '.join(lines)} ({WAYS})")
        provenance.add_loaded(loaded, accepted=lines)
        self._loaded = loaded

    def close(self, *, within_s: float = math.inf, **values: Any) -> None:
        """Write the summary's last values and stop every sink; wait at most `within_s` for each. Never raise an error."""
        if self._world.rank != 0:
            return
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()
            values |= {"rows": metrics.mark._asdict()}
        own = [*self._lost, *(name for name, sink in self._sinks.items() if isinstance(sink, Background))]
        self.directory.record_end(**values, **({"unlogged": own} if own else {}))  # until each has reported that it has all
        if metrics is not None:
            summary = self.directory.read_summary()
            self._each(lambda sink: sink.close(summary))
        self._each(lambda sink: sink.wait(within_s=within_s) if isinstance(sink, Background) else None)
        if own:
            self.directory.record_end(unlogged=self._lost)
        self._sinks = {}
