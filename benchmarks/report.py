"""The time for a report of many runs: to write it, and until Chromium has drawn it.

    python benchmarks/report.py [runs] [rows]       the default is 1000 runs of 300 training rows

The runs are files like those of a real run, with three metrics and two swept keys. A page is drawn when its last script has
ended and the browser has painted the next frame. This needs selenium, and Debian's chromium and chromium-driver
(tests/install_debian.sh).
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NUM_ROUNDS = 5


def write_run(path: Path, *, number: int, num_rows: int, config: dict[str, object]) -> None:
    draw, lr = random.Random(number), 10 ** (-1 - number % 40 / 10)
    path.mkdir(parents=True)
    (path / "lock").touch()
    optimizer = {**config["optimizer"], "lr": lr}  # type: ignore[dict-item]
    (path / "config.yaml").write_text(yaml.safe_dump({**config, "optimizer": optimizer, "seed": number // 40}))
    lines = []
    for row in range(1, num_rows + 1):
        for split in ["train"] + ["val"] * (row % 10 == 0):
            loss = 3 * (row + 1) ** -lr + draw.gauss(0, 0.02)
            values = {"step": 10 * row, "split": split, "loss": loss, "accuracy": 1 - loss / 3, "top5": 1 - loss / 5}
            machine = {
                "lr": lr,
                "grad_norm": draw.random(),
                "epoch": row // 30,
                "samples_per_s": 900 * draw.random(),
                "step_s": 0.07,
            }
            lines.append(json.dumps(values | (machine if split == "train" else {})) + "\n")
    (path / "metrics.jsonl").write_text("".join(lines))
    summary = {"status": "preempted", "step": 10 * num_rows, "samples_seen": 640 * num_rows, "wall_s": 60.0, "restarts": 0}
    (path / "summary.json").write_text(json.dumps(summary))


def main(num_runs: int = 1000, num_rows: int = 300) -> None:
    from benchmarks.browser import browser
    from framework.config.compose import compose_line
    from framework.runs.report import RunReader, write_page

    config = compose_line([]).config
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "runs")
        for number in range(num_runs):
            write_run(root / "sweep" / f"{number:012x}", number=number, num_rows=num_rows, config=config)
        begin, spent, reader = time.perf_counter(), time.process_time(), RunReader(root)
        runs, left_out = reader.read()
        read, spent = time.perf_counter(), time.process_time() - spent
        write_page(runs, left_out, root / "report.html", title="runs")
        written = time.perf_counter()
        reader.read()
        again = time.perf_counter() - written
        opened = []
        driver = browser(width=1400, height=1000, scheme="light")
        for _ in range(NUM_ROUNDS):
            driver.get("about:blank")
            start = time.perf_counter()
            driver.get((root / "report.html").as_uri())
            drawn = driver.execute_async_script(
                "requestAnimationFrame(() => setTimeout(() => arguments[0](document.documentElement.dataset.drawn)))"
            )
            assert drawn == "all"
            opened.append(time.perf_counter() - start)
        driver.quit()
        size = (root / "report.html").stat().st_size
    print(
        f"| runs x training rows | read, s | of the processor, s | write, s | read again, nothing new, s | file, MB | open, s [{NUM_ROUNDS} rounds] |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| {num_runs} x {num_rows} | {read - begin:.1f} | {spent:.1f} | {written - read:.1f} | {again:.1f} | {size / 1e6:.1f} "
          f"| {statistics.median(opened):.2f} [{min(opened):.2f}..{max(opened):.2f}] |")  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
