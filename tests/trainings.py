"""Datasets and tasks as a user may bring them, for tests/test_any_training.py."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.data.synthetic import Synthetic
from framework.tasks.classification import Classification


class Masked(Synthetic):
    """Tokens of which some do not count: in a third of the sequences most of them."""

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: np.ndarray | None) -> tuple[Tensor, Tensor]:
        counts = (inputs % 3 != 0) & ((inputs[:, :1] % 3 != 0) | (inputs % 5 == 1))
        return inputs.long(), torch.where(counts, targets.long(), -100)


class Net(nn.Module):
    """Images (B, 3, 8, 8) to 10 numbers: a network with BatchNorm and dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.BatchNorm1d(24))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(dropout)) for _ in range(3))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.stem(x)))

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Labels(Classification):
    def __init__(self) -> None:
        super().__init__(label_smoothing=0.0)


class Consistency(Labels):
    """Two forwards that draw differently should agree (R-Drop)."""

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        one, two = call(batch.inputs), call(batch.inputs)
        apart = F.kl_div(one.log_softmax(-1), two.log_softmax(-1), reduction="sum", log_target=True)
        loss = F.cross_entropy(one, batch.targets, reduction="sum") + F.cross_entropy(two, batch.targets, reduction="sum")
        return {"loss": loss / 2 + 0.5 * apart, "apart": apart}


class Contrastive:
    """Two views of each sample find each other among all samples of the global batch (SimCLR); without labels."""

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        inputs = batch.inputs
        noise = torch.randn(inputs.shape, generator=context.generator, dtype=inputs.dtype)
        one, two = F.normalize(call(inputs)), F.normalize(call(inputs + 0.1 * noise))
        return one, two

    def loss_of_rows(self, own_views: Any, every_view: Any, batch: Any, context: Any) -> Any:
        (one, two), (every_one, every_two) = own_views, every_view
        own = torch.arange(context.start, context.start + len(one))
        assert torch.equal(every_one[own], one) and len(every_two) == context.num_samples
        losses = [F.cross_entropy(a @ b.T / 0.5, own, reduction="sum") for a, b in [(one, every_two), (two, every_one)]]
        return {"loss": sum(losses) / 2, "found": ((one @ every_two.T).argmax(-1) == own).sum()}


class Distillation(Labels):
    """A frozen teacher, in no checkpoint, that the task has made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net().requires_grad_(False).eval()

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        outputs, wanted = call(batch.inputs), self.teacher(batch.inputs)
        soft = F.kl_div(outputs.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True)
        return soft + F.cross_entropy(outputs, batch.targets, reduction="sum"), torch.tensor(float(len(outputs)))


class SelfDistillation(nn.Module):
    """The averaged weights are the teacher, whose outputs are centred by a mean over all samples (DINO)."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        wanted = context.averaged(batch.inputs)
        return {"wanted": wanted, "outputs": call(batch.inputs)}

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> Any:
        if context.is_training:
            self.centre = 0.9 * self.centre + 0.1 * everyone["wanted"].mean(0)
        return F.cross_entropy(own["outputs"], ((own["wanted"] - self.centre) / 0.2).softmax(-1), reduction="sum")


class GradientPenalty(Labels):
    """The gradient by the inputs should be short, and change little."""

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        inputs = batch.inputs.clone().requires_grad_()
        loss = F.cross_entropy(call(inputs), batch.targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (bend,) = torch.autograd.grad(gradient.square().sum(), inputs, create_graph=True)
        return loss + 0.1 * gradient.square().sum() + 0.1 * bend.square().sum()


class InPieces(Labels):
    def step(self, call: Any, batch: Any, context: Any) -> Any:
        features = call.features(call.stem(batch.inputs))
        for block in call.blocks:
            features = features + block(features)
        outputs = call.head(features)
        return F.cross_entropy(outputs, batch.targets, reduction="sum")


class Adversaries:
    def step(self, call: Any, batch: Any, context: Any) -> Any:
        noise = torch.randn(len(batch.inputs), 8, generator=context.generator_of_step, dtype=batch.inputs.dtype)
        generated = call(noise, "generate")
        seen = {f"seen_by_{context.turn}": generated.square().sum()}
        if context.turn == "generator":
            return {"loss": F.softplus(-call(generated, "judge")).sum(), **seen}
        loss = F.softplus(-call(batch.inputs, "judge")).sum() + F.softplus(call(generated.detach(), "judge")).sum()
        return {"loss": loss, **seen}


class MeanLoss(Consistency):
    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return F.cross_entropy(call(batch.inputs), batch.targets)


class TrainedTeacher(Distillation):
    def __init__(self) -> None:
        super().__init__()
        self.teacher.requires_grad_(True)


class NoRows(Consistency):
    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return call(batch.inputs).sum()

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> Any:
        return own


class NoLoss(Consistency):
    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return {"outputs": call(batch.inputs).sum()}


class Gan(nn.Module):
    """A generator of images (B, 3, 8, 8) and a critic of them, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 192))
        self.critic = nn.Sequential(nn.Linear(192, 24), nn.GELU(), nn.Linear(24, 1))

    def forward(self, x: Tensor, part: str) -> Tensor:
        return self.generator(x).unflatten(1, (3, 8, 8)) if part == "generate" else self.critic(x.flatten(1)).squeeze(1)


class Adversarial:
    """The critic tells images from generated ones, and the generator makes it err, in turns."""

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        noise = torch.randn(len(batch.inputs), 8, generator=context.generator, dtype=batch.inputs.dtype)
        if context.turn == "generator":
            return F.softplus(-call(call(noise, "generate"), "judge")).sum()
        with torch.no_grad():
            generated = call(noise, "generate")
        loss = F.softplus(-call(batch.inputs, "judge")).sum() + F.softplus(call(generated, "judge")).sum()
        return {"loss": loss, "fooled": (call(generated, "judge") > 0).sum()}
