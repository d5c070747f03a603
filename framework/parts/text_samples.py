"""Text samples that a language model writes during training."""

from typing import Any

import numpy as np
import torch

from framework.training.loop_view import Loop


class TextSamples:
    """A part that lets the model continue `prompt` by `tokens` tokens, `count` times, after each evaluation on val.

    The texts are in the run's directory: samples/STEP.txt. The draws depend on the run's seed and the step; `temperature` 0
    takes the most likely token. `tokenizer`, or else the dataset, must have `encode(text)` and `decode(tokens)`.
    """

    def __init__(
        self, *, prompt: str, tokens: int = 100, count: int = 2, temperature: float = 1.0, tokenizer: Any = None
    ) -> None:
        for name, value in (("tokens", tokens), ("count", count)):
            if value < 1:
                raise ValueError(f"{name}={value} is out of range (at least 1)")
        if temperature < 0:
            raise ValueError(f"temperature={temperature} is out of range (at least 0)")
        if not prompt:
            raise ValueError("prompt is empty (at least one character)")
        self.prompt, self.tokens, self.count, self.temperature = prompt, tokens, count, temperature
        self._tokenizer = tokenizer

    def begun(self, loop: Loop) -> None:
        self._tokenizer = self._tokenizer or loop.dataset
        if not all(hasattr(self._tokenizer, method) for method in ("encode", "decode")):
            raise ValueError(f"tokenizer: a {type(self._tokenizer).__name__} has no encode(text) and decode(tokens)")
        if "seq_len" not in loop.dataset.info:
            raise ValueError(
                "tokens: the dataset does not say how many a sample has (`seq_len` in its info, or in dataset.facts)"
            )

    def evaluated(self, loop: Loop, split: str, row: dict[str, Any]) -> None:
        if split != "val":
            return
        text = torch.as_tensor(np.asarray(self._tokenizer.encode(self.prompt), dtype=np.int64)).repeat(self.count, 1)
        longest = int(loop.dataset.info["seq_len"])
        for _ in range(self.tokens):
            logits = loop.outputs(text[:, -longest:])[:, -1].cpu().double()
            if self.temperature == 0:
                following = logits.argmax(dim=1, keepdim=True)
            else:
                following = torch.multinomial((logits / self.temperature).softmax(dim=1), 1)
            text = torch.cat([text, following], dim=1)
        if loop.is_main:
            folder = loop.directory / "samples"
            folder.mkdir(exist_ok=True)
            texts = "\n---\n".join(self._tokenizer.decode(tokens) for tokens in text.numpy())
            (folder / f"{loop.step}.txt").write_text(texts + "\n")
