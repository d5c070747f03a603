"""The training of diffusers' example: the model predicts the noise in a picture."""

from typing import Any

import torch
import torch.nn.functional as F


class PredictNoise:
    def __init__(self, *, noise: Any) -> None:
        self.schedule = noise

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        pictures = batch.inputs
        noise = torch.randn_like(pictures)
        times = torch.randint(0, self.schedule.config.num_train_timesteps, (len(pictures),), device=pictures.device)
        predicted = call(self.schedule.add_noise(pictures, noise, times), times).sample
        return F.mse_loss(predicted, noise) * len(pictures), len(pictures)
