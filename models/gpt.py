"""A causal language model: a transformer with pre-normalisation and rotary positions.

Shapes: B samples, T tokens, D dim, N heads, E dim of a head, V vocabulary.
Source: Radford et al. 2019 (GPT-2) for the blocks and their initialisation; Su et al. 2021 for rotary positions.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.checks import require_at_least, require_probability

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class GPT(nn.Module):
    """A model that predicts the next token at each of up to `seq_len` positions."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        dim: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size, seq_len=seq_len, dim=dim, num_layers=num_layers, num_heads=num_heads)
        require_probability(dropout=dropout)
        if dim % (2 * num_heads):
            raise ValueError(
                f"dim={dim} is not a multiple of 2 * num_heads={2 * num_heads}: every head gets an equal share, and "
                f"rotary positions turn its dims in pairs; set dim to a multiple of {2 * num_heads}"
            )
        self.seq_len = seq_len
        self.num_heads = num_heads
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dim=dim, num_heads=num_heads, dropout=dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw every matrix from N(0, 0.02^2); matrices that add to the residual stream have a smaller deviation.

        The stream is a sum of 2 * num_layers terms: the factor keeps its variance independent of the depth.
        """
        residual_std = INIT_STD / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def blocks(self) -> list[nn.Module]:
        """List the transformer blocks, first to last; each maps (B, T, D) to (B, T, D)."""
        return list(self.layers)

    def chain(self) -> list[nn.Module]:
        """List the modules that, called one after the other, are the forward."""
        return [self.embedding, self.dropout, *self.layers, self.norm, self.head]

    def mixers(self) -> list[nn.Module]:
        """List the modules in which tokens meet; each takes and returns tensors (B, N, T, E)."""
        return [module for module in self.modules() if isinstance(module, CausalMix)]

    def tensor_plan(self) -> dict[str, str]:
        """Return how to cut the layers: attention by heads, the MLP by its hidden units, embedding and logits by tokens."""
        plan = {f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
        plan |= {"layers.*.attention.out": "rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
        return plan | {"embedding": "vocabulary", "head": "vocabulary"}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of the next token, shape (B, T, V), for token ids (int64)."""
        if tokens_BT.shape[1] > self.seq_len:
            raise ValueError(
                f"a sample has {tokens_BT.shape[1]} tokens, but seq_len={self.seq_len} is the most this model takes; "
                f"cut the sample or raise seq_len"
            )
        x = tokens_BT
        for link in self.chain():
            x = link(x)
        return x


class Block(nn.Module):
    """Attention, then an MLP, each added to its input."""

    def __init__(self, *, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim=dim, num_heads=num_heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim=dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Attention(nn.Module):
    """Attention in which every token reads itself and the tokens before it."""

    def __init__(self, *, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.mix = CausalMix(dropout=dropout)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BNTE, k_BNTE, v_BNTE = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y_BNTE = self.mix(q_BNTE, k_BNTE, v_BNTE)
        return self.out(y_BNTE.transpose(1, 2).flatten(start_dim=2))


class CausalMix(nn.Module):
    """The part of attention that gives queries and keys their positions, (T,) or 0 to T - 1, and averages the values.

    It has no parameters. It is the only place where tokens meet: the rest of the model treats each token separately.
    """

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q_BNTE: Tensor, k_BNTE: Tensor, v_BNTE: Tensor, positions: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        q_BNTE, k_BNTE = rotate(q_BNTE, positions), rotate(k_BNTE, positions)
        return F.scaled_dot_product_attention(q_BNTE, k_BNTE, v_BNTE, dropout_p=dropout, is_causal=True)


class MLP(nn.Module):
    """An MLP that widens each token to four times `dim`, and back."""

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


def rotate(x_BNTE: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turn each pair (i, i + E/2) of a head by an angle proportional to the token's position.

    The product of a turned query and a turned key then depends only on the distance of the two tokens. Positions: (T,), or
    None for 0 to T - 1.
    """
    num_tokens, head_dim = x_BNTE.shape[-2:]
    dtype = torch.promote_types(x_BNTE.dtype, torch.float32)  # a 16-bit cosine would blur distant positions
    is_kept = type(x_BNTE) is Tensor or torch.compiler.is_dynamo_compiling()  # no tracer's stand-in, unless the compiler's
    table = kept_rotary_table if is_kept else rotary_table
    if positions is None:
        cos, sin = table(num_tokens, head_dim, dtype, x_BNTE.device)
    else:
        cos, sin = rotary_angles(positions, head_dim, dtype)
    first, second = x_BNTE.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BNTE.dtype)


@torch.compiler.assume_constant_result  # else a compiler would compute the angles again for every number of each query and key
def kept_rotary_table(*kind: Any) -> tuple[Tensor, Tensor]:
    """Return `rotary_table`; it is the same for every layer and step, so it is computed once."""
    if (table := _ROTARY_TABLES.get(kind)) is None:
        table = rotary_table(*kind)
        if type(table[0]) is Tensor and not table[0].is_inference():
            if len(_ROTARY_TABLES) == 16:  # samples of many different lengths would fill the memory
                _ROTARY_TABLES.clear()
            _ROTARY_TABLES[kind] = table
    return table


def rotary_table(num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles, each (T, E/2), computed in float64.

    They are not buffers: `.to(dtype)` would round buffers, and the rounding could not be undone.
    """
    return rotary_angles(torch.arange(num_tokens, device=device), head_dim, dtype)


def rotary_angles(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles for tokens at these positions, (T,)."""
    pairs = torch.arange(head_dim // 2, dtype=_WIDEST.get(positions.device.type, torch.float64), device=positions.device)
    angles = torch.outer(positions.to(pairs), ROTARY_BASE ** (-2 * pairs / head_dim))
    return angles.cos().to(dtype), angles.sin().to(dtype)


_WIDEST = {"mps": torch.float32}  # Apple's GPUs have no float64
_ROTARY_TABLES: dict[Any, tuple[Tensor, Tensor]] = {}
