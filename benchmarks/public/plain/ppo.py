"""stable-baselines3's actor and critic in a plain loop."""

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import torch
import torch.nn.functional as F
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import ConstantSchedule


def build() -> Any:
    return ActorCriticPolicy(gym.spaces.Box(-1, 1, shape=(4,)), gym.spaces.Discrete(2), ConstantSchedule(1e-3))


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=13)
    for observation, taken in batches:
        optimizer.zero_grad()
        value, log_prob, entropy = model.evaluate_actions(observation, taken["action"])
        advantage = (taken["advantage"] - taken["advantage"].mean()) / (taken["advantage"].std() + 1e-8)
        ratio = (log_prob - taken["log_prob"]).exp()
        policy = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        loss = policy + 0.5 * F.mse_loss(value.flatten(), taken["value"]) - 0.01 * entropy.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        yield loss.item()
