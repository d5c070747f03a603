"""Parts of the loop as a user may bring them, for tests/test_parts.py; some with a fault."""

import os
from typing import Any

import torch
from torch import Tensor

from framework.tasks.classification import Classification


@torch.no_grad()
def scale(loop: Any, factor: float) -> None:
    for parameter in loop.trained().values():
        parameter.mul_(factor)


class Kept:
    """A part whose state is its attributes of these names."""

    names: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Lookahead(Kept):
    """Every `every` steps the weights go back half of the way to where they were: state as large as the model."""

    names = "slow", "num_back"

    def __init__(self, every: int = 2) -> None:
        self.every, self.num_back = every, 0

    def begun(self, loop: Any) -> None:
        self.slow = {name: p.detach().clone() for name, p in loop.trained().items()}

    @torch.no_grad()
    def step_taken(self, loop: Any) -> None:
        if loop.step % self.every:
            return
        for name, parameter in loop.trained().items():
            self.slow[name].lerp_(parameter, 0.5)
            parameter.copy_(self.slow[name])
        self.num_back += 1


class Copies:
    """Its state_dict() returns other tensors at each call: copies, a generator's state, a number and one in another order."""

    def __init__(self) -> None:
        self.generator, self.mean, self.turned = torch.Generator().manual_seed(5), 0.0, torch.zeros(3, 2).t()

    def begun(self, loop: Any) -> None:
        self.averages = {name: torch.zeros_like(p) for name, p in loop.trained().items()}

    @torch.no_grad()
    def gradients_ready(self, loop: Any) -> None:
        draw = torch.rand((), generator=self.generator).item()
        self.mean, self.turned = 0.9 * self.mean + draw, self.turned + draw
        for name, parameter in loop.trained().items():
            if parameter.grad is not None:
                self.averages[name].lerp_(parameter.grad, 0.1)
                parameter.grad.mul_(1 + 0.1 * self.mean + self.turned[1, 2].item()).add_(self.averages[name])

    def state_dict(self) -> dict[str, Any]:
        copies = {name: average.clone() for name, average in self.averages.items()}
        mean, turned = torch.tensor(self.mean, dtype=torch.float64), self.turned.clone()
        return {"generator": self.generator.get_state(), "averages": copies, "mean": mean, "turned": turned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.mean, self.turned = state["mean"].item(), state["turned"]
        assert self.turned.stride() == (1, 2)
        for name, average in state["averages"].items():
            self.averages[name].copy_(average)


class Prune(Kept):
    """From a step on small weights are zero: a mask that is not there before."""

    names = ("mask",)

    def __init__(self) -> None:
        self.mask: dict[str, Tensor] = {}

    @torch.no_grad()
    def step_taken(self, loop: Any) -> None:
        if loop.step == 3:
            self.mask = {name: (p.abs() > 0.05).to(p.dtype) for name, p in loop.trained().items()}
        for name, mask in self.mask.items():
            loop.trained()[name].mul_(mask)


class Grows:
    def __init__(self) -> None:
        self.losses = torch.zeros(0, dtype=torch.float64)

    def gradients_ready(self, loop: Any) -> None:
        self.losses = torch.cat([self.losses, torch.tensor([loop.loss()], dtype=torch.float64)])

    def step_taken(self, loop: Any) -> None:
        scale(loop, 1 - 1e-3 * float(self.losses.mean()))

    def state_dict(self) -> dict[str, Any]:
        return {"seen.losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["seen.losses"]


class Loss(Kept):
    """Keeps a small tensor and draws, and both matter."""

    names = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(2, dtype=torch.float64)

    def gradients_ready(self, loop: Any) -> None:
        self.mean.mul_(0.5).add_(torch.tensor([loop.loss(), float(torch.rand(()))], dtype=torch.float64))

    def step_taken(self, loop: Any) -> None:
        scale(loop, 1 - 1e-3 * float(self.mean.sum()))

    def row(self, loop: Any) -> dict[str, float]:
        return {"mean_loss": self.mean[0]}  # a tensor


class Shrinks:
    """Gives the weights new data, as public code does for averages of weights."""

    def step_taken(self, loop: Any) -> None:
        for parameter in loop.trained().values():
            parameter.data = parameter.data * 0.99


class Stopper:
    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> dict[str, float]:
        if split == "val" and loop.step >= 2:
            loop.stop("it is good enough")
        return {"double_loss": 2 * row["loss"]}


class Phases:
    """Works in phases of four steps: it keeps the weights of the phase's start, and no checkpoint holds them."""

    def step_begun(self, loop: Any) -> None:
        if loop.step % 4 == 0:
            self._start = [weight.detach().clone() for weight in loop.trained().values()]

    @torch.no_grad()
    def step_taken(self, loop: Any) -> None:
        if loop.step % 4 == 0:
            for weight, start in zip(loop.trained().values(), self._start):
                weight.lerp_(start, 0.5)
            self._start = []

    def can_save(self, loop: Any) -> bool:
        return bool(loop.step % 4 == 0)


class Moments:
    """Writes down when it is called, and what it could see."""

    def __init__(self) -> None:
        self._log = os.environ.get("MOMENTS")

    def _note(self, loop: Any, moment: str) -> None:
        if self._log and loop.is_main and "steadfast-" not in str(loop.directory):
            with open(self._log, "a") as file:
                print(loop.step, moment, file=file)

    def begun(self, loop: Any) -> None:
        self._note(loop, "begun")

    def step_begun(self, loop: Any) -> None:
        self._note(loop, f"step_begun {loop.has_row}")

    def batch(self, loop: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self._note(loop, f"batch {len(inputs)}")
        return inputs, targets

    def gradients_ready(self, loop: Any) -> None:
        self._note(loop, f"gradients_ready {len(loop.gradient_norms()) == len(loop.trained())}")

    def step_taken(self, loop: Any) -> None:
        self._note(loop, "step_taken")

    def row(self, loop: Any) -> dict[str, float]:
        self._note(loop, "row")
        return {}

    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
        self._note(loop, f"evaluated {split} {row['step']} {loop.module.training}")

    def saving(self, loop: Any) -> None:
        self._note(loop, "saving")

    def ended(self, loop: Any) -> None:
        self._note(loop, "ended")


# --- with a fault


class Nothing:
    def step_takn(self, loop: Any) -> None: ...


class Forgets:
    def __init__(self) -> None:
        self.count = 0

    def step_taken(self, loop: Any) -> None:
        self.count += 1
        scale(loop, 1 - 1e-3 * self.count)


class Unstorable:
    def step_taken(self, loop: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"when": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FailsLate:
    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
        raise KeyError("late")


class OfRank:
    def step_taken(self, loop: Any) -> None:
        scale(loop, 0.9 if loop.is_main else 1.1)


class TakenColumn:
    def row(self, loop: Any) -> dict[str, float]:
        return {"loss": 7.0}


class WholeMask:
    """Draws a mask of the whole gradient, where a shard is due."""

    def gradients_ready(self, loop: Any) -> None:
        for parameter in loop.trained().values():
            parameter.grad.mul_(torch.rand(parameter.grad.shape) > 0.5)


class StateOfRank(Kept):
    names = ("norm",)

    def __init__(self) -> None:
        self.norm = 0.0

    def step_taken(self, loop: Any) -> None:
        self.norm = 1.0 if loop.is_main else 2.0


class OnOneRankLate:
    def step_taken(self, loop: Any) -> None:
        if loop.step >= 5 and loop.is_main:
            scale(loop, 0.9)


class EveryFifthOnShards:
    """Prunes every fifth step, by a quantile of what this rank has."""

    @torch.no_grad()
    def step_taken(self, loop: Any) -> None:
        if loop.step % 5 == 0:
            for parameter in loop.trained().values():
                mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if mine.numel():
                    mine.mul_(mine.abs() > mine.abs().flatten().quantile(0.3))


class Judges:
    """Halves the weights of the next step after each evaluation that is worse than the best, which it does not declare."""

    def __init__(self) -> None:
        self.best = float("inf")

    def evaluated(self, loop: Any, split: str, row: Any) -> None:
        if row["loss"] > self.best:
            scale(loop, 0.5)
        self.best = min(self.best, row["loss"])


class StopsOnOneRank:
    def step_taken(self, loop: Any) -> None:
        if loop.step == 4 and loop.is_main:
            loop.stop("rank 0 has seen enough")


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(character) - ord("a") for character in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(ord("a") + int(token)) for token in tokens)


# --- hooks of DDP's, for extras/compression/tests/test_compression.py


def half_mean(group: Any, bucket: Any, *, factor: float) -> Any:
    """Send the gradients times a factor, and take it back."""
    work = torch.distributed.all_reduce(bucket.buffer().mul_(factor), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(factor * group.size()))


def mean_now(group: Any, bucket: Any) -> Tensor:
    """Take the mean at once, and return no future."""
    torch.distributed.all_reduce(bucket.buffer(), group=group)
    return bucket.buffer().div_(group.size())


class Silent:
    """Sends nothing: each process keeps its own gradients. Counts the buckets."""

    def __init__(self) -> None:
        self.num_buckets = 0

    def __call__(self, group: Any, bucket: Any) -> Any:
        self.num_buckets += 1
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


class CountsRight:
    """Writes the share of right classes in each evaluation of `val`, from what the model gave."""

    def begun(self, loop: Any) -> None:
        self.loop, self.right, self.seen, self.shares = loop, 0.0, 0, list[float]()

    def observe(self, outputs: Tensor, micro_batch: Any) -> None:
        if self.loop.split == "val":
            self.right += float((outputs.argmax(dim=-1) == micro_batch.targets).sum())
            self.seen += micro_batch.num_samples

    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
        if split == "val":
            self.shares.append(float(loop.sum(torch.tensor(self.right))) / float(loop.sum(torch.tensor(float(self.seen)))))
            self.right, self.seen = 0.0, 0
            if loop.is_main:
                (loop.directory / "right.json").write_text(str(self.shares))


class Media:
    """Logs one of each kind of media after each evaluation on val, and a picture in a step; `wrong` is a kind that it makes wrongly."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def begun(self, loop: Any) -> None:
        if self.wrong == "early":
            loop.log_text("early", "before the first step")

    def gradients_ready(self, loop: Any) -> None:
        loop.log_image("of_step", torch.full((1, 2, 2), loop.loss() / 10))

    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
        from matplotlib import pyplot

        if split != "val":
            return
        figure, axes = pyplot.subplots(figsize=(1, 1))
        axes.plot([row["loss"]])
        loop.log_figure("val/curve", figure)
        assert not pyplot.get_fignums()
        colors = torch.linspace(0, 1, 12).view(3, 2, 2) if self.wrong != "image" else torch.zeros(8, 2, 2, 2)
        loop.log_image("val/colors", colors.to(torch.bfloat16) * row["loss"])
        loop.log_audio("val/tone", torch.linspace(-1, 1, 80)[None] if self.wrong != "audio" else torch.zeros(3, 80), rate=8000)
        rows = [[0, "a, b"], [1, row["loss"]]] if self.wrong != "table" else [[0]]
        loop.log_table("val/words", columns=["number", "word"], rows=rows)
        loop.log_text("val/text" if self.wrong != "name" else "../text", f"the loss is {row['loss']}\n")


class LoggingTask(Classification):
    """A task that is a part of the loop itself."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.0)
        self.parts = {"texts": self}

    def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
        loop.log_text(f"{split}/loss", str(row["loss"]))


class ActingTask(Classification):
    """A task that is a part of the loop itself, and acts where it should only read, or on one rank alone."""

    def __init__(self, *, act: str) -> None:
        super().__init__(label_smoothing=0.0)
        self.parts = {"acts": self}
        self.act = act

    def step_taken(self, loop: Any) -> None:
        if self.act == "stop on one rank" and loop.is_main and loop.step == 4:
            loop.stop("seen enough")

    def row(self, loop: Any) -> None:
        if self.act == "rate in row":
            loop.lr_share = 0.5
        if self.act == "stop in row":
            loop.stop("seen enough")
        if self.act == "write in row":
            with torch.no_grad():
                next(iter(loop.trained().values())).mul_(0.5)


class Hooks:
    """A part that looks at the outputs of the first layer, on one rank alone."""

    def begun(self, loop: Any) -> None:
        if loop.is_main:
            next(loop.module.children()).register_forward_hook(lambda *_: None)
