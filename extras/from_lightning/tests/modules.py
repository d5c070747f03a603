"""LightningModules as people write them, each in the shape of a public one; nothing in them knows this framework."""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Data(L.LightningDataModule):
    """Points of two classes of moons, or sequences of tokens."""

    def __init__(self, kind: str = "points", batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        draws = torch.Generator().manual_seed(0)
        if self.hparams["kind"] == "tokens":
            tokens = torch.randint(0, 16, (96, 9), generator=draws).cumsum(1) % 16
            pairs = tokens[:, :-1], tokens[:, 1:]
        else:
            x = torch.randn(96, 6, generator=draws, dtype=torch.float64)
            pairs = x, (x @ torch.randn(6, 3, generator=draws, dtype=torch.float64)).argmax(-1)
        self.fit, self.held_out = (TensorDataset(*(part[a:b] for part in pairs)) for a, b in ((0, 72), (72, 96)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.fit, batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.held_out, batch_size=self.hparams["batch_size"])


class Weighted(Data):
    """Samples are drawn with replacement, those of class 0 never, by the loader's own sampler."""

    def train_dataloader(self) -> Any:
        weights = (self.fit.tensors[1] > 0).double()
        sampler = WeightedRandomSampler(weights.tolist(), 48, generator=torch.Generator().manual_seed(1))
        return DataLoader(self.fit, batch_size=self.hparams["batch_size"], sampler=sampler)


class Streamed(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        worker = get_worker_info()
        step, start = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        return iter([self.samples[number] for number in range(start, len(self.samples), step)])


class Endless(Data):
    """A stream without an end, and nothing to validate."""

    def train_dataloader(self) -> Any:
        return DataLoader(Forever(), batch_size=self.hparams["batch_size"])

    val_dataloader = L.LightningDataModule.val_dataloader


class Forever(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return itertools.repeat((torch.zeros(6), torch.tensor(0)))


class Streams(Data):
    """A stream to train, and samples with an index to validate."""

    def train_dataloader(self) -> Any:
        return DataLoader(Streamed(self.fit), batch_size=self.hparams["batch_size"])


class Classifier(L.LightningModule):
    """A net, an optimizer and a scheduler from the configuration; the shape of lightning-hydra-template's module."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (MulticlassAccuracy(3, average="micro") for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_acc(preds, targets)
        self.log("train/loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_acc(preds, targets)
        self.log("val/loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.test_acc(preds, targets)
        self.log("test/loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams["optimizer"](params=self.parameters())
        if self.hparams["scheduler"] is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams["scheduler"](optimizer=optimizer)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}}  # fmt: skip


def net(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


class VAE(L.LightningModule):
    """Noise in a step; two optimizer groups; a step without a batch index; the loss in a dictionary."""

    def __init__(self, hidden: int = 16, latent: int = 4, beta: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 6))

    def elbo(self, batch: Any) -> dict[str, Tensor]:
        x, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        reconstruction = F.mse_loss(self.decoder(code), x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return {"loss": reconstruction + self.hparams["beta"] * divergence, "kl": divergence.detach()}

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        found = self.elbo(batch)
        self.log_dict({"train_kl": found["kl"]}, on_step=True)
        return found

    def validation_step(self, batch: Any) -> Tensor:
        return self.elbo(batch)["loss"]

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.encoder.parameters()}, {"params": self.decoder.parameters(), "lr": 3e-3}]
        return torch.optim.Adam(groups, lr=1e-3)


class LanguageModel(L.LightningModule):
    """Warm-up by steps, from the trainer's number of steps; a decay for some parameters alone."""

    def __init__(self, vocab: int = 16, width: int = 16, warmup: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        found: Tensor = self.head(x)
        return found

    def _loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("ppl", loss.exp().detach() * 0 + self.global_step, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        total = self.trainer.estimated_stepping_batches
        warmup = max(1, int(self.hparams["warmup"] * total))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - step / (2 * total)))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class GAN(L.LightningModule):
    """Two optimizers, which the training_step steps itself; the shape of Lightning's own example."""

    def __init__(self, latent: int = 4, every: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def adversarial_loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()  # type: ignore[misc]
        z = torch.randn(real.shape[0], self.hparams["latent"]).type_as(real)
        valid = torch.ones(real.size(0), 1).type_as(real)
        if batch_idx % self.hparams["every"] == 0:
            self.toggle_optimizer(optimizer_g)
            g_loss = self.adversarial_loss(self.discriminator(self.generator(z)), valid)
            self.log("g_loss", g_loss, prog_bar=True)
            self.manual_backward(g_loss)
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self.generator(z).detach()), torch.zeros_like(valid))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch: Any) -> None:
        real, _ = batch
        self.log("val_loss", self.adversarial_loss(self.discriminator(real), torch.ones(len(real), 1).type_as(real)))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [g, d], []


class IndexedGAN(GAN):
    """The same for Lightning 1, which calls the training_step for each optimizer and steps it."""

    def __init__(self, latent: int = 4, every: int = 1) -> None:
        super().__init__(latent, every)
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
        real, _ = batch
        z = torch.randn(real.shape[0], self.hparams["latent"]).type_as(real)
        valid = torch.ones(real.size(0), 1).type_as(real)
        if optimizer_idx == 0:
            if batch_idx % self.hparams["every"] != 0:
                return None
            g_loss = self.adversarial_loss(self.discriminator(self.generator(z)), valid)
            self.log("g_loss", g_loss, prog_bar=True)
            return {"loss": g_loss}
        real_loss = self.adversarial_loss(self.discriminator(real), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self.generator(z).detach()), torch.zeros_like(valid))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        return d_loss

    def on_before_optimizer_step(self, optimizer: Any, optimizer_idx: int) -> None:
        self.log(f"stepped_{optimizer_idx}", 1.0)


class LogsAlike(IndexedGAN):
    """It measures values under the names of its training's losses, and returns no loss."""

    def validation_step(self, batch: Any) -> Any:
        real, _ = batch
        self.log_dict({"val/g_loss": real.mean(), "val/d_loss": real.std(0).mean()})
        return self.log_dict

    def test_step(self, batch: Any) -> None:
        pass


def named_points() -> list[Any]:
    return [{"x": torch.ones(6) * number, "name": f"point {number}"} for number in range(40)]


def bare_points() -> list[Any]:
    return [(torch.ones(6) * number,) for number in range(40)]


class TakesWhole(L.LightningModule):
    """Its data have no targets."""

    def __init__(self, has_names: bool) -> None:
        super().__init__()
        self.net, self.has_names = nn.Linear(6, 6), has_names

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if self.has_names else batch[0]
        assert x.shape[1:] == (6,) and (not self.has_names or batch["name"][0].startswith("point"))
        return F.mse_loss(self.net(x), x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Teacher(L.LightningModule):
    """A student follows its own average, which a hook moves after each batch; the shape of BYOL and of mean teachers."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.momentum = momentum

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        outputs = self.student(x)
        agreement = F.mse_loss(outputs, self.teacher(x + 0.1))
        self.log("agreement", agreement)
        return F.cross_entropy(outputs, y) + agreement

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for ours, theirs in zip(self.teacher.parameters(), self.student.parameters()):
            ours.mul_(self.momentum).add_(theirs, alpha=1 - self.momentum)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.teacher(x), y))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Skips(Teacher):
    """It skips every third batch after the model has run, and the last batch of an epoch before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if batch_idx == 4:
            return None
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 3 else None


class SkipsByContent(Teacher):
    """It skips a batch by what is in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if batch[0].sum() > 0:
            return None
        return super().training_step(batch, batch_idx)


class SkipsUnseen(SkipsByContent):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx)


class Stops(Teacher):
    """It has callbacks: its own, or those that keys replace."""

    def __init__(self, callback: str = "") -> None:
        super().__init__()
        self.callback = callback

    def configure_callbacks(self) -> Any:
        if self.callback:
            own: L.Callback = getattr(callbacks, self.callback, L.Callback)()
            return own
        return [callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.2), callbacks.LearningRateMonitor(),
                callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=3)]  # fmt: skip


class ByClosure(Teacher):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.student.parameters())


class AllTrained(Classifier):
    """Its first layer is trained as the others."""

    def __init__(self) -> None:
        super().__init__(net(), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1))


class Unfreezes(AllTrained):
    """Its first layer is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for parameter in self.net[0].parameters():  # type: ignore[index]
                parameter.requires_grad = True


class UnfreezesElsewhere(Unfreezes):
    """It does so in a method that its hook calls."""

    def on_train_epoch_start(self) -> None:
        self.move()

    def move(self) -> None:
        Unfreezes.on_train_epoch_start(self)


class EveryOther(Teacher):
    """A scheduler that steps after every second batch of an epoch."""

    def configure_optimizers(self) -> Any:
        (optimizer,), (scheduler,) = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


class Queue(L.LightningModule):
    """Keys of earlier batches in a queue, by an encoder that follows slowly, in the shape of MoCo; nothing to validate."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.slow = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.arange(32.0).mul(5).sin().reshape(8, 4))
        self.place = 0

    @torch.no_grad()
    def keys_of(self, x: Tensor) -> Tensor:
        for ours, theirs in zip(self.slow.parameters(), self.query.parameters()):
            ours.mul_(0.9).add_(theirs, alpha=0.1)
        return F.normalize(self.slow(x + torch.full_like(x, 0.1, dtype=self.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        keys = self.keys_of(x)
        q = F.normalize(self.query(x))
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ self.queue.T.clone()], dim=1)
        self.queue[self.place] = keys[0]
        self.place = (self.place + 1) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("slope", self.query.weight.grad.norm())  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.query.parameters(), lr=0.1)


class EpochMean(Classifier):
    """The losses of an epoch in a list, as the guide to Lightning 2 has it."""

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        super().__init__(net, optimizer)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.losses).mean())
        self.losses.clear()


class BeginsAnew(Classifier):
    """Its hook at an epoch's start draws new weights of a layer, and resets a metric and a count. A hook at each step draws."""

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        super().__init__(net, optimizer)
        self.mean, self.num_steps = MeanMetric(), 0

    def on_train_epoch_start(self) -> None:
        nn.init.normal_(self.net[-1].weight, std=0.1)  # type: ignore[index,arg-type]
        self.mean.reset()
        self.num_steps = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn = torch.rand(()).item()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.num_steps += 1
        self.log("num_steps", float(self.num_steps))
        self.log("mean", self.mean.compute())
        return loss * (1.0 + self.drawn)


class CountsItself(Teacher):
    """An accuracy of its own, without self.log in a step: what it counts in an evaluation is its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.correct, self.count, self.steps = 0, 0, list[int]()
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(batch_idx)
        self.correct += 100
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.correct = self.count = 0
        self.seen.zero_()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        found = self.student(x).argmax(-1)
        self.correct, self.count = self.correct + int((found == y).sum()), self.count + len(y)
        self.seen += torch.bincount(found, minlength=3)

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", self.correct / self.count)
        self.log("val_first", self.seen[0])

    test_step = validation_step


class WithoutValidation(Data):
    val_dataloader = L.LightningDataModule.val_dataloader


adam = partial(torch.optim.Adam, lr=1e-2)
plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.1, patience=0, threshold=0.3)


class Habits(L.LightningModule):
    """A frozen backbone in eval mode, a weight that follows the epoch, a metric over an epoch, an average before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).requires_grad_(False).eval()
        self.head = nn.Linear(8, 3)
        self.slow = copy.deepcopy(self.head).requires_grad_(False)
        self.weight, self.seen = 1.0, MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.seen.update(loss)
        return loss * self.weight * (1 + self.current_epoch)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.slow.weight.mul_(0.5).add_(self.head.weight, alpha=0.5)

    def on_train_epoch_end(self) -> None:
        self.weight = 1.0 / (2 + self.current_epoch)
        self.log("seen", self.seen.compute())
        self.seen.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/other_loss", F.cross_entropy(self.slow(self.backbone(x)), y))
        self.log("val/loss", F.cross_entropy(self.head(self.backbone(x)), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


class MeanOverTokens(LanguageModel):
    """Its loss ignores a token, so its mean is not one over the samples."""

    def _loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), following.flatten(), ignore_index=3)


class OwnBackward(LanguageModel):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Schedules(Teacher):
    """A warm-up in its optimizer_step, a scheduler that it steps by the epoch, steps left out, clipping that depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: list[int] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["left_out"] = self.left_out

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.left_out = checkpoint["left_out"]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2:
            self.left_out.append(epoch)
            optimizer_closure()
            return
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = (self.trainer.global_step + 1) / 4 * 0.1

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch == 0:
            scheduler.step()

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        kind, value = ("norm", 0.2 / (1 + len(self.left_out))) if self.current_epoch == 0 else ("value", 0.02)
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=kind)


class Wasserstein(GAN):
    """The discriminator first, the second optimizer; rates, clipping and schedulers by hand; nothing to validate."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        g, d = self.optimizers()  # type: ignore[misc]
        of_g, of_d = self.lr_schedulers()  # type: ignore[misc]
        fake = self.generator(torch.randn(len(real), 4).type_as(real))
        d_loss = self.discriminator(fake.detach()).mean() - self.discriminator(real).mean()
        self.log("d_loss", d_loss)
        with d.toggle_model():
            d.zero_grad()
            self.manual_backward(d_loss)
            self.clip_gradients(d, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            d.step()
        of_d.step()
        g_loss = -self.discriminator(fake).mean()
        self.log("g_loss", g_loss)
        self.toggle_optimizer(g)
        g.zero_grad()
        self.manual_backward(g_loss)
        for group in g.param_groups:
            group["lr"] *= 0.9
        g.step()
        self.untoggle_optimizer(g)
        if self.trainer.is_last_batch:
            assert isinstance(of_g, torch.optim.lr_scheduler.ExponentialLR)
            of_g.step()

    def validation_step(self, batch: Any) -> None:
        pass

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        (g, d), _ = super().configure_optimizers()
        return [g, d], [
            torch.optim.lr_scheduler.ExponentialLR(g, 0.5),
            torch.optim.lr_scheduler.OneCycleLR(d, 0.01, total_steps=20),
        ]


class DiscriminatorFirst(GAN):
    """It steps its second optimizer first."""

    def training_step(self, batch: Any) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((optimizer_d, 1.0), (optimizer_g, -1.0)):
            fake = self.generator(torch.randn(len(real), 4).type_as(real))
            self.manual_backward(sign * (self.discriminator(fake) - self.discriminator(real)).mean())
            optimizer.step()
            optimizer.zero_grad()


class Alone(VAE):
    """One optimizer, which the training_step steps itself; augmentation after the transfer of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [x * 0.5, y]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.elbo(batch)["loss"]
        self.log("train_loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Accumulates(Alone):
    """It steps its optimizer after every second batch, or after the others."""

    def __init__(self, after: int = 1, steps_always: bool = False) -> None:
        super().__init__()
        self.after, self.steps_always = after, steps_always

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.elbo(batch)["loss"]
        self.manual_backward(loss if self.steps_always else loss / 2)
        if batch_idx % 2 == self.after or self.steps_always:
            optimizer.step()
            optimizer.zero_grad()


class PlateauByHand(Alone):
    """A scheduler that its hook steps with what the validation has logged."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_elbo", self.elbo(batch)["loss"] ** 2)

    def on_validation_epoch_end(self) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["val_elbo"])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)]


class Unseen(Alone):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.elbo(batch)["loss"].backward()
        optimizer.step()


class Halves(L.LightningModule):
    """Two optimizers for the halves of a net; each steps after a backward pass of its own, or both after one."""

    def __init__(self, num_backwards: int = 2) -> None:
        super().__init__()
        self.automatic_optimization, self.num_backwards = False, num_backwards
        self.first, self.last = net()[0], net()[2]

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.first(batch[0]).tanh()), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if number < self.num_backwards:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(half.parameters(), lr=0.01) for half in (self.first, self.last)]


class Predicting(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        return {"logits": self(x).softmax(1) * 100, "certain": torch.ones(len(x))}


class TwoSets(Data):
    """Two validation loaders, in a list or in a dictionary."""

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(TensorDataset(*(part[rows] for part in self.held_out[:])), batch_size=self.hparams["batch_size"])
                   for rows in (slice(0, 20), slice(5, 24))]  # fmt: skip
        return loaders if self.hparams["kind"] == "points" else dict(zip("ab", loaders))


class OnTwoSets(L.LightningModule):
    """A validation step with the number of its loader; metrics for each, and a mean over both at the end."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.net, self.shared = net(), shared
        self.accuracies = nn.ModuleList(MulticlassAccuracy(3, average="micro") for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_validation_epoch_start(self) -> None:
        self.order: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        logits = self.net(x)
        accuracy: Any = self.accuracies[0 if self.shared else dataloader_idx]
        accuracy(logits, y)
        self.order.append(dataloader_idx)
        self.log("val/loss", F.cross_entropy(logits, y))
        self.log("val/acc", accuracy, on_epoch=True)
        self.log("val/number", float(dataloader_idx))
        self.log(f"val_{dataloader_idx}_spread", logits.std(-1).mean(), add_dataloader_idx=False)
        return F.cross_entropy(logits, y)

    def on_validation_epoch_end(self) -> None:
        assert self.order == sorted(self.order), self.order
        self.log("val/acc_mean", sum(one.compute() for one in self.accuracies) / 2)  # type: ignore[operator, misc]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau(optimizer), "monitor": "val/loss/dataloader_idx_1"},
        }


class Pictures(VAE):
    """It logs pictures, a sound, a table and texts, as for TensorBoard and Weights & Biases."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.odd = odd

    def validation_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, y = batch
        board: Any = self.logger.experiment  # type: ignore[union-attr]
        if batch_idx == 0:
            board.add_image("val/input", x[:6].sigmoid(), self.global_step, dataformats="HW")
            board.add_image("val/red", torch.tensor([1.0, 0.0, 0.0]).expand(4, 6, 3), dataformats="HWC")
            board.add_audio("val/sound", x[:1].tanh(), sample_rate=8000)
            board.add_text("val/story", f"{len(y)} points", global_step=self.current_epoch)
            for logger in self.loggers:
                logger.log_image("val/pairs", [x.sigmoid(), Image.new("RGB", (4, 4))], caption=["points", "black"])  # type: ignore[attr-defined]
        board.add_scalar("val/points", len(y), self.global_step)
        board.add_scalars("mean", {"x": x.mean(), "y": y.double().mean()}, self.global_step)
        self.logger.log_metrics({"val/spread": float(x.std())}, step=self.global_step)  # type: ignore[union-attr]
        if self.odd:
            board.log({"val/loss": 1.0})
        return super().validation_step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("test/tested", 1)  # type: ignore[union-attr]
        return super().validation_step(batch)

    def on_validation_epoch_end(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot([1, 2])
        self.logger.experiment.add_figure("val/curve", figure, self.global_step)  # type: ignore[union-attr]
        self.logger.experiment.add_scalar("epochs", 1 + self.current_epoch)  # type: ignore[union-attr]
        self.logger.experiment.add_histogram("val/weights", self.encoder[0].weight, bins=4)  # type: ignore[union-attr]
        self.logger.experiment.flush()  # type: ignore[union-attr]
        self.logger.log_table(key="val/table", columns=["a", "b"], data=[[1, "x"]])  # type: ignore[union-attr]
        points = self.trainer.datamodule.val_dataloader().dataset  # type: ignore[attr-defined]
        Path(self.logger.log_dir, "num_points").write_text(str(len(points)))  # type: ignore[union-attr, arg-type]


class Named(Data):
    """Batches that are dictionaries."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.fit, self.held_out = ([{"x": x, "label": y} for x, y in part] for part in (self.fit, self.held_out))  # type: ignore[assignment]


class TakesAll(L.LightningModule):
    """Its forward takes a batch whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, batch: Any) -> Tensor:
        found: Tensor = self.net(batch["x"])
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithOwnLoaders(OnTwoSets):
    """A module that has its data itself."""

    def setup(self, stage: str) -> None:
        self.data = TwoSets()
        self.data.setup(stage)

    def train_dataloader(self) -> Any:
        return self.data.train_dataloader()

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader()
