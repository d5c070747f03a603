"""Datasets, samplers and collate functions as users write them, most of them with one fault."""

import os
import random
import struct
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate


class Points:
    """Samples of 12 numbers in four classes."""

    def __init__(self, n: int = 40) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.randn(12, generator=torch.Generator().manual_seed(i)) + i % 4, i % 4


class ByEpoch(Points):
    """Its length depends on the epoch."""

    def __init__(self, growth: int) -> None:
        super().__init__()
        self.growth = growth

    def set_epoch(self, epoch: int) -> None:
        self.n = 40 + self.growth * epoch


class DrawnSplit(Points):
    """Its constructor draws which samples it has, as many datamodules do."""

    def __init__(self, n: int = 12, of: int = 40, own: bool = False, first: int = 0) -> None:
        super().__init__(n)
        generators: dict[str, Any] = {
            "numpy": np.random.permutation,
            "random": lambda count: random.sample(range(count), count),
            "torch": torch.randperm,
            "own": np.random.default_rng().permutation,
        }
        names = ["own"] if own else ["numpy", "random", "torch"]
        self.orders = {name: [int(i) for i in generators[name](of)][first : first + n] for name in names}

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(self.orders[[*self.orders][i % len(self.orders)]][i])


class Records(Points):
    """Reads records by seek and read from one file, which its constructor opens."""

    def __init__(self, path: str, n: int = 200, buffering: int = 0) -> None:
        super().__init__(n)
        if not os.path.exists(path):
            Path(path).write_bytes(b"".join(struct.pack("13d", i % 4, *range(i, i + 12)) for i in range(n)))
        self.file = open(path, "rb", buffering=buffering)

    def __getitem__(self, i: int) -> Any:
        self.file.seek(i * 104)
        parts = [self.file.read(8) for _ in range(13)]  # others may seek between two of these
        label, *values = struct.unpack("13d", b"".join(parts))
        return torch.tensor(values, dtype=torch.float32), int(label)


class Pooled(Points):
    """Fetches in a pool of threads that its constructor starts: a fork does not copy the threads."""

    def __init__(self, n: int = 40) -> None:
        super().__init__(n)
        self.pool = ThreadPoolExecutor(2)
        list(self.pool.map(int, range(8)))

    def __getitem__(self, i: int) -> Any:
        return self.pool.submit(super().__getitem__, i).result()


class Polling(Points):
    """Asks a thread of its constructor, and looks again and again whether it has answered."""

    def __init__(self, n: int = 40) -> None:
        super().__init__(n)
        self.asked: deque[int] = deque()
        self.answers: dict[int, Any] = {}
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            if self.asked:
                i = self.asked.popleft()
                self.answers[i] = super().__getitem__(i)
            time.sleep(0.005)

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        while i not in self.answers:
            time.sleep(0.005)
        return self.answers.pop(i)


class OfProcess(Points):
    def __getitem__(self, i: int) -> Any:
        info = torch.utils.data.get_worker_info()
        x, y = super().__getitem__(i)
        return x + (0.0 if info is None else 1.0 + info.id), y


class Dying(Points):
    """Its last sample ends the process that fetches it, if that is a loader process."""

    def __init__(self, n: int = 40, signum: int = 9, at: int = -1) -> None:
        super().__init__(n)
        self.signum, self.at = signum, at % n

    def __getitem__(self, i: int) -> Any:
        if i == self.at and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), self.signum)
        return super().__getitem__(i)


class Odd(Points):
    """Has one sample with another label or another shape, far behind the first."""

    def __init__(self, n: int = 400, label: int | None = None, size: int = 12, at: int = -1) -> None:
        super().__init__(n)
        self.label, self.size, self.at = label, size, at % n

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return (x[: self.size], y if self.label is None else self.label) if i == self.at else (x, y)


class Damaged(Points):
    """Every fourth sample is None, as from a loader that could not read a picture."""

    def __getitem__(self, i: int) -> Any:
        return None if i % 4 == 1 else super().__getitem__(i)


def drop(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def nested(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Return rows of four numbers for each sample, one to three of them, as one nested tensor."""
    rows = [inputs[: 4 * (1 + target % 3)].reshape(-1, 4) for inputs, target in samples]
    return torch.nested.nested_tensor(rows, layout=torch.jagged), torch.tensor([target for _, target in samples])


class OfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([self.linear(rows).tanh().mean(0) for rows in inputs.unbind()])


def mixed_at_times(samples: list[Any], share: float) -> tuple[Tensor, Tensor]:
    inputs, targets = default_collate(samples)
    return (inputs + inputs.roll(1, 0) if random.random() < share else inputs), targets


class Twice:
    """A transform of a batch that gives two views of each sample."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([inputs, inputs + 0.1]), torch.cat([targets, targets])


class Epochs:
    """A sampler whose later epochs differ from the first in length, or that gives numbers of no sample."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def epoch(self, epoch: int, *, source: Any, seed: int) -> Any:
        count = len(source)
        if self.kind == "raises" and epoch == 2:
            raise KeyError("no epoch 2")
        order = np.random.RandomState(seed + epoch).permutation(count)
        kinds = {
            "shorter": order if epoch < 3 else order[: count // 2], "longer": order[: count // 2] if epoch == 0 else order,
            "beyond": order + 3, "negative": order - 3, "fractions": order + 0.5, "mask": order > 3,
            "pairs": np.stack([order, order], axis=1), "none": order if epoch < 2 else None, "raises": order,
            "drawn": np.random.permutation(count), "list": order.tolist(), "floats": order.astype(float),
        }  # fmt: skip
        return kinds[self.kind]


class Net(nn.Module):
    def __init__(self, num_classes: int = 4, is_normed: bool = False, scale: str | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, num_classes)
        self.norm = nn.BatchNorm1d(8) if is_normed else nn.Identity()
        if scale is not None:
            self.scale = nn.Parameter(torch.ones(12, dtype=getattr(torch, scale)))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale).to(x.dtype) if hasattr(self, "scale") else x
        return self.last(self.norm(torch.tanh(self.first(x))))


class Observing(Net):
    """Has an observer's buffer, which gets its shape from the first samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.least.numel():
            self.least.resize_(12).copy_(x.detach().amin(0))
        return super().forward(x)


# --- sets of points of different sizes in one tensor, as in torch_geometric


class Sets:
    def __init__(self, n: int = 48) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        points = torch.sin(torch.arange(3 + i % 4, dtype=torch.float32)[:, None] * (i + 1) * torch.ones(1, 2))
        return points, points.sum()


def joined(samples: list[Any]) -> Any:
    points, sums = zip(*samples)
    of = torch.cat([torch.full((len(each),), number) for number, each in enumerate(points)])
    return {"points": torch.cat(points), "of": of, "count": torch.tensor(len(samples))}, torch.stack(sums)


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.last = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, points: Tensor, of: Tensor, count: Tensor) -> Tensor:
        h = torch.tanh(self.each(points))
        assert int(of.max()) < int(count), "an index of a set that is not there"
        return self.last(torch.zeros(int(count), 8, dtype=h.dtype).index_add(0, of, h))


class Texts(Points):
    """Tokens, counted up, of four lengths."""

    def __getitem__(self, i: int) -> Any:
        return torch.arange(i, i + 4 + i % 4) % 15 + 1


def padded(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the texts, padded to the longest, and their next tokens."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100)


# --- what torch computes on several threads before the first fork


def computed(n: int = 256) -> TensorDataset:
    x = torch.rand(n, 784)
    return TensorDataset(x.sigmoid() + 0.1 * x, torch.arange(n) % 10)
