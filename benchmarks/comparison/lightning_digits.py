"""Lightning: classification of scanned digits, with dropout."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from given import Watch, arguments, digits, report  # benchmark
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from models.cnn import CNN


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = CNN(num_classes=10, in_channels=1, image_size=8, channels=[32, 64], dropout=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(-1) == labels).double().mean(), sync_dist=True)

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
        model = Classifier()
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    trainer.validate(model, val_loader)
    report(trainer, model, folder=given.folder, watch=watch)  # benchmark


if __name__ == "__main__":
    main()
