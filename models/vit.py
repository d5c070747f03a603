"""A vision transformer with pre-normalisation, learned positions and mean pooling.

Shapes: B samples, C channels, H height, W width, T patches, D dim, N heads, E dim of a head, K classes.
Source: Dosovitskiy et al. 2021; mean pooling instead of a class token: Beyer et al. 2022, "Better plain ViT baselines".
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.checks import require_at_least, require_probability


class ViT(nn.Module):
    """A model that classifies an image as a sequence of square patches of `patch_size` pixels."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        image_size: int,
        patch_size: int = 4,
        dim: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_at_least(1, num_classes=num_classes, in_channels=in_channels, image_size=image_size)
        require_at_least(1, patch_size=patch_size, dim=dim, num_layers=num_layers, num_heads=num_heads)
        require_probability(dropout=dropout)
        if image_size % patch_size:
            raise ValueError(
                f"patch_size={patch_size}: patches must tile the image of image_size={image_size}; choose a divisor of it"
            )
        if dim % num_heads:
            raise ValueError(
                f"dim={dim} is not a multiple of num_heads={num_heads}: every head gets an equal share; "
                f"set dim to a multiple of {num_heads}"
            )
        self.patches = Patches(in_channels=in_channels, dim=dim, size=patch_size, num_patches=(image_size // patch_size) ** 2)
        self.dropout = nn.Dropout(dropout)
        self.num_heads = num_heads
        self.layers = nn.ModuleList(Block(dim=dim, num_heads=num_heads, dropout=dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.pool = Pool()
        self.head = nn.Linear(dim, num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.trunc_normal_(self.patches.positions, std=0.02)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def blocks(self) -> list[nn.Module]:
        """List the transformer blocks, first to last; each maps (B, T, D) to (B, T, D)."""
        return list(self.layers)

    def chain(self) -> list[nn.Module]:
        """List the modules that, called one after the other, are the forward."""
        return [self.patches, self.dropout, *self.layers, self.norm, self.pool, self.head]

    def tensor_plan(self) -> dict[str, str]:
        """Return how to cut the linear layers: attention by heads, the MLP by its hidden units."""
        plan = {f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
        return plan | {"layers.*.attention.out": "rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        x = x_BCHW
        for link in self.chain():
            x = link(x)
        return x


class Patches(nn.Module):
    """A projection of each square of `size` pixels to one token, plus the learned position."""

    def __init__(self, *, in_channels: int, dim: int, size: int, num_patches: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(in_channels, dim, kernel_size=size, stride=size)
        self.positions = nn.Parameter(torch.empty(num_patches, dim))  # (T, D)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.projection(x_BCHW).flatten(start_dim=2).transpose(1, 2) + self.positions


class Pool(nn.Module):
    """The average of the tokens."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.mean(dim=1)


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
    """Attention in which every patch reads every patch."""

    def __init__(self, *, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BNTE, k_BNTE, v_BNTE = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        y_BNTE = F.scaled_dot_product_attention(q_BNTE, k_BNTE, v_BNTE, dropout_p=dropout)
        return self.out(y_BNTE.transpose(1, 2).flatten(start_dim=2))


class MLP(nn.Module):
    """An MLP that widens each patch to four times `dim`, and back."""

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))
