"""Self-distillation without labels: the teacher is the average of the weights. Source: Caron et al. 2021, "DINO"."""

from typing import Any

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """A network from images (B, C, H, H) to scores of `out` prototypes (B, out)."""

    def __init__(self, *, in_channels: int, image_size: int, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SelfDistillation(nn.Module):
    """The task. A student sees one view of an image, the teacher sees another view, and their outputs should agree.

    The teacher's scores are centred by a mean over all images until now. This mean is a buffer of the task, so it is in the
    checkpoints.
    """

    centre: Tensor

    def __init__(self, *, out: int, student_temperature: float, teacher_temperature: float, noise: float) -> None:
        super().__init__()
        self.student_temperature, self.teacher_temperature, self.noise = student_temperature, teacher_temperature, noise
        self.register_buffer("centre", torch.zeros(out))

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        images = batch.inputs
        scores = context.averaged(self.view(images, context))
        wanted = ((scores - self.centre) / self.teacher_temperature).softmax(-1)
        said = (call(self.view(images, context)) / self.student_temperature).log_softmax(-1)
        return {"scores": scores, "wanted": wanted, "said": said}

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> Any:
        if context.is_training:
            self.centre = 0.9 * self.centre + 0.1 * everyone["scores"].mean(0)
        mean = everyone["wanted"].mean(0)
        spread = -(mean * mean.clamp(min=1e-12).log()).sum()  # 0 nats if all images get the same prototype
        return {"loss": -(own["wanted"] * own["said"]).sum(), "spread": spread * len(batch.inputs)}

    def view(self, images: Tensor, context: Any) -> Tensor:
        """Return the images (B, C, H, H) with noise."""
        noise = torch.randn(images.shape, generator=context.generator, dtype=images.dtype, device=images.device)
        return images + self.noise * noise
