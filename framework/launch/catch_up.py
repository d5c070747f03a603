"""What the loggers of a finished run lack, because their processes were killed: it is given to them again."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.config.schema import Node, RunSection
from framework.loggers.background import Background, SinkFailed
from framework.loggers.sink import RunInfo
from framework.runs.directory import RunDirectory
from framework.runtime.lock import Lock, RunLocked
from framework.runtime.log import LOGGER


def catch_up(run: RunSection, loggers: Mapping[str, Node], *, name: str, config: dict[str, Any]) -> None:
    """Let the loggers that did not confirm a finished run's end have its rows, from metrics.jsonl. Warns of what fails.

    `config` is shown to them.
    """
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
            sink.open(info)  # which takes the rows that it lacks
            sink.close(summary)
            sink.wait(within_s=math.inf)
            names.remove(logger)
            LOGGER.info("logger %s has all rows now: it was killed before", logger)
        except SinkFailed as error:
            LOGGER.warning("logger %s still lacks rows: %s", logger, error)
    directory.record_end(unlogged=names)
    lock.release()
