"""What the benchmark gives to each of Lightning's files: arguments, images, the kill, and what is measured in the end."""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import TensorDataset

from framework.data.digits import Digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--every", type=int, default=8, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the scanned digits for training and for validation, normalised as the framework does: float64 (N, 1, 8, 8), labels."""
    source = Digits()
    parts = []
    for split in ("train", "val"):
        arrays = source.load(split)  # type: ignore[arg-type]
        images = (torch.from_numpy(arrays.inputs).double() / 255 - source.mean[0]) / source.std[0]
        parts.append(TensorDataset(images, torch.from_numpy(arrays.targets)))
    return parts[0], parts[1]


class Watch(L.Callback):
    """Kill the run with SIGKILL after the step that KILL_AFTER names; note the last step's loss."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == int(os.environ.get("KILL_AFTER", 0)):
            os.kill(0, signal.SIGKILL)  # all processes of its group

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.train_loss = float(trainer.callback_metrics["train_loss"])


def report(trainer: Any, model: Any, *, folder: Path, watch: Watch) -> None:
    """Write the weights, and print the losses. The module has been validated."""
    if trainer.is_global_zero:
        np.savez(folder / "weights.npz", **{name: value.detach().numpy() for name, value in model.named_parameters()})
        print(json.dumps({"train_loss": watch.train_loss, "val_loss": float(trainer.callback_metrics["val_loss"])}))
