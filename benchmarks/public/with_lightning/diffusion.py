"""diffusers' U-Net with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from lightning.pytorch.callbacks import EMAWeightAveraging


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4,
            attention_head_dim=8,
        )  # fmt: skip
        self.schedule: Any = DDPMScheduler(num_train_timesteps=100)

    def training_step(self, batch: Any, number: int) -> Any:
        pictures, _ = batch
        noise = torch.randn_like(pictures)
        times = torch.randint(0, 100, (len(pictures),), device=self.device)
        return F.mse_loss(self.model(self.schedule.add_noise(pictures, noise, times), times).sample, noise)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Averaged(EMAWeightAveraging):
    """The average starts at the first weights; Lightning's own starts at the weights after the first step."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            self._average_model.update_parameters(pl_module)


def train(lit: Lit, loader: Any, *, callbacks: list[Any], **options: Any) -> None:
    callbacks = [*callbacks, Averaged(decay=0.9)]
    L.Trainer(max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=1.0, callbacks=callbacks, **options).fit(lit, loader)
