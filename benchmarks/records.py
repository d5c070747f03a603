"""The cost of a long record for a resume and for its curves, compared with reading the bytes and with parsing each row.

    python benchmarks/records.py [NUM_ROWS]      # the default is 1,000,000

Each side runs in a separate process, in turn, three times. The table has the median of the CPU time, and the peak memory in
addition to that of an idle process.
"""

import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from framework.runs.history import read_history
from framework.runs.metrics_file import Mark, MetricsFile, read_rows

ROW = {"step": 0, "split": "train", "loss": 1.234567891, "accuracy": 0.5, "top5": 0.9, "lr": 1e-3, "grad_norm": 1.2, "epoch": 1,
       "samples_per_s": 12345.678, "step_s": 0.1, "data_s": 0.01, "forward_backward_s": 0.08, "optimizer_s": 0.01}  # fmt: skip


def make(path: Path, num_rows: int) -> Mark:
    mark = MetricsFile(path, step=0).mark
    with open(path, "wb") as file:
        for step in range(1, num_rows + 1):
            row = {**ROW, "step": step}
            line = (json.dumps(row) + "\n").encode()
            mark = mark.after(row, line)
            file.write(line)
    return mark


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds and the MB of a process that does the work."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        work()
        sender.send((time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))

    process = context.Process(target=run)
    process.start()
    found = receiver.recv()
    process.join()
    return found


def main(num_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        mark = make(path, num_rows)
        sides: dict[str, Callable[[], object]] = {
            "the file's bytes, read": path.read_bytes,
            "a resume": lambda: MetricsFile(path, step=num_rows, mark=mark).close(),
            "the rows that its curves show": partial(read_history, path, monitor="val/loss", mode="min", most=5000, aside=()),
            "each row, parsed": partial(read_rows, path),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(3):
            for name, work in sides.items():
                found[name].append(measured(work))
        print(f"{num_rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB")
        base = statistics.median(seconds for seconds, _ in found["the file's bytes, read"])
        for name, values in found.items():
            seconds, memory = (statistics.median(column) for column in zip(*values))
            print(f"{name:30}  {seconds:8.3f} s CPU  x{seconds / base:8.2f}  {memory:8.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
