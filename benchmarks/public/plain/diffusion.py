"""diffusers' U-Net in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup


def build() -> Any:
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4,
        attention_head_dim=8,
    )  # fmt: skip


def train(model: Any, batches: Any) -> Iterator[float]:
    schedule: Any = DDPMScheduler(num_train_timesteps=100)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # the first weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
    mean = 0.0
    for number, (pictures, _) in enumerate(batches, 1):
        noise = torch.randn_like(pictures)
        times = torch.randint(0, 100, (len(pictures),))
        predicted = model(schedule.add_noise(pictures, noise, times), times).sample
        loss = F.mse_loss(predicted, noise) / 4  # a step has four batches
        loss.backward()
        mean += loss.item()
        if number % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
            yield mean
            mean = 0.0
    model.load_state_dict(averaged.module.state_dict())
