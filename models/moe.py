"""A causal language model with mixtures of experts as MLPs: each token goes through a few experts, chosen by a router.

Shapes: B samples, T tokens, D dim, N tokens of all samples, X experts, K experts of a token, H hidden units, V vocabulary.
Source: Fedus et al. 2021 (Switch Transformers); Jiang et al. 2024 (Mixtral) for the weights of several experts.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.checks import require_at_least, require_probability
from models.gpt import INIT_STD, Attention


class MoEGPT(nn.Module):
    """A model of the next token at up to `seq_len` positions, like GPT; in each block, a token has `top_k` experts."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        dim: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        num_experts: int = 8,
        top_k: int = 2,
        balance: float = 0.01,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size, seq_len=seq_len, dim=dim, num_layers=num_layers, num_heads=num_heads)
        require_at_least(1, num_experts=num_experts, top_k=top_k)
        require_probability(dropout=dropout)
        if dim % (2 * num_heads):
            raise ValueError(f"dim={dim} is not a multiple of 2 * num_heads={2 * num_heads} (see models/gpt.py)")
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k}: is more than num_experts={num_experts}")
        self.seq_len, self.num_heads, self.balance = seq_len, num_heads, balance
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            MoEBlock(dim=dim, num_heads=num_heads, num_experts=num_experts, top_k=top_k, dropout=dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw every matrix like GPT does."""
        residual_std = INIT_STD / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "experts.down_XDH")):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=INIT_STD)

    def blocks(self) -> list[nn.Module]:
        """List the transformer blocks, first to last."""
        return list(self.layers)

    def experts(self) -> list[nn.Module]:
        """List the modules that each hold the stacked experts of a layer."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def tensor_plan(self) -> dict[str, str]:
        """Return how to cut the layers: attention by heads, embedding and logits by tokens."""
        plan = {f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
        return plan | {"layers.*.attention.out": "rowwise", "embedding": "vocabulary", "head": "vocabulary"}

    def forward(self, tokens_BT: Tensor) -> Any:
        """Return the logits of the next token, shape (B, T, V), for token ids (int64).

        In training, unless `balance` is 0, return {"logits", "aux_loss"}. `aux_loss`, shape (B,), is `balance` times the mean
        over layers of `imbalance`; the task adds it to each sample's loss.
        """
        if tokens_BT.shape[1] > self.seq_len:
            raise ValueError(
                f"a sample has {tokens_BT.shape[1]} tokens, but seq_len={self.seq_len} is the most; cut it or raise it"
            )
        x_BTD = self.dropout(self.embedding(tokens_BT))
        imbalance_B = torch.zeros(x_BTD.shape[0], dtype=torch.promote_types(x_BTD.dtype, torch.float32), device=x_BTD.device)
        for layer in self.layers:
            x_BTD, imbalance_B = layer(x_BTD, imbalance_B)
        logits_BTV = self.head(self.norm(x_BTD))
        if not self.training or not self.balance:
            return logits_BTV
        return {"logits": logits_BTV, "aux_loss": self.balance / len(self.layers) * imbalance_B}


class MoEBlock(nn.Module):
    """Attention, then a mixture of experts, each added to its input. The block adds its `imbalance` to the earlier blocks'."""

    def __init__(self, *, dim: int, num_heads: int, num_experts: int, top_k: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim=dim, num_heads=num_heads, dropout=dropout)
        self.experts_norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(dim=dim, num_experts=num_experts)
        self.dropout = nn.Dropout(dropout)
        self.top_k = top_k

    def forward(self, x_BTD: Tensor, imbalance_B: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        normed_BTD = self.experts_norm(x_BTD)
        logits_BTX = self.router(normed_BTD)
        # 16 bits would give equal values for different experts
        shares_BTX = logits_BTX.softmax(dim=-1, dtype=torch.promote_types(logits_BTX.dtype, torch.float32))
        weights_BTK, index_BTK = shares_BTX.topk(self.top_k, dim=-1)
        if self.top_k > 1:  # with one expert, its share itself trains the router
            weights_BTK = weights_BTK / weights_BTK.sum(dim=-1, keepdim=True)
        flat = normed_BTD.flatten(0, 1), index_BTK.flatten(0, 1), weights_BTK.flatten(0, 1)
        mixed_BTD = self.experts(*flat).view(x_BTD.shape)
        return x_BTD + self.dropout(mixed_BTD), imbalance_B + imbalance(shares_BTX, index_BTK)


def imbalance(shares_BTX: Tensor, index_BTK: Tensor) -> Tensor:
    """Return how unevenly each sample's tokens are spread over the experts, (B,): 1 if evenly, up to X if all choose the same.

    It is the number of experts times the sum over experts of (the fraction of choices that chose the expert) x (its mean
    share). It is over one sample, not over a batch, so it does not depend on which samples a process has. Source: Fedus et al.
    2021, equation 4; over a sequence, DeepSeek-AI 2024, "DeepSeek-V2".
    """
    num_experts = shares_BTX.shape[-1]
    chosen_BX = F.one_hot(index_BTK.flatten(1), num_experts).to(shares_BTX.dtype).mean(dim=1)
    return num_experts * (chosen_BX * shares_BTX.mean(dim=1)).sum(dim=-1)


class Experts(nn.Module):
    """Stacked MLPs like GPT's: each token goes through its chosen experts, and their outputs are added with its weights."""

    def __init__(self, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.up_XHD = nn.Parameter(torch.empty(num_experts, 4 * dim, dim))
        self.down_XDH = nn.Parameter(torch.empty(num_experts, dim, 4 * dim))

    @torch.compiler.disable  # otherwise each number of tokens of an expert would be compiled separately
    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # a program without loops that depend on numbers
            return self._through_all(x_ND, index_NK, weights_NK)
        chosen = index_NK.flatten()
        order = chosen.argsort(stable=True)
        num_experts, num_choices = len(self.up_XHD), index_NK.shape[1]
        if chosen.is_meta:  # a count of operations: as if all experts were chosen equally often
            runs = x_ND[order // num_choices].tensor_split(num_experts)
        else:
            runs = x_ND[order // num_choices].split(torch.bincount(chosen, minlength=num_experts).tolist())
        outputs = [self._mlp(run, up, down) for run, up, down in zip(runs, self.up_XHD, self.down_XDH)]
        y_NKD = torch.cat(outputs)[order.argsort()].unflatten(0, (-1, num_choices))
        return (y_NKD * weights_NK.unsqueeze(-1)).sum(dim=1)

    def _through_all(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Compute every expert for every token; experts that the token has not chosen get a weight of zero."""
        hidden_XNH = F.gelu(torch.einsum("nd,xhd->xnh", x_ND, self.up_XHD))
        y_NXD = torch.einsum("xnh,xdh->nxd", hidden_XNH, self.down_XDH)
        y_NKD = y_NXD.gather(1, index_NK.unsqueeze(-1).expand(-1, -1, x_ND.shape[1]))
        return (y_NKD * weights_NK.unsqueeze(-1)).sum(dim=1)

    @staticmethod
    def _mlp(x_ND: Tensor, up_HD: Tensor, down_DH: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x_ND, up_HD)), down_DH)
