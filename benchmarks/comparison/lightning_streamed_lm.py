"""Lightning: a GPT over texts of unequal length in tar shards. A text is read when it is needed, by its place in its shard."""

import glob
import tarfile
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from given import Watch, arguments, report  # benchmark
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from models.gpt import GPT

SEQ_LEN = 128
IGNORED = -100


class Texts(Dataset[Tensor]):
    def __init__(self, files: str) -> None:
        self.places: list[tuple[str, int, int]] = []
        for path in sorted(glob.glob(files)):
            with tarfile.open(path) as archive:
                self.places += [(path, member.offset_data, member.size) for member in archive]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Tensor:
        path, start, size = self.places[number]
        with open(path, "rb") as file:
            file.seek(start)
            return torch.tensor(list(file.read(min(size, SEQ_LEN + 1))))


def collate(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = pad_sequence(texts, batch_first=True, padding_value=IGNORED)
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:]


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(vocab_size=256, seq_len=SEQ_LEN, dim=64, num_layers=2)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        num_tokens = int((batch[1] != IGNORED).sum())
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=num_tokens)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3, weight_decay=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=total, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    given, watch = arguments(), Watch()  # benchmark
    L.seed_everything(0, workers=True)
    batch_size = 32 // given.devices
    train_loader = DataLoader(Texts("shards/train-*.tar"), batch_size=batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(Texts("shards/val-*.tar"), batch_size=batch_size, collate_fn=collate)
    checkpoints = ModelCheckpoint(given.folder / "checkpoints", every_n_train_steps=given.every, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        precision="64-true",
        max_steps=given.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=given.folder,
        callbacks=[checkpoints, watch],
    )
    with trainer.init_module():  # in float64 from the beginning
        model = LanguageModel()
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    trainer.validate(model, val_loader)
    report(trainer, model, folder=given.folder, watch=watch)  # benchmark


if __name__ == "__main__":
    main()
