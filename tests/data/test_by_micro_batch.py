"""What a dataset makes of samples it makes of a micro-batch: padding does not depend on what else a process has; sources of any kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from tests.harness import assert_close, finished, once

RUN = ["dataset._target_=tests.data.test_by_micro_batch.Sentences", "task._target_=framework.tasks.classification.Classification",
       "task.label_smoothing=0.0", "model._target_=tests.data.test_by_micro_batch.Reader", "precision=fp64", "global_batch_size=8",
       "micro_batch_size=2", "trainer.max_epochs=null", "trainer.max_steps=6", "trainer.eval_every=3", "trainer.log_every=1",
       "checkpoint.every=null", "optimizer.lr=0.01"]  # fmt: skip


class Ragged:
    """Sentences of different lengths; no dataclass, and no arrays of its own."""

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.RandomState(seed)
        self._sentences = [random.randint(1, 20, size=random.randint(3, 12)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._sentences)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chosen = [self._sentences[index] for index in indices]
        longest = max(map(len, chosen))
        padded = np.stack([np.pad(sentence, (0, longest - len(sentence))) for sentence in chosen])
        return padded, np.array([sentence[0] % 3 for sentence in chosen])


class Sentences:
    info = {"num_classes": 3}

    def __init__(self) -> None:
        pass

    def problems(self) -> list[str]:
        return []

    def load(self, split: str) -> Ragged:
        return Ragged({"train": 30, "val": 7, "test": 7}[split], seed=len(split))

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: Any) -> tuple[dict[str, Tensor], Tensor]:
        return {"tokens": inputs, "mask": inputs > 0}, targets


class Reader(nn.Module):
    """Draws dropout of the padded shape, as BERT does."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(20, 8), nn.Dropout(0.3), nn.Linear(8, num_classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(tokens)) * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("ddp", 3), ("fsdp", 2)])
def test_padding_is_that_of_the_micro_batch(strategy: str, ranks: int, tmp_path: Path) -> None:
    assert_close(finished(*RUN, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs"), once(*RUN))
