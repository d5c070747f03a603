"""experiment=airbench beside the same method as a bare script (benchmarks/bare_airbench.py), per step.

    python benchmarks/airbench.py                    a narrow network and small batches, for a CPU
    python benchmarks/airbench.py --device cuda      the recipe's own size

Both sides train on the same synthetic images in CIFAR-10's format, for 200 steps in eight epochs, in one process: ten steps of
the one, then ten of the other. The ratio is that of neighbours, so other work on the machine slows both. The second half of
the steps counts: on our side with a row every ten steps, on both without evaluations and checkpoints.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_STEPS, WARM_UP, IN_EPOCH = 200, 100, 25
WIDTHS = {"cpu": [8, 16, 16], "cuda": [64, 256, 256]}
BATCH = {"cpu": 100, "cuda": 2000}


def rates(device: str) -> tuple[float, float]:
    """Return the rates of biases and head: the logits are divided by the number of features, and so are the gradients."""
    share = WIDTHS[device][-1] / 256
    return 106.0 * share, 1340.0 * share**2


def write_images(folder: Path, *, num_train: int) -> None:
    """Write ten patterns of 8 x 8 squares under noise, as CIFAR-10's binary files."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    patterns = np.kron(random.integers(0, 128, (10, 3, 8, 8)), np.ones((1, 1, 4, 4), dtype=np.int64))
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        labels = random.integers(0, 10, num_train // 5)
        images = patterns[labels] + random.integers(0, 128, (len(labels), 3, 32, 32))
        np.concatenate([labels[:, None], images.reshape(len(labels), -1)], axis=1).astype(np.uint8).tofile(folder / name)


def clocks() -> np.ndarray:
    """Return the seconds by the clock, and by the processors of this process."""
    return np.array([time.perf_counter(), time.process_time()])


class InTurn:
    """A sink that lets the bare script take ten steps after each ten of ours, and measures both."""

    def __init__(self, bare: Iterator[Any]) -> None:
        self.bare = bare
        self.spans: list[np.ndarray] = []  # of ten steps: the seconds of the bare script and ours, by each clock
        self.accuracy = 0.0

    def open(self, run: Any) -> None:
        self._since = clocks()

    def log(self, row: dict[str, Any]) -> None:
        ours, begun = clocks() - self._since, clocks()
        if row["split"] == "train":
            self.net: Any = next(self.bare)
            self.spans.append(np.stack([clocks() - begun, ours]))
        self.accuracy = row.get("tta_accuracy", 0.0)
        self._since = clocks()

    def close(self, summary: dict[str, Any]) -> None: ...


def compare(*, device: str, batch: int, num_rounds: int) -> str:
    """Return what both sides take for a step, and their ratio: medians, and quartiles of the ratio."""
    from benchmarks.bare_airbench import accuracy, read, trained
    from benchmarks.overhead import train_with

    biases, head = rates(device)
    line = ["experiment=airbench", f"model.widths={WIDTHS[device]}", f"global_batch_size={batch}", f"optimizer.sgd_lr={biases}",
            f"optimizer.groups=[{{match: head.weight, lr: {head}}}, {{match: whiten.bias, share: 0.375}}]",
            *(["precision=fp32"] if device == "cpu" else [])]  # fmt: skip
    spans, accuracies = list[np.ndarray](), list[tuple[float, float]]()
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "cifar-10-batches-bin")
            write_images(data, num_train=IN_EPOCH * batch)
            sink = InTurn(trained(data, device=device, widths=WIDTHS[device], batch=batch, rates=(biases, head)))
            train_with(sink, [*line, f"dataset.root={folder}"], num_steps=NUM_STEPS, device=device)
            spans += sink.spans[WARM_UP // 10 :]
            accuracies.append((accuracy(sink.net, *read(data, ["test_batch.bin"], device)), sink.accuracy))
    said = [f"a step of {batch} images; {len(spans)} times ten steps of each side"]
    for name, span in zip(("by the clock", "of processor time"), np.stack(spans).transpose(2, 1, 0)):
        bare_ms, ours_ms = np.median(span, axis=1) * 100
        low, middle, high = np.quantile(span[1] / span[0], [0.25, 0.5, 0.75])
        said.append(f"{name}: bare {bare_ms:.2f} ms, ours {ours_ms:.2f} ms, ratio {middle:.3f} [{low:.3f}..{high:.3f}]")
    bare_accuracy, our_accuracy = np.median(accuracies, axis=0)
    return "; ".join([*said, f"accuracy on these images {bare_accuracy:.3f} and {our_accuracy:.3f}"])


if __name__ == "__main__":
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="images of a step (default: 100 on a CPU, 2,000 on a GPU)")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1 if given.device == "cpu" else torch.get_num_threads())
    print(compare(device=given.device, batch=given.batch or BATCH[given.device], num_rounds=given.rounds))
