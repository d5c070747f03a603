"""A policy gradient. The task's step plays episodes of a small environment. Source: Williams 1992, REINFORCE."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.data.source import Arrays

ANGLE, EDGE = 12 * math.pi / 180, 2.4  # an episode ends there


def move(state: Tensor, push_right: Tensor) -> Tensor:
    """Return the states (B, 4) of a cart with a pole 0.02 s after a push: position, speed, the pole's angle, angular speed.

    Source: Barto, Sutton and Anderson 1983, with the constants that have become usual since.
    """
    place, speed, angle, turning = state.unbind(1)
    force = 10.0 * (2.0 * push_right - 1.0)
    pull = (force + 0.05 * turning**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    speed_up = pull - 0.05 * turn * angle.cos() / 1.1
    return torch.stack([place + 0.02 * speed, speed + 0.02 * speed_up, angle + 0.02 * turning, turning + 0.02 * turn], dim=1)


class Starts:
    """A dataset of states in which episodes start. A sample has small numbers (4,). There are no targets."""

    task = "policy"
    num_workers = 0

    def __init__(self, *, num_train: int = 512, num_val: int = 64) -> None:
        self.sizes = {"train": num_train, "val": num_val, "test": num_val}
        self.info = {"num_features": 4, "num_outputs": 2}

    def problems(self) -> list[str]:
        return []

    def load(self, split: str) -> Arrays:
        drawn = np.random.RandomState(list(self.sizes).index(split)).uniform(-0.05, 0.05, (self.sizes[split], 4))
        return Arrays(drawn.astype(np.float32), np.zeros(len(drawn), dtype=np.int64))

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: object) -> tuple[Tensor, Tensor]:
        return inputs, targets


class Policy(nn.Module):
    """A network from states (B, 4) to the logits of a push to the left and to the right (B, 2)."""

    def __init__(self, *, num_features: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_features, width), nn.Tanh(), nn.Linear(width, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class PolicyGradient:
    """The task. It plays `longest` pushes from each start, and makes pushes likelier if long balance followed."""

    def __init__(self, *, longest: int, discount: float) -> None:
        self.longest, self.discount = longest, discount

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        states, pushes, alive = self.play(call, batch.inputs, context)
        gains = torch.zeros_like(alive)  # (B, T): the discounted balance from each moment on
        gain = torch.zeros_like(alive[:, 0])
        for moment in reversed(range(self.longest)):
            gain = alive[:, moment] + self.discount * gain
            gains[:, moment] = gain
        logits = call(states.flatten(0, 1))
        chosen = F.cross_entropy(logits, pushes.flatten(), reduction="none").view_as(gains)
        return {"gains": gains, "alive": alive, "chosen": chosen}

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> Any:
        usual = (everyone["gains"] * everyone["alive"]).sum(0) / everyone["alive"].sum(0).clamp(min=1)  # of all episodes
        advantages = (own["gains"] - usual) * own["alive"] / self.longest
        return {"loss": (own["chosen"] * advantages).sum(), "balanced": own["alive"].sum()}

    @torch.no_grad()
    def play(self, call: Any, state: Tensor, context: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states (B, T, 4), the pushes (B, T), 0 or 1, and whether the pole was still up (B, T), 0.0 or 1.0."""
        states, pushes, alive = [], [], []
        stands = torch.ones(len(state), dtype=state.dtype, device=state.device)
        for _ in range(self.longest):  # the same number of calls for every batch: processes meet in them
            probability = call(state).softmax(-1)[:, 1]
            drawn = torch.rand(len(state), generator=context.generator, dtype=state.dtype, device=state.device)
            push = (drawn < probability).to(state.dtype)
            states.append(state)
            pushes.append(push.long())
            alive.append(stands)
            state = move(state, push)
            stands = stands * ((state[:, 0].abs() < EDGE) & (state[:, 2].abs() < ANGLE))
            state = state * stands[:, None]
        return torch.stack(states, 1), torch.stack(pushes, 1), torch.stack(alive, 1)
