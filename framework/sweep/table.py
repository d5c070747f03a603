"""`sweep.csv`: the jobs of a sweep, each in a row."""

import csv
import io
from pathlib import Path

from framework.runs.table import TableRow
from framework.runtime.files import write_atomically


def write_csv(rows: list[TableRow], target: Path) -> None:
    """Write the table, whole or not at all."""
    dicts = [row.as_dict() for row in rows]
    ends = ("step", "seconds", "error")
    columns = [name for name in dict.fromkeys(name for row in dicts for name in row) if name not in ends]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *ends], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dicts)
    write_atomically(target, text.getvalue())
