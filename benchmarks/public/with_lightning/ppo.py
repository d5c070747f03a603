"""stable-baselines3's actor and critic with Lightning."""

from typing import Any

import gymnasium as gym
import lightning as L
import torch
import torch.nn.functional as F
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import ConstantSchedule


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = ActorCriticPolicy(gym.spaces.Box(-1, 1, shape=(4,)), gym.spaces.Discrete(2), ConstantSchedule(1e-3))

    def training_step(self, batch: Any, number: int) -> Any:
        observation, taken = batch
        value, log_prob, entropy = self.model.evaluate_actions(observation, taken["action"])
        advantage = (taken["advantage"] - taken["advantage"].mean()) / (taken["advantage"].std() + 1e-8)
        ratio = (log_prob - taken["log_prob"]).exp()
        policy = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        return policy + 0.5 * F.mse_loss(value.flatten(), taken["value"]) - 0.01 * entropy.mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-5)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=13)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, gradient_clip_val=0.5, **options).fit(lit, loader)
