"""A recurrent language model that keeps its state from step to step. Source: Zaremba et al. 2014, section 4."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Streams(Dataset[Any]):
    """Long texts, side by side: sample number `step * num_streams + stream` is the piece of a text that belongs to a step.

    Every fourth token of a text is the text's own. At the start of a piece, only a model that carries its state can know it.
    """

    def __init__(self, *, num_streams: int, num_steps: int, seq_len: int, vocab_size: int, seed: int) -> None:
        draws = np.random.default_rng(seed)
        texts = draws.integers(0, vocab_size, (num_streams, num_steps * seq_len + 1))
        texts[:, 1::4] = draws.integers(0, vocab_size, (num_streams, 1))
        self.texts, self.num_streams, self.seq_len = torch.from_numpy(texts), num_streams, seq_len

    def __len__(self) -> int:
        return self.num_streams * (self.texts.shape[1] // self.seq_len)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        step, stream = divmod(index, self.num_streams)
        piece = self.texts[stream, step * self.seq_len : (step + 1) * self.seq_len + 1]
        return piece[:-1], piece[1:]


class InOrder:
    """The sampler: a step has the pieces that follow those of the step before."""

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        return np.arange(len(source))


class Recurrent(nn.Module):
    """Tokens (B, T) and a state (B, L, 2, D) to logits (B, T, V) and the next state. L layers of width D."""

    def __init__(self, *, vocab_size: int, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.layers = nn.LSTM(dim, dim, num_layers, batch_first=True)

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = (part.transpose(0, 1).contiguous() for part in state.unbind(2))
        outputs, state_after = self.layers(self.embedding(tokens), (hidden, cell))
        return self.head(outputs), torch.stack(state_after, dim=2).transpose(0, 1)


class Carried(nn.Module):
    """The task. The state of all texts is a buffer of it, so it is in the checkpoints. Evaluations begin without a state."""

    state: Tensor

    def __init__(self, *, num_streams: int, num_layers: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(num_streams, num_layers, 2, dim))

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        rows = slice(context.start, context.start + context.size)
        begins = not context.is_training or context.batch == 0
        before = torch.zeros_like(self.state[: context.size]) if begins else self.state[rows]
        logits, after = call(batch.inputs, before)
        losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
        found = logits[:, 0].argmax(-1) == batch.targets[:, 0]
        return {"losses": losses.mean(1), "found": found.to(losses.dtype), "after": after.detach()}

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> dict[str, Tensor]:
        if context.is_training:
            after = everyone["after"].detach()
            self.state = torch.cat([after, self.state[len(after) :]])  # a rehearsal's step has fewer texts
        return {"loss": own["losses"].sum(), "remembered": own["found"].sum()}
