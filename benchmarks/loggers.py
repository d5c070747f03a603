"""How long a logger delays the next training step, also if the logger's server is dead.

    python benchmarks/loggers.py

The figures are the time that a row takes in the training process (2,000 rows, one per millisecond), and the times of the start
and the end. In addition, the processes of the loggers use the CPUs.
"""

import math
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_ROWS = 2000
ONLINE = ["logger=wandb", "logger.wandb.mode=online", "logger.wandb.timeout_s=5"]
CASES = {
    "tensorboard": ["logger=tensorboard"],
    "wandb, offline": ["logger=wandb", "logger.wandb.mode=offline"],
    "wandb, a server that never answers": ONLINE,
    "wandb, a port where there is no server": ONLINE,
}


def measure(overrides: list[str]) -> tuple[float, list[float], float]:
    """Return for how many seconds a logger's start, each row and the end block the calling process."""
    from framework import compose
    from framework.build.components import sinks
    from framework.loggers.sink import RunInfo

    row = {"split": "train", "loss": 2.3, "accuracy": 0.1, "lr": 1e-3, "grad_norm": 1.0, "samples_per_s": 1e4, "epoch": 0}
    with tempfile.TemporaryDirectory() as folder:
        config = compose(*overrides, f"run.dir={folder}")
        Path(folder, "metrics.jsonl").touch()
        begun = time.perf_counter()
        logger: Any = list(sinks(config.logger).values())[1]
        logger.open(RunInfo(Path(folder), "id", "name", 0, NUM_ROWS, config.plain(), record_id="id-00000000"))
        start = time.perf_counter() - begun
        rows = []
        for step in range(1, NUM_ROWS + 1):
            begun = time.perf_counter()
            logger.log({"step": step} | row)
            rows.append(time.perf_counter() - begun)
            time.sleep(0.001)
        begun = time.perf_counter()
        logger.close({"status": "finished", "step": NUM_ROWS, "metrics": {}})
        logger.wait(within_s=math.inf)
        return start, rows, time.perf_counter() - begun


def main() -> None:
    print(f"{'':40}  start   a row: median, 99 of 100      end")
    for case, overrides in CASES.items():
        with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
            os.environ |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": "k" * 40}
            if "no server" in case:
                server.close()
            start, rows, end = measure(overrides)
        median, most = statistics.median(rows), statistics.quantiles(rows, n=100)[-1]
        print(f"{case:40} {start * 1e3:3.0f} ms {median * 1e6:8.0f} us {most * 1e6:11.0f} us {end:11.1f} s", flush=True)


if __name__ == "__main__":
    main()
