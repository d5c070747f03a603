"""What a finished run can lack: rows of its record, in the file and in its loggers, and files in its mirror."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.config.schema import Node, RunSection
from framework.launch.mirrored import put_missing
from framework.loggers.background import Background, SinkFailed
from framework.loggers.sink import RunInfo
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Mark, MetricsFile
from framework.runtime.lock import Lock, RunLocked
from framework.runtime.log import LOGGER


def catch_up(run: RunSection, loggers: Mapping[str, Node], *, name: str, config: dict[str, Any]) -> int:
    """Repair a finished run's metrics.jsonl, send its loggers the rows and its mirror the files that are missing.

    The loggers show `config`. Return the exit code. Warn about errors of loggers.
    """
    _mend_rows(run)
    _inform(run, loggers, name=name, config=config)
    return put_missing(run, name=name)


def _mend_rows(run: RunSection) -> None:
    """Restore a finished run's metrics.jsonl to the content that the run wrote: remove later rows and duplicates.

    Warn about lost rows.
    """
    directory = RunDirectory(Path(run.dir))
    summary = directory.read_summary()
    if "rows" not in summary:
        return  # the run is from an earlier version
    mark = Mark(**summary["rows"])
    size = directory.metrics.stat().st_size if directory.metrics.is_file() else -1
    if size == mark.num_bytes and mark.fits(directory.metrics):
        return
    lock = Lock(directory.path)
    try:
        lock.take()
        MetricsFile(directory.metrics, step=summary.get("step", 0), mark=mark).close()
        LOGGER.warning("%s was changed after the run had ended: each remaining row is kept once", directory.metrics)
    except (RunLocked, OSError) as error:
        LOGGER.warning("%s", error)
    finally:
        lock.release()


def _inform(run: RunSection, loggers: Mapping[str, Node], *, name: str, config: dict[str, Any]) -> None:
    """Send a finished run's rows, from metrics.jsonl, to the loggers that did not confirm the run's end."""
    directory = RunDirectory(Path(run.dir))
    summary = directory.read_summary()
    names = [logger for logger in loggers if logger in summary.get("unlogged", [])]
    if not names:
        return
    from framework.build import components

    lock = Lock(directory.path)
    try:
        lock.take()
    except (RunLocked, OSError) as error:
        LOGGER.warning("%s", error)
        return
    info = RunInfo(
        directory=directory.path,
        run_id=run.id,
        name=name,
        step=summary["step"],
        total_steps=summary["step"],
        config=config,
        record_id=str(summary.get("record_id")),
        group=run.group,
    )
    for logger, sink in components.sinks({logger: loggers[logger] for logger in names}).items():
        if not isinstance(sink, Background):
            continue
        try:
            sink.open(info)  # it fetches the rows that the logger lacks
            sink.close(summary)
            sink.wait(within_s=math.inf)
            names.remove(logger)
            LOGGER.info("logger %s has all rows now: it was killed before", logger)
        except SinkFailed as error:
            LOGGER.warning("logger %s still lacks rows: %s", logger, error)
    directory.record_end(unlogged=names)
    lock.release()
