"""The speed of data loading, compared with torch's DataLoader over a handwritten dataset that returns one sample at a time.

    python benchmarks/data.py            samples per second of both sides, with and without two loader processes
    python benchmarks/data.py shares     the fraction of a step that the recipes wait for their data (if they can run here)

Both sides fetch the same samples in batches, in turn. Ratios are of wall time: median and quartiles over the rounds.
"""

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from framework.data.image_folder import ImageFolder
from framework.data.loader import Loader
from framework.data.order import Order
from framework.data.source import Dataset
from framework.data.synthetic import Synthetic
from framework.data.tokens import Tokens

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 7
SHARES = {"default": [], "fashion_mnist_cnn": ["experiment=fashion_mnist_cnn"], "stdlib_gpt": ["experiment=stdlib_gpt"]}


class OneByOne(TorchDataset[Any]):
    def __init__(self, length: int, sample: Callable[[int], Any]) -> None:
        self.length, self.sample = length, sample

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def images(folder: Path, workers: int) -> tuple[Dataset, Callable[[int], Any]]:
    dataset = Synthetic(num_train=20000, image_size=32, num_workers=workers)
    source: Any = dataset.load("train")
    mean, std = (torch.tensor(list(values)).view(-1, 1, 1) for values in (dataset.mean, dataset.std))

    def sample(index: int) -> Any:
        return (torch.from_numpy(source.inputs[index]).float().div(255) - mean) / std, source.targets[index]

    return dataset, sample


def tokens(folder: Path, workers: int, *, seq_len: int) -> tuple[Dataset, Callable[[int], Any]]:
    path = folder / "tokens.bin"
    if not path.exists():
        np.random.default_rng(0).integers(0, 50000, 20_000_000, dtype=np.uint16).tofile(path)
    mapped = np.memmap(path, np.uint16, mode="r")

    def sample(index: int) -> Any:
        window = torch.from_numpy(mapped[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64))
        return window[:-1], window[1:]

    return Tokens(root=str(path), vocab_size=50304, seq_len=seq_len, num_workers=workers), sample


def pictures(folder: Path, workers: int) -> tuple[Dataset, Callable[[int], Any]]:
    root = folder / "pictures"
    if not root.exists():
        random = np.random.default_rng(0)
        for name in ("one", "two"):
            (root / "train" / name).mkdir(parents=True)
            for index in range(200):
                coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
                coarse.resize((500, 375), Image.Resampling.BICUBIC).save(root / "train" / name / f"{index}.jpg", quality=90)
    dataset = ImageFolder(root=str(root), image_size=64, decode_once_gib=0, num_workers=workers)
    source: Any = dataset.load("train")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))

    def sample(index: int) -> Any:
        with Image.open(source.paths[index]) as image:
            array = np.asarray(image.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))
        return (torch.from_numpy(array.copy()).permute(2, 0, 1).float().div(255) - mean) / std, source.targets[index]

    return dataset, sample


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {  # the function that makes the data, samples per batch, batches
    "images in memory, 32 x 32": (images, 128, 100),
    "tokens, 128 in a sample": (functools.partial(tokens, seq_len=128), 32, 400),
    "tokens, 1024 in a sample": (functools.partial(tokens, seq_len=1024), 16, 400),
    "JPEG of 500 x 375 to 64 x 64": (pictures, 32, 10),
}


def ours(dataset: Dataset, *, batch: int) -> Iterator[Any]:
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=batch, seed=0, drop_last=True)
    device, dtype = torch.device("cpu"), torch.float32
    loader = Loader(dataset, source, order=order, micro_batch_size=None, dp_rank=0, dp_size=1, device=device, dtype=dtype)
    return loader.train(0)


def theirs(sample: Callable[[int], Any], *, length: int, batch: int, workers: int) -> Iterator[Any]:
    loader: Any = DataLoader(OneByOne(length, sample), batch_size=batch, shuffle=True, num_workers=workers, drop_last=True)
    while True:
        yield from loader


def rate(steps: Iterator[Any], *, count: int, batch: int) -> float:
    for _ in islice(steps, 3):
        pass
    start = time.perf_counter()
    for _ in islice(steps, count):
        pass
    return batch * count / (time.perf_counter() - start)


def compare() -> None:
    print(f"torch {torch.__version__}; samples per second, medians of {ROUNDS} rounds\n")
    print(f"{'data':30} {'workers':>7} {'DataLoader':>11} {'ours':>11}   ratio [quartiles]")
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, batch, count) in CASES.items():
            for workers in (0, 2):
                rates: list[tuple[float, float]] = []
                for _ in range(ROUNDS):
                    dataset, sample = make(Path(folder), workers)
                    length = len(dataset.load("train"))
                    bare = rate(theirs(sample, length=length, batch=batch, workers=workers), count=count, batch=batch)
                    rates.append((bare, rate(ours(dataset, batch=batch), count=count, batch=batch)))
                low, middle, high = statistics.quantiles([mine / bare for bare, mine in rates], n=4)
                bare, mine = (statistics.median(side) for side in zip(*rates))
                print(f"{name:30} {workers:7} {bare:11,.0f} {mine:11,.0f}   {middle:.2f} [{low:.2f}..{high:.2f}]", flush=True)


def shares() -> None:
    for name, line in SHARES.items():
        with tempfile.TemporaryDirectory() as folder:
            limits = ["trainer.max_steps=60", "trainer.max_epochs=null", "trainer.eval_every=null", "trainer.log_every=10"]
            command = [sys.executable, str(ROOT / "train.py"), *line, *limits, f"run.root={folder}"]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode:
                print(f"{name:20} not run: {ended.stderr.strip().splitlines()[-1]}")
                continue
            (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
            rows = [json.loads(text) for text in metrics.read_text().splitlines()]
            waits = [row["data_share"] for row in rows if row["split"] == "train"][1:]
            print(f"{name:20} {100 * statistics.median(waits):.2f} % of a step", flush=True)


if __name__ == "__main__":
    shares() if sys.argv[1:] == ["shares"] else compare()
