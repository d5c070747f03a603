"""Distillation: a small model learns the outputs of a large model. Source: Hinton et al. 2015."""

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from framework.tasks.classification import Classification
from models.cnn import CNN


class Distillation(Classification):
    """Classification with two kinds of targets: a teacher's softened outputs, and the labels.

    The teacher is a module of the task. It is frozen, exists in each process, and is in no checkpoint.
    """

    def __init__(self, *, teacher: str, temperature: float, share: float) -> None:
        super().__init__(label_smoothing=0.0)
        self.temperature, self.share = temperature, share
        self.teacher = CNN(num_classes=10, in_channels=1, image_size=8, channels=[16, 32])
        self.teacher.load_state_dict(load_file(Path(__file__).with_name(teacher)))
        self.teacher.requires_grad_(False).eval()

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        outputs, wanted = call(batch.inputs), self.teacher(batch.inputs)
        of_labels = F.cross_entropy(outputs, batch.targets, reduction="sum")
        return self.share * self.apart(outputs, wanted) + (1 - self.share) * of_labels

    def apart(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """Return the divergence of the softened outputs, (B, classes) both, summed over the samples; shape ()."""
        mine, theirs = ((logits / self.temperature).log_softmax(-1) for logits in (outputs, wanted))
        return self.temperature**2 * F.kl_div(mine, theirs, reduction="sum", log_target=True)
