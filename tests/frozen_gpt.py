"""A GPT of somebody's who freezes a part of it."""

from models.gpt import GPT


class FrozenGPT(GPT):
    """The first block's norm does not learn; neither does its query."""

    def __init__(
        self, *, vocab_size: int, seq_len: int, dim: int, num_layers: int, num_heads: int, tie_embeddings: bool
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            seq_len=seq_len,
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            tie_embeddings=tie_embeddings,
        )
        self.layers[0].attention_norm.requires_grad_(False)
        self.layers[0].attention.query.requires_grad_(False)
