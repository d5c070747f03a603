"""Lightning: self-distillation, with the average of the weights as a teacher and its scores' running mean as a buffer."""

from typing import Any

import lightning as L
import torch
from given import Watch, arguments, digits, report  # benchmark
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader


def view(images: Tensor) -> Tensor:
    return images + 0.3 * torch.randn_like(images)


class SelfDistillation(L.LightningModule):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
        )
        self.teacher = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.99)).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(16))

    def step(self, images: Tensor, name: str) -> Tensor:
        with torch.no_grad():
            scores = self.teacher(view(images))
        wanted = ((scores - self.centre) / 0.05).softmax(-1)
        said = (self.student(view(images)) / 0.1).log_softmax(-1)
        loss = -(wanted * said).sum(-1).mean()
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * self.all_gather(scores).view(-1, 16).mean(0)
        mean = self.all_gather(wanted).view(-1, 16).mean(0)
        spread = -(mean * mean.clamp(min=1e-12).log()).sum()
        self.log_dict({f"{name}_loss": loss, f"{name}_spread": spread}, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teacher.update_parameters(self.student)  # here, and not after the step: a checkpoint is written before that hook
        return self.step(batch[0], "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch[0], "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.student.parameters(), lr=2e-3, weight_decay=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=total, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    given, watch = arguments(), Watch()  # benchmark
    L.seed_everything(0, workers=True)
    train, val = digits()
    batch_size = 64 // given.devices
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(val, batch_size=batch_size)
    checkpoints = ModelCheckpoint(given.folder / "checkpoints", every_n_train_steps=given.every, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        precision="64-true",
        max_steps=given.steps,
        log_every_n_steps=10,
        default_root_dir=given.folder,
        callbacks=[checkpoints, watch],
    )
    with trainer.init_module():  # in float64 from the beginning
        model = SelfDistillation()
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    trainer.validate(model, val_loader)
    report(trainer, model, folder=given.folder, watch=watch)  # benchmark


if __name__ == "__main__":
    main()
