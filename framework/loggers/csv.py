"""CSV files for spreadsheets and pandas: `csv/SPLIT.csv` in the run directory."""

import csv
from pathlib import Path

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import Row, read_rows
from framework.runtime.files import replacing


class Csv:
    """One file per split, one row per step. A column that starts later is empty in the earlier rows."""

    def open(self, run: RunInfo) -> None:
        self._folder = run.directory / "csv"
        self._folder.mkdir(exist_ok=True)
        self._rows: dict[str, list[Row]] = {}
        self._columns: dict[str, list[str]] = {}
        for row in read_rows(run.directory / "metrics.jsonl", until=run.step):
            self._rows.setdefault(row["split"], []).append(row)
        for path in self._folder.glob("*.csv"):
            path.unlink()  # the run has lost these rows in a kill
        for split in self._rows:
            self._rewrite(split)

    def log(self, row: Row) -> None:
        split = row["split"]
        self._rows.setdefault(split, []).append(row)
        if not set(row) <= {"split", *self._columns.get(split, ())}:
            self._rewrite(split)
            return
        with open(self._path(split), "a", newline="") as file:
            csv.DictWriter(file, self._columns[split], extrasaction="ignore").writerow(row)

    def close(self, summary: dict[str, object]) -> None:
        self._rows.clear()

    def _rewrite(self, split: str) -> None:
        rows = self._rows[split]
        self._columns[split] = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "split"]
        with replacing(self._path(split)) as new, open(new, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns[split], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def _path(self, split: str) -> Path:
        return self._folder / f"{split}.csv"
