"""The loss of PPO, as in stable-baselines3; advantages are normalised over the whole batch."""

from typing import Any

import torch
import torch.nn.functional as F


class PPO:
    def __init__(self, *, clip: float, value_weight: float, entropy_weight: float) -> None:
        self.clip, self.value_weight, self.entropy_weight = clip, value_weight, entropy_weight

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        value, log_prob, entropy = call.evaluate_actions(batch.inputs, batch.targets["action"])
        return value.flatten(), log_prob, entropy, batch.targets["advantage"]

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> Any:
        (value, log_prob, entropy, advantage), (*_, advantages) = own, everyone
        advantage = (advantage - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (log_prob - batch.targets["log_prob"]).exp()
        policy = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - self.clip, 1 + self.clip))
        error = F.mse_loss(value, batch.targets["value"], reduction="none")
        return (policy + self.value_weight * error - self.entropy_weight * entropy).sum()
