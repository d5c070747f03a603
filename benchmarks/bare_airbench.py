"""airbench94 with Muon as one writes it by hand, with torch alone: the same method as experiment=airbench.

python benchmarks/bare_airbench.py data/cifar-10-batches-bin cuda     prints the seconds, and the accuracy

Source: Jordan 2024, arXiv 2404.00498, and airbench94_muon of github.com/KellerJordan/cifar10-airbench. Rates are for a mean loss.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, BATCH, EPOCHS = [64, 256, 256], 2000, 8
RATES = {"filters": 0.24, "biases": 106.0, "head": 1340.0}
DECAY, SMOOTHING, WHITENED_EPOCHS = 4e-3, 0.2, 3
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Net(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        layers: list[nn.Module] = []
        for before, width in zip([24, *widths], widths):
            layers += [
                _conv(before, width),
                nn.MaxPool2d(2),
                _norm(width),
                nn.GELU(),
                _conv(width, width),
                _norm(width),
                nn.GELU(),
            ]
        self.layers = nn.Sequential(nn.GELU(), *layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(widths[-1], 10, bias=False)
        self.head.weight.data /= self.head.weight.std()

    def forward(self, images: Tensor) -> Tensor:
        features = self.layers(self.whiten(images))
        logits: Tensor = self.head(features) / features.shape[1]
        return logits


def _conv(before: int, width: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, width, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:before])
    return conv


def _norm(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


@torch.no_grad()
def whiten(net: Net, images: Tensor) -> None:
    patches = images[:5000].unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).double()
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + 5e-4).sqrt()).T.flip(0)
    filters *= filters.gather(1, filters.abs().argmax(1, keepdim=True)).sign()
    net.whiten.weight.copy_(torch.cat([filters, -filters]).view(24, 3, 2, 2))


class Muon(torch.optim.Optimizer):
    def __init__(self, filters: list[nn.Parameter]) -> None:
        super().__init__(filters, {"lr": RATES["filters"], "momentum": 0.6})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for filters in group["params"]:
                state = self.state[filters]
                buffer = state["buffer"] = state.get("buffer", torch.zeros_like(filters)) * group["momentum"] + filters.grad
                update = (filters.grad + group["momentum"] * buffer).flatten(1)
                update = update / (update.norm() + 1e-7)
                turned = update.T if update.shape[0] > update.shape[1] else update
                for _ in range(3):
                    square = turned @ turned.T
                    turned = 3.4445 * turned + (-4.7750 * square + 2.0315 * square @ square) @ turned
                turned = turned.T if update.shape[0] > update.shape[1] else turned
                filters.mul_(len(filters) ** 0.5 / filters.norm())
                filters.sub_(turned.reshape(filters.shape), alpha=group["lr"])


def optimizers_of(net: Net, *, biases_lr: float, head_lr: float) -> list[torch.optim.Optimizer]:
    filters = [p for p in net.layers.parameters() if p.ndim == 4]
    shifts = [p for p in net.layers.parameters() if p.ndim == 1 and p.requires_grad]
    rates = [([net.whiten.bias], biases_lr), (shifts, biases_lr), ([net.head.weight], head_lr)]
    groups = [{"params": params, "lr": lr, "weight_decay": DECAY / lr} for params, lr in rates]
    optimizers = [torch.optim.SGD(groups, momentum=0.85, nesterov=True, fused=True), Muon(filters)]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["first_lr"] = group["lr"]
    return optimizers


def take_step(net: Net, optimizers: list[torch.optim.Optimizer], images: Tensor, labels: Tensor, *, step: int, steps: int,
              dtype: torch.dtype | None) -> Tensor:  # fmt: skip
    whitened = steps * WHITENED_EPOCHS / EPOCHS
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            left = 1 - step / (whitened if group["params"][0] is net.whiten.bias else steps)
            group["lr"] = group["first_lr"] * max(0.0, left)
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        logits = net(images)
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, label_smoothing=SMOOTHING)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def read(root: Path, names: list[str], device: str) -> tuple[Tensor, Tensor]:
    records = torch.from_numpy(np.concatenate([np.fromfile(root / name, np.uint8) for name in names])).view(-1, 3073).to(device)
    images = records[:, 1:].view(-1, 3, 32, 32).float() / 255
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (MEAN, STD))
    return ((images - mean) / std).to(memory_format=torch.channels_last), records[:, 0].long()  # type: ignore[call-overload]


def crops(padded: Tensor) -> Tensor:
    """Return a random crop of each image, whose border of 2 pixels is its reflection."""
    shifts = torch.randint(0, 5, (len(padded), 2), device=padded.device)
    found = torch.empty_like(padded[:, :, 2:-2, 2:-2])
    for down in range(5):
        for right in range(5):
            mine = (shifts == torch.tensor([down, right], device=padded.device)).all(1)
            found[mine] = padded[mine, :, down : down + 32, right : right + 32]
    return found


@torch.no_grad()
def accuracy(net: Net, images: Tensor, labels: Tensor) -> float:
    net.eval()
    correct = 0
    for some, right in zip(images.split(2000), labels.split(2000)):
        padded = F.pad(some, (1,) * 4, "reflect")
        views = [(0.5, some), (0.25, padded[:, :, :32, :32]), (0.25, padded[:, :, 2:, 2:])]
        logits = sum(share * (net(view) + net(view.flip(3))) / 2 for share, view in views)
        correct += int((logits.argmax(1) == right).sum())  # type: ignore[attr-defined]
    return correct / len(labels)


def trained(
    root: Path, *, device: str, widths: list[int], batch: int, rates: tuple[float, float] = (RATES["biases"], RATES["head"])
) -> Iterator[Net]:
    """Train, and yield the network after every ten steps."""
    images, labels = read(root, [f"data_batch_{number}.bin" for number in range(1, 6)], device)
    net = Net(widths).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    whiten(net, images)
    optimizers = optimizers_of(net, biases_lr=rates[0], head_lr=rates[1])
    flipped = torch.where((torch.rand(len(images), device=device) < 0.5).view(-1, 1, 1, 1), images.flip(3), images)
    padded, dtype = F.pad(flipped, (2,) * 4, "reflect"), torch.bfloat16 if device == "cuda" else None
    step, in_epoch = 0, len(images) // batch
    for epoch in range(EPOCHS):
        seen = crops(padded)
        seen = seen.flip(3) if epoch % 2 else seen
        order = torch.randperm(len(images), device=device)
        for samples in order[: in_epoch * batch].split(batch):
            loss = take_step(net, optimizers, seen[samples], labels[samples], step=step, steps=EPOCHS * in_epoch, dtype=dtype)
            step += 1
            if step % 10 == 0:
                loss.item()  # as a loop does that prints now and then
                yield net


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    begun = time.perf_counter()
    *_, last = trained(folder, device=kind, widths=WIDTHS, batch=BATCH)
    print(time.perf_counter() - begun, accuracy(last, *read(folder, ["test_batch.bin"], kind)))
