"""rtdl's FT-Transformer with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rtdl_revisiting_models import FTTransformer


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = FTTransformer(
            n_cont_features=4, cat_cardinalities=[3, 5], d_out=1, n_blocks=2, d_block=16, attention_n_heads=4,
            attention_dropout=0.1, ffn_d_hidden=None, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
        )  # fmt: skip

    def training_step(self, batch: Any, number: int) -> Any:
        row, target = batch
        return F.mse_loss(self.model(**row), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.make_parameter_groups(), lr=1e-3, weight_decay=0.1)


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, accumulate_grad_batches=4, **options).fit(lit, loader)
