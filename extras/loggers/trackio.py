"""Trackio: a database of all runs in a folder beside them."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from extras.loggers.shared import folder_of_runs, read_table, unique_name
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, best_of_monitor, scalars


@dataclass(kw_only=True)
class Trackio:
    """Trackio. The database is in TRACKIO_DIR, or else in `trackio` in the folder of all runs."""

    extra: ClassVar = "trackio"  # the extra that installs the package

    project: str

    def open(self, run: RunInfo) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder_of_runs(run) / "trackio"))  # before the import, which reads it
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = unique_name(run)
        # it may have steps that the run repeats; no step can be replaced
        SQLiteStorage.delete_run(self.project, name)
        facts = {"steadfast": {"run": str(run.directory.resolve()), "commit": run.commit}}
        self._run = trackio.init(
            self.project, name, run.group, config=run.config | facts, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        replay(self, run)

    def log(self, row: Row) -> None:
        self._run.log(scalars(row), step=row["step"])

    def media(self, item: Media) -> None:
        import trackio

        def table() -> Any:
            columns, *rows = read_table(item.path)
            return trackio.Table(columns=columns, data=rows)

        shown = {
            "image": lambda: trackio.Image(str(item.path)),
            "audio": lambda: trackio.Audio(str(item.path)),
            "table": table,
            "text": lambda: trackio.Markdown(f"```\n{item.path.read_text()}\n```"),
        }
        self._run.log({item.name: shown[item.kind]()}, step=item.step)

    def close(self, summary: dict[str, Any]) -> None:
        best, step = best_of_monitor(summary)
        if best is not None:
            self._run.log({f"best/{summary['monitor']}": best}, step=step)
        self._run.finish()
