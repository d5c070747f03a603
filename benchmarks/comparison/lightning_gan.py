"""Lightning: a GAN, with two optimizers in turns (manual optimization)."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from given import Watch, arguments, digits, report  # benchmark
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

NOISE = 16


def layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    first, second, last = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = layers(NOISE, 128, 64)
        self.critic = layers(64, 128, 1)

    def generate(self, images: Tensor) -> Tensor:
        return self.generator(torch.randn(len(images), NOISE, dtype=images.dtype, device=images.device))

    def critic_loss(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            generated = self.generate(images)
        of_images, of_generated = self.critic(images.flatten(1)), self.critic(generated)
        return F.softplus(-of_images).mean() + F.softplus(of_generated).mean(), (of_generated > 0).double().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        of_critic, of_generator = self.optimizers()
        self.toggle_optimizer(of_critic)
        loss, fooled = self.critic_loss(images)
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.log_dict({"train_loss": loss, "fooled": fooled}, sync_dist=True)
        if batch_idx % 2 == 1:
            self.toggle_optimizer(of_generator)
            generator_loss = F.softplus(-self.critic(self.generate(images))).mean()
            of_generator.zero_grad()
            self.manual_backward(generator_loss)
            of_generator.step()
            self.untoggle_optimizer(of_generator)
            self.log("generator_loss", generator_loss, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, fooled = self.critic_loss(batch[0])
        self.log_dict({"val_loss": loss, "val_fooled": fooled}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        parts = (self.critic, self.generator)
        return [torch.optim.Adam(part.parameters(), lr=5e-4, betas=(0.5, 0.999)) for part in parts]


def main() -> None:
    given, watch = arguments(), Watch()  # benchmark
    L.seed_everything(0, workers=True)
    train, val = digits()
    batch_size = 64 // given.devices
    train_loader = DataLoader(train, batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(val, batch_size=batch_size)
    # Lightning counts each optimizer's steps: three for two batches.
    every = given.every * 3 // 2
    checkpoints = ModelCheckpoint(given.folder / "checkpoints", every_n_train_steps=every, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy="ddp_find_unused_parameters_true" if given.devices > 1 else "auto",
        precision="64-true",
        max_steps=given.steps * 3 // 2,
        log_every_n_steps=10,
        default_root_dir=given.folder,
        callbacks=[checkpoints, watch],
    )
    with trainer.init_module():  # in float64 from the beginning
        model = GAN()
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    trainer.validate(model, val_loader)
    report(trainer, model, folder=given.folder, watch=watch)  # benchmark


if __name__ == "__main__":
    main()
