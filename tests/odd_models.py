"""Models of somebody's, of the kinds that are not a row of blocks: shared, frozen, unused and counted things in odd places."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.tasks.classification import Classification


class Counted(nn.Module):
    """A residual layer that follows the mean of what comes in, as normalisations do."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    """What all of them begin and end with."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, dim: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, dim))
        self.head = nn.Linear(dim, num_classes)
        self.make_layers(dim)

    def make_layers(self, dim: int) -> None:
        raise NotImplementedError


class OneBlock(Plain):
    """The same block three times, as ALBERT has it."""

    def make_layers(self, dim: int) -> None:
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Tanh())] * 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Answering(nn.Linear):
    """Answers parameters() itself, without the argument that torch's method takes, and with a list of some of them."""

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight]


class OwnParameters(OneBlock):
    """Its layers answer parameters() themselves, as the layers of public meta-learning code do."""

    def make_layers(self, dim: int) -> None:
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), Answering(dim, dim), nn.Tanh())] * 3)
        self.head = Answering(dim, self.head.out_features)


class Woven(Plain):
    """A module under two names, one inside of two others, weights tied across blocks, a frozen one, and its own parameters."""

    def make_layers(self, dim: int) -> None:
        shared = nn.Linear(dim, dim)
        self.first = nn.Sequential(shared, nn.Tanh())
        self.blocks_of_mine = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, dim), shared), nn.Linear(dim, dim), nn.Linear(dim, dim)]
        )
        self.again = self.first
        self.blocks_of_mine[2].weight = self.blocks_of_mine[1].weight
        self.frozen = Counted(dim).requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.register_buffer("offset", torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(self.stem(x)) * self.scale + self.offset
        for block in self.blocks_of_mine:
            x = x + torch.tanh(block(x))
        x = self.frozen(self.again(x))
        return {"features": x, "logits": self.head(x)}


class Chained(Plain):
    """A chain whose links share weights across stages, each with a buffer that it changes; some are frozen."""

    def make_layers(self, dim: int) -> None:
        self.layers = nn.ModuleList(Counted(dim) for _ in range(4))
        self.layers[3].linear.weight = self.layers[1].linear.weight
        self.layers[0].requires_grad_(False)

    def chain(self) -> list[nn.Module]:
        return [self.stem, *self.layers, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for link in self.chain():
            x = link(x)
        return x


class Making(Plain):
    """Between its blocks, its forward makes tensors without a device, as scripts for one CPU do."""

    def make_layers(self, dim: int) -> None:
        self.layers = nn.ModuleList(Counted(dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x + nn.functional.linear(torch.ones(x.shape[-1], dtype=x.dtype) / 8, layer.linear.weight))
        return self.head(x)


class MakingLoss(Classification):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            outputs, targets, weight=torch.linspace(1, 1, outputs.shape[1], dtype=outputs.dtype), reduction="sum"
        )


class Unused(OneBlock):
    def make_layers(self, dim: int) -> None:
        super().make_layers(dim)
        self.spare = nn.Linear(dim, dim)


class Scalar(OneBlock):
    def make_layers(self, dim: int) -> None:
        super().make_layers(dim)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Fickle(Plain):
    """Leaves a layer out of the last of two micro-batches, from the fifth forward on; on one rank, or on all."""

    num_calls = 0

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, dim: int = 12, on: int | None = None) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size, num_classes=num_classes, dim=dim)
        self.on = on

    def make_layers(self, dim: int) -> None:
        self.spare = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        leaves_out = self.training and self.num_calls >= 5 and self.num_calls % 2 == 0 and self.on in (None, dist.get_rank())
        x = self.stem(x)
        return self.head(x if leaves_out else self.spare(x))
