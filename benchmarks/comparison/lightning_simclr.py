"""Lightning: SimCLR, with the negatives of the whole global batch (all_gather with gradients)."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from given import Watch, arguments, digits, report  # benchmark
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader


def view(images: Tensor) -> Tensor:
    down, right = (int(torch.randint(-1, 2, ())) for _ in range(2))
    light = 1 + 0.2 * torch.randn(len(images), 1, 1, 1, dtype=images.dtype, device=images.device)
    return images.roll((down, right), dims=(2, 3)) * light + 0.2 * torch.randn_like(images)


class SimCLR(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GELU(), nn.Flatten()
        )
        self.projection = nn.Linear(16 * 4**2, 32)

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.projection(self.features(images)), dim=1)

    def step(self, images: Tensor, name: str) -> Tensor:
        one, two = self(view(images)), self(view(images))
        every_one, every_two = (self.all_gather(x, sync_grads=True).view(-1, x.shape[1]) for x in (one, two))
        own = self.global_rank * len(one) + torch.arange(len(one), device=self.device)
        loss = (F.cross_entropy(one @ every_two.T / 0.2, own) + F.cross_entropy(two @ every_one.T / 0.2, own)) / 2
        found = ((one @ every_two.T).argmax(-1) == own).double().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_found": found}, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch[0], "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch[0], "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)
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
        model = SimCLR()
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    trainer.validate(model, val_loader)
    report(trainer, model, folder=given.folder, watch=watch)  # benchmark


if __name__ == "__main__":
    main()
