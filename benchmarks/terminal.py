"""The cost of a terminal's live line, compared with a tqdm bar with the same numbers, in a real pseudo-terminal.

    python benchmarks/terminal.py

The benchmark prints the time of a training row, the processor time of a frame, and the ratios to tqdm's bar. (Trainers that
draw their line in the loop use such a bar.) This needs tqdm.
"""

import os
import pty
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_ROUNDS, NUM_ROWS, NUM_FRAMES = 5, 200_000, 500
ROW = {"split": "train", "loss": 0.1234, "accuracy": 0.9876, "top5": 1.0, "lr": 1e-3, "grad_norm": 1.5, "samples_per_s": 4321.0}


def ours() -> tuple[float, float]:
    """Return the seconds per row, and the processor seconds per frame."""
    from framework.loggers.console import Console
    from framework.loggers.sink import RunInfo

    console = Console()
    console.open(RunInfo(Path("runs/a/b"), "b", "a", 0, 10 * NUM_ROWS, {}, monitor="val/loss"))
    a_row = timed(lambda step: console.log({**ROW, "step": step}), NUM_ROWS)
    assert console._terminal is not None, "not on a terminal"
    begin = time.process_time()
    for _ in range(NUM_FRAMES):
        console._terminal._progress.refresh()
    a_frame = (time.process_time() - begin) / NUM_FRAMES
    console.close({})
    return a_row, a_frame


def tqdms() -> float:
    """Return the seconds per row if the loop updates a tqdm bar that also shows the numbers."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # unannotated

    bar = tqdm(total=10 * NUM_ROWS, file=sys.stderr)

    def show(_: int) -> None:
        bar.set_postfix(loss=ROW["loss"], accuracy=ROW["accuracy"], refresh=False)
        bar.update(1)

    seconds = timed(show, NUM_ROWS // 10)
    bar.close()
    return seconds


def timed(act: Callable[[int], None], count: int) -> float:
    begin = time.perf_counter()
    for step in range(1, count + 1):
        act(step)
    return (time.perf_counter() - begin) / count


def read_all(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:
        return


def main() -> None:
    master, terminal = pty.openpty()
    threading.Thread(target=read_all, args=(master,), daemon=True).start()
    screen, sys.stderr = sys.stderr, os.fdopen(terminal, "w")
    found = [(*ours(), tqdms()) for _ in range(NUM_ROUNDS)]
    sys.stderr = screen
    for name, values, unit, factor in (
        ("a training row, live line", [row for row, _, _ in found], "us", 1e6),
        ("a training row, tqdm with two numbers", [peer for _, _, peer in found], "us", 1e6),
        ("a frame, of processor time (10 a second)", [frame for _, frame, _ in found], "ms", 1e3),
        ("row: live line / tqdm", [row / peer for row, _, peer in found], "", 1),
        ("share of a core for the frames", [1000 * frame for _, frame, _ in found], "%", 1),
    ):
        print(
            f"{name:45}{factor * statistics.median(values):8.3g} {unit}  [{factor * min(values):.3g}..{factor * max(values):.3g}]"
        )


if __name__ == "__main__":
    main()
