"""Models, tasks, optimizers and data that break the promise, each in one way."""

import copy
import ctypes
import functools
import io
import itertools
import os
import random
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from framework.data.synthetic import Synthetic
from framework.modules.tensors import local
from framework.tasks.classification import Classification
from models.gpt import GPT
from models.moe import Experts


class Net(nn.Module):
    """A model without a fault, for images of 8 x 8."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, dim), nn.Linear(dim, 10)
        self.make()

    def make(self) -> None:
        """Make what a subclass has besides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x.flatten(1)))))

    def middle(self, x: Tensor) -> Tensor:
        return x


class Counter(Net):
    num_calls = 0

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        return x * (1 + 0.1 * self.num_calls)


class Average(Net):
    mean: Tensor | float = 0.0

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x - self.mean


class OwnGenerator(Net):
    generator = np.random.default_rng(0)

    def middle(self, x: Tensor) -> Tensor:
        return x * (1 + torch.from_numpy(self.generator.random(x.shape)).to(x)) if self.training else x


class Clock(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x * (1 + time.time() % 1) if self.training else x


class Forgotten(Net):
    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(12), persistent=False)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0).detach().to(self.mean), 0.1)
        return x - self.mean


class Late(Net):
    def make(self) -> None:
        self.register_parameter("weight", None)

    def middle(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.ones_like(x[0]))
        return x * self.weight


class Teacher(Net):
    def make(self) -> None:
        self.teacher = nn.Linear(192, 12).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data.lerp_(self.first.weight.data, 0.1)
        return self.last(torch.tanh(self.first(x.flatten(1))) + self.teacher(x.flatten(1)))


class Placing(Net):
    """Makes tensors of its own in its forward, in torch's default dtype."""

    def middle(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.linspace(0, 1, 12), torch.ones(12, 12).to(x))


class Dropping(Net):
    """Draws without a layer that tells; `Coupling` normalises over the samples."""

    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class SumsItself(Net):
    """Averages its statistics over all processes itself, as the code of some libraries does."""

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(12))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.mean(0).detach().to(self.mean)
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(mean)
            self.mean.lerp_(mean, 0.1)
        return x - self.mean


class ZeroMean(nn.Module):
    """A normalisation behind a linear layer without a bias behind a normalisation: the second mean is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)]
        nn.init.normal_(layers[2].weight, std=1000.0)
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.layers(x)).flatten(1))


class DroppingWhereCut(Dropping):
    """Draws between two layers that tensor parallelism cuts."""

    def tensor_plan(self) -> dict[str, str]:
        return {"first": "colwise", "last": "rowwise"}


class DroppingLate(Net):
    """Has a dropout without an effect, between two layers that tensor parallelism cuts; `StartsDropping` gives it one."""

    def make(self) -> None:
        self.drop = nn.Dropout(0.0)

    def middle(self, x: Tensor) -> Tensor:
        return self.drop(x)

    def tensor_plan(self) -> dict[str, str]:
        return {"first": "colwise", "last": "rowwise"}


class StartsDropping:
    """A part."""

    def step_begun(self, loop: Any) -> None:
        loop.module.drop.p = 0.3 if loop.step >= 10 else 0.0


class AlwaysDropping(Net):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


class Coupling(Net):
    def middle(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0, correction=0) if self.training else x


class Patient(Net):
    """Counts in a plain attribute what will matter later, or never; or in an object, a deque; or has an unused generator."""

    class Memory:
        def __init__(self) -> None:
            self.means: deque[float] = deque(maxlen=50)
            self.num_passes = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_calls, self.num_passes, self.memory = kind, 0, 0, self.Memory()
        if kind == "generator":
            self.noise = torch.Generator()

    def middle(self, x: Tensor) -> Tensor:
        if self.training and self.kind == "counter":
            self.num_calls += 1
        self.num_passes += self.kind == "unread"
        self.memory.num_passes += self.kind == "deep"
        if self.training and self.kind == "object":
            self.memory.means.append(float(x.detach().mean()))
        return x * 2 if max(self.num_calls, len(self.memory.means)) >= 40 else x


class LastSeen(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return x


class Clamped(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-100, 100)
        return x


class Replaced(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.last.weight.data = 0.99 * self.last.weight.data
        return x


class Initialised(Net):
    """Its shift is set by the first samples that it sees, as in a normalising flow."""

    def make(self) -> None:
        self.shift = nn.Parameter(torch.zeros(12))
        self.register_buffer("is_set", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.shift.data.copy_(-x.detach().mean(0))
            self.is_set.fill_(1.0)
        return x + self.shift


class Mapped(Net):
    """Its middle is called by vmap, in which no number can be read."""

    def make(self) -> None:
        self.inner = nn.Linear(12, 12)

    def middle(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.func.jacrev(lambda one: self.inner(one).tanh()))(x).sum(-1) + x


class OddKeys:
    """A part whose state has a key that no file can have."""

    def __init__(self, key: Any, is_inner: bool) -> None:
        value = torch.zeros(2)
        self.state: dict[Any, Any] = {"inner": {key: value}} if is_inner else {key: value}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


class Saving:
    """A part that changes the weights, or the rate, when the run saves."""

    def __init__(self, what: str) -> None:
        self.what = what

    def saving(self, loop: Any) -> None:
        if self.what == "rate":
            loop.lr_share *= 0.5
        else:
            with torch.no_grad():
                next(loop.module.parameters()).mul_(0.5)


class LateBuffer(Net):
    def make(self) -> None:
        self.register_buffer("mean", None)

    def middle(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x - self.mean


class Cache(Net):
    """Makes a buffer in its first forward, which no checkpoint holds, because each forward could."""

    def middle(self, x: Tensor) -> Tensor:
        if not hasattr(self, "slopes"):
            self.register_buffer("slopes", torch.linspace(0.5, 1.0, x.shape[1], dtype=x.dtype), persistent=False)
        return x * self.slopes


class LooksAndDraws:
    """A part that calls a block of `Residual` outside of a pass, and then draws."""

    def gradients_ready(self, loop: Any) -> None:
        loop.module.blocks[0](torch.zeros(1, 12, dtype=loop.module.scales.dtype))
        share = torch.rand(()).item()
        for parameter in loop.module.parameters():
            parameter.grad.mul_(share)


class Hooked(Net):
    """Has weights that hooks compute from parameters before each forward; the constructor computes the first, with a graph."""

    def make(self) -> None:
        for layer in (self.first, self.last):
            prune.l1_unstructured(layer, "weight", amount=0.5)


class Synchronised(Net):
    def make(self) -> None:
        self.norm = nn.SyncBatchNorm(12)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Sparse(Net):
    def make(self) -> None:
        self.table = nn.Embedding(4, 12, sparse=True)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.table((x > 0).sum(1) % 4)


class Graph(Net):
    def __init__(self, layout: str = "sparse_coo", persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(12).to_sparse(layout=getattr(torch, layout)), persistent=persistent)

    def middle(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, x.T).T


class TrainsOnly(Net):
    def parameters(self, recurse: bool = True) -> Any:
        return self.last.parameters()


class Fixed(Net):
    def make(self) -> None:
        self.register_buffer("hidden", torch.zeros(16, 12))

    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.hidden = torch.tanh(x + self.hidden).detach()
        return x + self.hidden


class Added(nn.Sequential):
    def added(self, x: Tensor) -> Tensor:
        return x + self[1](self[0](x))


class NotByForward(Net):
    def make(self) -> None:
        self.blocks = nn.ModuleList(Added(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.added(x)
        return x


class LayerDrop(Net):
    """Passes over its block now and then: another one on each process."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p, self.blocks = p, nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() > self.p:
                x = x + block(x)
        return x


class Extra(Net):
    """Has an extra state that it reads; `Odd` one that is no plain data."""

    def make(self) -> None:
        self.scale = {"value": 1.0, "history": torch.zeros(3)}

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            value = self.scale["value"] * 1.5
            self.scale = {"value": value, "history": torch.full((3,), value)}
        return x * self.scale["value"]


class Odd(Extra):
    def get_extra_state(self) -> Any:
        return {"object": object()}


class Killed(Net):
    def middle(self, x: Tensor) -> Tensor:
        if os.environ.get("FATAL") == str(os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Noisy(Net):
    def middle(self, x: Tensor) -> Tensor:
        print("said by the model", flush=True)
        return x


class Reader(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x.flatten(1), self.first.weight, self.first.bias)
        return self.last(hidden).tanh_()


class WrongPlan(Net):
    """Says to cut two layers that do not follow each other."""

    def tensor_plan(self) -> dict[str, str]:
        return {"first": "colwise"}

    def middle(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


class WrongChain(Net):
    def chain(self) -> list[nn.Module]:
        return [nn.Flatten(), self.first, self.last]


class Viewing(nn.Module):
    """Takes it for granted that what a convolution gives lies in memory channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(x).view(len(x), -1))


class ChannelsLast(Viewing):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return self.last(self.convolution(x).flatten(1))


class Statistics(nn.Module):
    """Keeps, in training, the mean of the features behind its blocks, for another program."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(192, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(x)


class Means(Classification):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)


class Coupled(Classification):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") + (outputs @ outputs.t()).tanh().sum()


class Probing(Classification):
    """Calls a layer alone, with numbers of float32."""

    def measured(self, engine: Any) -> dict[str, float]:
        return {"probe": float(engine.module.last(torch.ones(1, 12, dtype=torch.float32)).sum())}


class Samples:
    """Its evaluation counts classes that are drawn."""

    def step(self, call: Any, batch: Any, context: Any) -> dict[str, Tensor]:
        outputs = call(batch.inputs)
        sums = {"loss": F.cross_entropy(outputs, batch.targets, reduction="sum")}
        if context.is_training:
            return sums
        return sums | {"exact": (torch.multinomial(outputs.softmax(1), 1)[:, 0] == batch.targets).sum()}


class Centred(nn.Module):
    """Keeps the mean of the outputs, as self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(10))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs - self.center, targets, reduction="sum")
        if outputs.requires_grad:
            self.center.lerp_(outputs.detach().mean(0), 0.1)
        return loss

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}


class Spread(Classification):
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return super().metrics(outputs, targets) | {"spread": outputs.std(0).sum() * len(targets)}


class Mixing:
    """A part that mixes the samples of a micro-batch, or adds noise, from a step on, or in a share of them."""

    def __init__(self, kind: str, start: int = 0, share: float = 1.0) -> None:
        self.kind, self.start, self.share = kind, start, share

    def batch(self, loop: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if loop.step < self.start or (self.share < 1.0 and random.random() > self.share):
            return inputs, targets
        return inputs + (torch.randn_like(inputs) if self.kind == "noise" else inputs.roll(1, 0)), targets


class MixingStep:
    """A task whose own step mixes the samples, or draws from its context, from a step on."""

    def __init__(self, kind: str, start: int) -> None:
        self.kind, self.start = kind, start

    def step(self, call: Any, batch: Any, context: Any) -> dict[str, Tensor]:
        inputs = batch.inputs
        if context.step >= self.start:
            noise = torch.randn(inputs.shape, generator=context.generator, dtype=inputs.dtype)
            inputs = inputs + (inputs.roll(1, 0) if self.kind == "roll" else 0.1 * noise)
        return {"loss": F.cross_entropy(call(inputs), batch.targets, reduction="sum")}


class MixesLater(Net):
    """It mixes the samples after five forwards of training, which a buffer counts."""

    def make(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def middle(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x + 9 * x.roll(1, 0) if self.training and self.calls > 5 else x


class FrozenNorm(Net):
    """A normalisation that stays in evaluation mode."""

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(12).requires_grad_(False)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Confusion(Classification):
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"confusion": torch.zeros(10, 10)}


class NamedMetric(Classification):
    def __init__(self, *, label_smoothing: float, metric: str) -> None:
        super().__init__(label_smoothing=label_smoothing)
        self.metric = metric

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {self.metric: outputs.abs().sum(), "mae": outputs.sum()}


class Annealed(Classification):
    num_calls = 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.num_calls += 1
        return F.cross_entropy(outputs, targets, reduction="sum") * (1.0 if self.num_calls < 40 else 0.5)


class Weighted(nn.Module):
    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") * torch.exp(-self.log_variance)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}


class Lookahead(torch.optim.SGD):
    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1
        for p in itertools.chain(*(group["params"] for group in self.param_groups)) if self.count % 5 == 0 else ():
            p.mul_(0.5)


class ForAll(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"] = {"step": self.state["all"].get("step", 0) + 1}


class OfOtherTypes(torch.optim.SGD):
    """Keeps, from its third step on, momentum in bfloat16 and a mask, under keys with a slash."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        for p in group["params"]:
            momentum = self.state[p].setdefault("ema/grad", torch.zeros_like(p, dtype=torch.bfloat16))
            momentum.mul_(0.9).add_(p.grad.to(torch.bfloat16))
            is_big = self.state[p].setdefault("is/big", torch.ones_like(p, dtype=torch.bool))
            if group["count"] > 3:
                is_big.logical_and_(p.grad.abs() > 1e-6)
                p.sub_(torch.where(is_big, momentum.to(p.dtype), p.grad), alpha=group["lr"])


class NormOfShards(torch.optim.SGD):
    """Keeps a number for each parameter: of a shard, a sum that is not taken yet."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["norm"] = p.grad.square().sum()
            p.sub_(p.grad, alpha=0.01)


class OneForAll(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, *_ = self.param_groups[0]["params"]
        steps = self.state[first].setdefault("steps", torch.zeros(()))
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = steps.add_(1.0)
            p.sub_(p.grad, alpha=0.01)


class CouplesLate(torch.optim.SGD):
    """From its sixth step on, it scales its updates by the norm of all gradients that it has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        gradients = [local(p.grad) for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for p, gradient in zip(group["params"], gradients):
            local(p).add_(gradient, alpha=-0.1 / (float(norm) if group["count"] > 5 else 1.0))


class Estimates(torch.optim.SGD):
    """It estimates its rate in its parameter group from all parameters that it has, and uses it late, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        group["norm"] = group.get("norm", 0.0) + sum(
            float(p.grad.square().sum()) for p in group["params"] if p.grad is not None
        )
        super().step()
        for p in group["params"] if group["count"] > 200 else ():
            p.mul_(1.0 - min(0.1, group["norm"]))


class Amplifies(torch.optim.SGD):
    """A chaotic map, which begins late with the gradient, scales its steps: it makes any rounding large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            if state["count"] > 3:
                x = state["x"] = 4 * state["x"] * (1 - state["x"]) if "x" in state else (p.grad * 1e3).frac().abs()
                p.sub_(p.grad * x, alpha=0.01)


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            p.add_(torch.randn_like(p), alpha=0.01)


class Hidden(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.momenta: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.momenta[p] = self.momenta.get(p, torch.zeros_like(p)) * 0.9 + p.grad
                p.sub_(self.momenta[p], alpha=group["lr"])


class Counting(torch.optim.SGD):
    """Keeps numbers, text, lists, dictionaries and tensors wherever an optimizer may."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group |= {"k": 0, "total": 0.0, "d": torch.ones(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += group["lr"]
            group["d"] = group["d"] * 1.25
            group["seen"] = [*group.get("seen", []), (group["k"], "step")]
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["kept"] = {"norm": 1.0 / state["count"], "flags": [True, None]}
                scale = float(group["d"]) / group["k"] + len(group["seen"]) * 0.01 + state["kept"]["norm"]
                p.sub_(p.grad, alpha=group["lr"] * scale)


class Unkept(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            self.state[p]["thing"] = {1, 2}


@dataclass(kw_only=True, eq=False)
class Shuffled(Synthetic):
    """Draws in its transform: from common generators, or from one of its own."""

    own: bool = False

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: Any) -> tuple[Tensor, Tensor]:
        x, y = super().transform(inputs, targets, keys=keys)
        scale = OWN_NUMBERS.random(len(x)) if self.own else np.random.rand(len(x)) * random.random()
        return x * torch.from_numpy(scale).to(x)[:, None, None, None] + 0.1 * torch.rand_like(x) * (not self.own), y


class Keyed(Synthetic):
    def transform(self, inputs: Tensor, targets: Tensor, *, keys: Any) -> tuple[Tensor, Tensor]:
        assert len(keys) == len(inputs)
        return super().transform(inputs, targets, keys=keys)


OWN_NUMBERS = np.random.default_rng(0)


class Rates(Net):
    """Reads numbers in its constructor, as the original code of many vision transformers does."""

    def make(self) -> None:
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]

    def middle(self, x: Tensor) -> Tensor:
        return x * (1 + self.rates[1])


class Rotary(Net):
    """A complex buffer, as in the first code of Llama, and a part in a type of its own."""

    def make(self) -> None:
        self.register_buffer("freqs", torch.polar(torch.ones(6), torch.arange(6.0)), persistent=False)
        self.exact = nn.Linear(12, 12).double()

    def middle(self, x: Tensor) -> Tensor:
        assert self.freqs.is_complex() and self.exact.weight.dtype == torch.float64
        turned = torch.view_as_real(torch.view_as_complex(x.float().reshape(len(x), 6, 2)) * self.freqs).flatten(1)
        return self.exact(turned.double()).to(x.dtype)


@functools.cache
def projection(size: int) -> Tensor:
    return torch.randn(size, size) / size**0.5


class Cached(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x @ projection(x.shape[1]).to(x)


@functools.cache
def first_dtype() -> list[torch.dtype]:
    return []


class OfOneDtype(Net):
    def middle(self, x: Tensor) -> Tensor:
        first_dtype().append(x.dtype)
        assert x.dtype == first_dtype()[0], "a process has its tables for one dtype"
        return x


@functools.cache
def cached() -> nn.Module:
    return Net()


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), nn.Linear(6, 10)))


class Unknown(Net):
    def make(self) -> None:
        self.missing = float("nan")


class Hidden2(Net):
    """Keeps an average of itself in a list, where torch does not see it, and uses it in evaluations."""

    def make(self) -> None:
        self.average = [nn.Linear(12, 12)]

    def middle(self, x: Tensor) -> Tensor:
        (average,) = self.average
        if self.training:
            average.weight.data.lerp_(torch.full((12, 12), float(x.detach().mean())), 0.1)
            return x
        return average.to(x.dtype)(x)


class Schedule:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        return self.num_calls


COUNTS = {"calls": 0}


def count_in_global() -> int:
    COUNTS["calls"] += 1
    return COUNTS["calls"]


def count_in_default(calls: Any = [0]) -> int:  # noqa: B006
    calls[0] += 1
    return calls[0]


def halve_late(calls: dict[str, int], module: nn.Module, args: Any, output: Tensor) -> Tensor:
    calls["n"] = calls.get("n", 0) + module.training
    return output * (0.5 if calls["n"] > 60 else 1.0)


class Counts(Net):
    """Halves its features after 60 calls in training. It counts where `kind` says, which no checkpoint holds."""

    num_calls = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        calls = [0]

        def count_in_closure() -> int:
            calls[0] += 1
            return calls[0]

        kinds = {
            "default": count_in_default, "global": count_in_global, "closure": count_in_closure, "class": self.count_in_class,
            "attribute": self.count_in_attribute, "c": self.count_in_c, "iterator": itertools.count(1).__next__,
        }  # fmt: skip
        if kind == "hook":
            self.last.register_forward_hook(functools.partial(halve_late, {}))
        if kind == "much":
            self.adjacency = [[number] for number in range(30_000)]
        self.number, self.count = ctypes.c_long(0), kinds.get(kind) or (Schedule() if kind in ("object", "much") else int)

    def count_in_class(self) -> int:
        Counts.num_calls += 1
        return Counts.num_calls

    def count_in_attribute(self) -> int:
        self.first.weight.calls = getattr(self.first.weight, "calls", 0) + 1
        return self.first.weight.calls

    def count_in_c(self) -> int:
        self.number.value += 1
        return self.number.value

    def middle(self, x: Tensor) -> Tensor:
        return x * (0.5 if self.training and self.count() > 60 else 1.0)


class Deep(Net):
    def make(self) -> None:
        self.bank = {"a": [{"b": {"c": [torch.zeros(1000)]}}]}

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            inner: Any = self.bank["a"][0]["b"]
            inner["c"][0][-2:] += torch.tensor([1.0, -1.0])
        return x * (1.0 if self.bank["a"][0]["b"]["c"][0][-2] < 40 else 0.5)


class Calibrated(Net):
    def make(self) -> None:
        self.register_buffer("largest", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return x


class Bounded(Net):
    """It has infinite numbers in its buffers, as a causal mask does."""

    def make(self) -> None:
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("bound", torch.tensor(torch.inf))

    def middle(self, x: Tensor) -> Tensor:
        return torch.minimum(x + self.mask.softmax(-1).mean(), self.bound)


class Redraws(Net):
    """It draws a projection in every tenth call of training, as performers do."""

    def make(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(()))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls % 10 == 0:
                self.scale.copy_(1.0 + 0.1 * torch.rand(()))
        return x * self.scale


class TrainsOn(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.train()
        return x


class OfRank(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x * (1 + int(os.environ.get("RANK", "0")))


class Lookback(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["seen"], group["array"] = [torch.zeros(3), torch.zeros(3)], (torch.zeros(2),)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = [group["seen"][1], group["seen"][1] + 1]
        return super().step(closure)


class ByClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step()


class Progressive(Synthetic):
    num_batches = 0

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: np.ndarray | None) -> tuple[Tensor, Tensor]:
        inputs, targets = super().transform(inputs, targets, keys=keys)
        self.num_batches += 1
        return inputs * (1.0 if self.num_batches < 20 else 0.5), targets


class ClampsGradients(Net):
    """Limits gradients in its backward pass: what it sees must not depend on the number of processes."""

    def middle(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-3e-3, 3e-3))
        return x


class Stubborn(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise ValueError("the state of a stranger")


class ComplexWeight(Net):
    def make(self) -> None:
        self.turn = nn.Parameter(torch.randn(12, 12, dtype=torch.complex64) * 0.1)

    def middle(self, x: Tensor) -> Tensor:
        return (x.to(self.turn.dtype) @ self.turn).abs()


class Strided(Net):
    """A weight and a convolution whose memory is laid out otherwise."""

    def make(self) -> None:
        self.turned = nn.Parameter(torch.randn(12, 12).T)
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(12, 12))
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(x))

    def middle(self, x: Tensor) -> Tensor:
        return self.orthogonal(x @ self.turned)


class Teacher2(Net):
    """A mean teacher in a list, which begins as its model; its outputs matter after many steps."""

    def make(self) -> None:
        self.averaged = [copy.deepcopy(self.last)]

    def middle(self, x: Tensor) -> Tensor:
        (teacher,) = self.averaged
        if self.training:
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), self.last.parameters()):
                    mine.lerp_(other.to(mine), 0.1)
        return x + teacher.to(x)(x).mean()


# --- what is found in a run, later than a rehearsal looks


class Factored(torch.optim.SGD):
    """From the sixth step on it keeps a number for each row of a matrix: a state that is not shaped like its parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if group["k"] > 5 and p.grad is not None:
                    state = self.state[p]
                    row = p.grad.square().mean(-1, keepdim=True) if p.ndim > 1 else p.grad.square()
                    state["row"] = state.get("row", torch.zeros_like(row)) * 0.9 + row * 0.1
                    p.grad.div_(state["row"].sqrt() + 1.0)
        super().step()


class Later(Net):
    """Does something from its sixth step on, by a counter that is a buffer."""

    def make(self) -> None:
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_steps += 1
        return self.later(x) if self.num_steps > 5 else x

    def later(self, x: Tensor) -> Tensor:
        return x


class FreezesLater(Later):
    def later(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        return x


class FreezesStatistics(Later):
    def make(self) -> None:
        super().make()
        self.norm = nn.BatchNorm1d(12)

    def later(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return x

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(super().middle(x))


class LaterBuffer(Later):
    def later(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.full((12,), 0.5).to(x))
        return x * self.late


class GrowingBuffer(Later):
    def make(self) -> None:
        super().make()
        self.register_buffer("history", torch.ones(1, 12))

    def later(self, x: Tensor) -> Tensor:
        if self.training:
            self.history = torch.cat([self.history, x.detach().mean(0, keepdim=True).to(self.history)])
        return x * self.history.mean(0)


class LateTeacher(Later):
    def make(self) -> None:
        super().make()
        self.teacher = nn.Linear(12, 12).requires_grad_(False)

    def later(self, x: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data.mul_(0.9)
        return x + self.teacher(x)


class OfHashes(Net):
    """Depends on the hash of a text, and on the order of a set."""

    def make(self) -> None:
        self.parts = nn.ModuleDict({name: nn.Linear(12, 12) for name in {"local", "global", "edge", "texture", "colour"}})
        self.scale = 1 + hash("a layer") % 1000 / 1000

    def middle(self, x: Tensor) -> Tensor:
        for name in sorted(self.parts):
            x = x + self.parts[name](x) * self.scale
        return x


class TiedByData(Net):
    def make(self) -> None:
        self.again = nn.Linear(self.last.in_features, self.last.out_features)
        self.again.weight.data = self.last.weight.data


class NumpyWeights(Net):
    """A constructor that draws from numpy and Python, as the run seeds them."""

    def make(self) -> None:
        with torch.no_grad():
            self.last.weight.mul_(1.0 + random.random())
            self.last.bias.copy_(torch.from_numpy(np.random.randn(10)))


class OtherEachTime(Net):
    def make(self) -> None:
        with torch.no_grad():
            self.last.bias.copy_(torch.from_numpy(np.random.default_rng().standard_normal(10)))


class NoisyChain(nn.Module):
    """Draws in its forward, before the modules that its chain lists, which are all torch's own and draw nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.Tanh(), nn.Linear(12, 10))

    def chain(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * torch.randn_like(x) if self.training else x)


class Pulled(Net):
    """A deep equilibrium model's hook, which takes a gradient, in training mode only."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            out.register_hook(lambda gradient: 0.5 * gradient)
        return out


class Observing(Net):
    """Quantisation's flag: whether it observes depends on the mode alone."""

    def make(self) -> None:
        self.register_buffer("observes", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.observes.fill_(float(self.training))
        return super().forward(x)


class OnlyLoss:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")


class Points:
    """Samples of a map-style dataset; what a subclass remembers of them, no run can repeat."""

    def __init__(self) -> None:
        self.cache: dict[int, Tensor] = {}
        self.num_fetched = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.point(index), index % 10

    def point(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.full((3, 8, 8), index / 40)
        return self.cache[index] + 0.1 * torch.rand(3, 8, 8)


class PointsInAnArchive(Points):
    """Reads an open file, whose place moves, and a path, which keeps its own text when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.file, self.first, self.text = Path(__file__), io.BytesIO(bytes(range(256))), -1.0, ""

    def point(self, index: int) -> Tensor:
        self.file.seek(index)
        self.text = f"{self.path} {self.file.read(1)!r}"
        return super().point(index)


class PointsDrawnOnce(Points):
    def point(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.full((3, 8, 8), index / 40) + 0.1 * torch.rand(3, 8, 8)
        return self.cache[index]


class PointsThatCount(Points):
    def point(self, index: int) -> Tensor:
        self.num_fetched += 1
        return super().point(index) + (self.num_fetched > 100_000)


def masked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Collate as a masked language model's collator does: it draws for the batch."""
    points = torch.stack([point for point, _ in samples])
    return points * (torch.rand(points.shape) > 0.2), torch.tensor([label for _, label in samples])


class Drifting(torch.optim.SGD):
    """Keeps a list of what this rank's gradients are like, which differs where they are shards."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                mine = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                self.state[parameter].setdefault("norms", []).append(float(mine.norm()))
        return super().step(closure)


class OddExperts(Experts):
    """Experts that do not lie apart: they draw, or look at all choices of a token, or count on having all experts."""

    def __init__(self, kind: str) -> None:
        super().__init__(dim=12, num_experts=4)
        nn.init.normal_(self.up_XHD, std=0.1)
        nn.init.normal_(self.down_XDH, std=0.1)
        self.kind = kind

    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.kind == "dropout":
            x_ND = F.dropout(x_ND, 0.5, training=self.training)
        if self.kind == "coupled":
            weights_NK = weights_NK.softmax(dim=-1)
        if self.kind == "counted":
            assert len(self.up_XHD) == 4, "all of them"
        return super().forward(x_ND, index_NK, weights_NK)


class Mixed(Net):
    """Sends each sample to two of four experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.chosen = OddExperts(kind)

    def experts(self) -> list[nn.Module]:
        return [self.chosen]

    def middle(self, x: Tensor) -> Tensor:
        weights, index = x[:, :4].softmax(-1).topk(2)
        return x + self.chosen(x, index, weights)


class Residual(Net):
    """A plain loop over blocks with residual connections, each with a weight of its own outside of the blocks."""

    def __init__(self, reach: float = 0.0, has_spare: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.scales, self.reach = nn.Parameter(torch.ones(4)), reach
        self.spare = nn.Parameter(torch.ones(3, 3)) if has_spare else None

    def middle(self, x: Tensor) -> Tensor:
        first = x
        for number, block in enumerate(self.blocks):
            x = x + self.scales[number] * block(x)
            if self.reach:  # over all blocks
                x = x + self.reach * first
        return x


class Rolling(GPT):
    """Lets tokens meet outside of the modules that it names as its mixers."""

    def __init__(self, *, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, dim=16, num_layers=2, num_heads=2)
        for layer in self.layers:
            layer.dropout = Rolled()


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=1)


class LowersTheRate:
    """Restores what it counts, but not the rate that it has set."""

    count = 0

    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
        self.count += 1
        loop.lr_share = 0.5**self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class CountsPadding:
    """A part that counts the samples of a step, with those of padding."""

    def begun(self, loop: Any) -> None:
        self.count = 0
        for layer in loop.module.modules():
            if isinstance(layer, nn.Linear) and layer.out_features == 10:
                layer.register_forward_hook(self._note)

    def _note(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.count += len(output) if layer.training else 0

    def step_begun(self, loop: Any) -> None:
        self.count = 0

    def row(self, loop: Any) -> dict[str, float]:
        return {"num_samples": float(loop.sum(torch.tensor(float(self.count))))}


class Clocked:
    def row(self, loop: Any) -> dict[str, float]:
        return {"clock": time.perf_counter()}


class Clipping(Net):
    """Clips the gradient of a parameter where it arrives, as code for recurrent networks does."""

    def make(self) -> None:
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Hardest(Classification):
    """Sums the largest losses of a batch."""

    def __init__(self, *, label_smoothing: float, count: int) -> None:
        super().__init__(label_smoothing=label_smoothing)
        self.count = count

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses.topk(min(self.count, len(losses))).values.sum()


class InAnArray(Classification):
    """Normalises by a mean in an array, from a later epoch on."""

    mean = np.zeros(10)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * outputs.mean(0).detach().numpy()
        return super().loss(outputs, targets)


class InADictionary(InAnArray):
    def __init__(self, *, label_smoothing: float) -> None:
        super().__init__(label_smoothing=label_smoothing)
        self.stats = {"mean": 0.0}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.stats["mean"] += float(outputs.detach().mean())
        return Classification.loss(self, outputs, targets)


class Threshold(torch.optim.SGD):
    """Limits the norm of all gradients that it has, which are small here."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([local(p.grad).square().sum() for p in parameters]).sum().sqrt()
        for p in parameters:
            local(p).sub_(local(p.grad) * min(1.0, 20.0 / float(norm)), alpha=0.001)


class OnlyWholeIn16Bits(Net):
    """Without a fault in float64, and in 16 bits where its weights are not cut."""

    def middle(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") and hasattr(self.last.weight, "device_mesh"):
            raise RuntimeError("a kernel for 16 bits takes plain tensors")
        return x


class Timed:
    """A part that keeps when its last row was, with or without a checkpoint."""

    def __init__(self, is_saved: bool) -> None:
        self.last, self.is_saved = 0.0, is_saved

    def row(self, loop: Any) -> dict[str, float]:
        since, self.last = time.perf_counter() - self.last, time.perf_counter()
        return {"since": since}

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last} if self.is_saved else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state.get("last", self.last)


class Refills:
    """A part that gives every parameter a gradient, so that its optimizer finds one."""

    def gradients_ready(self, loop: Any) -> None:
        for parameter in loop.trained().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class LeavesAutocastOn(Classification):
    """A step after which its process computes in 16 bits, until the first micro-batch of the next step."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.0)

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        if context.start == 0:
            torch.set_autocast_enabled("cpu", False)
        loss = F.cross_entropy(call(batch.inputs), batch.targets, reduction="sum")
        torch.set_autocast_enabled("cpu", True)
        return loss


_LEFT: dict[int, Tensor] = {}  # of each bucket: what was not sent


def sends_half(group: Any, bucket: Any) -> Any:
    """A hook that sends half of a gradient, and the rest in the next step: it remembers this outside of the run's state."""
    gradient = bucket.buffer()
    wanted = gradient + _LEFT.get(bucket.index(), 0.0)
    _LEFT[bucket.index()] = wanted / 2
    gradient.copy_(wanted / 2 / group.size())
    work = torch.distributed.all_reduce(gradient, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Large(Classification):
    """Without a fault, but with losses that a sum in float64 rounds."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return 1e12 * F.cross_entropy(outputs, targets, reduction="sum")
