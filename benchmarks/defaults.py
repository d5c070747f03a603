"""The gain of each default choice in a step, and of choices that were tried and rejected.

    python benchmarks/defaults.py             everything
    python benchmarks/defaults.py compile     only choices with this word in their names

Both sides have the same weights and data, and run in turn. Ratios are of wall time, median and quartiles over the rounds.
Below 1 means faster than plain, handwritten torch.
"""

import contextlib
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.modules.parts import blocks_of
from framework.modules.structure import compile_blocks
from framework.optim.optimizers import FusedSGD
from framework.tasks.cross_entropy import cross_entropy_sum
from models import gpt
from models.cnn import CNN
from models.resnet import ResNet

ROUNDS = 9
Side = Callable[[], object]


def step_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Side:
    def step() -> None:
        model.zero_grad()
        outputs = model(inputs)
        F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()

    return step


def models_and_data() -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    torch.manual_seed(0)
    cnn = CNN(num_classes=10, in_channels=3, image_size=32, channels=[32, 64])
    yield "CNN", cnn, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    resnet = ResNet(num_classes=10, in_channels=3, depth=18, stem="cifar", norm="batch")
    yield "ResNet-18", resnet, torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    language = gpt.GPT(vocab_size=8000, seq_len=256, dim=256, num_layers=4)
    yield "GPT", language, torch.randint(8000, (4, 256)), torch.randint(8000, (4, 256))


def cross_entropies() -> Iterator[tuple[str, Side, Side]]:
    for dtype in (torch.float32, torch.bfloat16):
        logits, targets = torch.randn(1024, 50257, dtype=dtype, requires_grad=True), torch.randint(50257, (1024,))

        def plain(logits: Tensor = logits, targets: Tensor = targets) -> None:
            logits.grad = None
            F.cross_entropy(logits.float(), targets, reduction="sum").backward()

        def chunked(logits: Tensor = logits, targets: Tensor = targets) -> None:
            logits.grad = None
            cross_entropy_sum(logits, targets, ignore_index=-100).backward()

        yield f"cross-entropy, 50,257 classes, {str(dtype)[6:]}", plain, chunked


def optimizers() -> Iterator[tuple[str, Side, Side]]:
    of_sgd: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
    kinds: dict[str, tuple[Any, Any]] = {
        "SGD": (partial(torch.optim.SGD, **of_sgd), partial(FusedSGD, **of_sgd)),
        "AdamW": (torch.optim.AdamW, partial(torch.optim.AdamW, fused=True)),
    }
    for kind, (plain, fused) in kinds.items():
        for name, model, inputs, targets in models_and_data():
            other = copy.deepcopy(model)
            step_of(model, inputs, targets)()
            for mine, theirs in zip(other.parameters(), model.parameters()):
                mine.grad = theirs.grad
            yield f"{kind} in one pass, {name}", plain(model.parameters()).step, fused(other.parameters()).step


def rotary() -> Iterator[tuple[str, Side, Side]]:
    *_, (_, model, inputs, targets) = models_and_data()
    step, kept = step_of(model, inputs, targets), gpt.kept_rotary_table

    def anew() -> None:
        gpt.kept_rotary_table = gpt.rotary_table
        step()
        gpt.kept_rotary_table = kept

    yield "rotary tables kept, GPT", anew, step


def fused_qkv() -> Iterator[tuple[str, Side, Side]]:
    *_, (_, model, inputs, targets) = models_and_data()
    other = copy.deepcopy(model)

    class Fused(gpt.Attention):
        def forward(self, x_BTD: Tensor) -> Tensor:
            weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])
            parts = F.linear(x_BTD, weight).chunk(3, dim=-1)
            heads = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
            return self.out(self.mix(*heads).transpose(1, 2).flatten(start_dim=2))  # type: ignore[no-any-return]

    for module in other.modules():
        if isinstance(module, gpt.Attention):
            module.__class__ = Fused
    yield "left out: q, k and v in one product, GPT", step_of(model, inputs, targets), step_of(other, inputs, targets)


def channels_last() -> Iterator[tuple[str, Side, Side]]:
    for name, model, inputs, targets in models_and_data():
        if name != "GPT":
            form: Any = {"memory_format": torch.channels_last}
            other = copy.deepcopy(model).to(**form)
            last = step_of(other, inputs.to(**form), targets)
            yield f"left out: channels last, {name}", step_of(model, inputs, targets), last


def compiled() -> Iterator[tuple[str, Side, Side]]:
    for name, model, inputs, targets in models_and_data():
        other = copy.deepcopy(model)
        compile_blocks(blocks_of(other) or [other], folder=Path(tempfile.mkdtemp()), mode=None, dynamic=False)
        yield f"trainer.compile=true (not a default), {name}", step_of(model, inputs, targets), step_of(other, inputs, targets)


def main(word: str) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {ROUNDS} rounds\n")
    print(f"{'what':46} {'plain, ms':>10} {'so, ms':>10}   ratio [quartiles]")
    found = False
    for make in (cross_entropies, optimizers, rotary, fused_qkv, channels_last, compiled):
        for name, plain, other in make():
            if word not in name:
                continue
            found = True
            with contextlib.redirect_stdout(None):
                for side in (plain, other) * 2:
                    side()
            times: list[tuple[float, float]] = []
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                plain()
                between = time.perf_counter()
                other()
                times.append((between - begun, time.perf_counter() - between))
            low, middle, high = statistics.quantiles([mine / bare for bare, mine in times], n=4)
            bare, mine = (1e3 * statistics.median(side) for side in zip(*times))
            print(f"{name:46} {bare:10.2f} {mine:10.2f}   {middle:.2f} [{low:.2f}..{high:.2f}]", flush=True)
    if not found:
        sys.exit(f"nothing has {word} in its name")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
