"""The cost of invariance=bitwise: its step compared with a step of plain ddp, on the same micro-batches.

    python benchmarks/bitwise.py

Both sides run in turn, several times. A figure is the median over the later rows of `metrics.jsonl`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_ROUNDS = 3
BATCH, MICRO_BATCH = 64, 4
COMMON = [f"global_batch_size={BATCH}", f"micro_batch_size={MICRO_BATCH}", "trainer.max_epochs=null", "trainer.max_steps=60",
          "trainer.log_every=5", "trainer.eval_every=null", "checkpoint.every=null", "parallel=ddp"]  # fmt: skip
MODELS = {
    "cnn": ["model=cnn", "model.norm=batch", "model.dropout=0.1"],
    "gpt": ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=32", "dataset.num_train=512",
            "dataset.num_val=1", "dataset.num_test=1", "model=gpt", "model.dim=64", "model.num_layers=2"],
}  # fmt: skip


def step_ms(overrides: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, str(ROOT / "train.py"), *COMMON, *overrides, f"run.root={folder}"]
        subprocess.run(line, capture_output=True, check=True)
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        rows = [json.loads(text) for text in metrics.read_text().splitlines()]
    rates = [row["samples_per_s"] for row in rows if row["split"] == "train"]
    return 1000 * BATCH / statistics.median(rates[len(rates) // 2 :])


def main() -> None:
    count = BATCH // MICRO_BATCH
    print(f"{count} micro-batches a step\n{'model':6} {'processes':>9} {'ddp ms':>8} {'bitwise ms':>11} {'ratio':>6}")
    for model, overrides in MODELS.items():
        for ranks in (2, 3, 4):
            line = [*overrides, f"launch.nproc_per_node={ranks}"]
            rounds = [(step_ms(line), step_ms([*line, "invariance=bitwise"])) for _ in range(NUM_ROUNDS)]
            plain, bitwise = (statistics.median(side) for side in zip(*rounds))
            print(f"{model:6} {ranks:9} {plain:8.1f} {bitwise:11.1f} {bitwise / plain:6.2f}", flush=True)


if __name__ == "__main__":
    main()
