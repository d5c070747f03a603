"""The accuracy cost of strategies that do not compute the same as one process, compared with strategies that do.

    python benchmarks/apart.py                 all
    python benchmarks/apart.py pipedream 1f1b  only strategies with one of these words in their names

The default CNN trains on digits for 15 epochs, with three seeds and two optimizers. The figures are the mean test accuracy,
and the accuracy of the worst seed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
LINE = ["trainer.max_epochs=15", "trainer.eval_every=null", "checkpoint.every=null", "rehearse=false"]
OPTIMIZERS = {
    "adamw": ["optimizer=adamw"],
    "sgd, momentum 0.9": ["optimizer=sgd"],
    "sgd, momentum 0": ["optimizer=sgd", "optimizer.momentum=0"],
}
PIPELINE = ["parallel=pipeline", "parallel.schedule=pipedream"]
VARIANTS = {
    "1f1b, 3": ["parallel=pipeline", "launch.nproc_per_node=3"],
    "pipedream, 2": [*PIPELINE, "launch.nproc_per_node=2"],
    "pipedream, 3": [*PIPELINE, "launch.nproc_per_node=3"],
    "pipedream, 3, drained in every 5th step": [*PIPELINE, "parallel.drain_every=5", "launch.nproc_per_node=3"],
    "ddp, 4": ["parallel=ddp", "launch.nproc_per_node=4"],
    "local-sgd, 4": ["parallel=local-sgd", "launch.nproc_per_node=4"],
    "gossip, 4": ["parallel=gossip", "launch.nproc_per_node=4"],
}  # fmt: skip


def accuracy(*overrides: str, seed: int) -> float:
    """Return the test accuracy of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{ROOT}/train.py", *LINE, *overrides, f"seed={seed}", f"run.root={folder}"]
        subprocess.run(command, capture_output=True, check=True)
        (summary,) = Path(folder).glob("*/*/summary.json")
        found: float = json.loads(summary.read_text())["metrics"]["test"]["last"]["accuracy"]
        return found


def main(words: list[str]) -> None:
    print("| " + " | ".join(["strategy, processes", *OPTIMIZERS]) + " |")
    print("| --- |" + " --- |" * len(OPTIMIZERS))
    for name, overrides in VARIANTS.items():
        if words and not any(word in name for word in words):
            continue
        cells = []
        for optimizer in OPTIMIZERS.values():
            found = [accuracy(*overrides, *optimizer, seed=seed) for seed in SEEDS]
            cells.append(f"{statistics.mean(found):.4f} ({min(found):.4f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
