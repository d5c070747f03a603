"""The promise for models that nobody here wrote: under every strategy the same numbers, or refused before the start."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.config.folders import options
from tests.harness import assert_computes_or_is_refused
from tests.test_conformance import CONTEXTS, FOR_EXPERTS, NOT_EQUAL, layouts, name
from tests.test_resume import assert_survives_a_kill
from tests.zoo import IMAGES, TOKENS, make

RUN = ["precision=fp64", "global_batch_size=12", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=3",
       "trainer.eval_every=2", "trainer.log_every=1", "checkpoint.every=null", "optimizer.lr=0.001", "optimizer.eps=1e-4", "dataset=synthetic",
       "dataset.num_train=28", "dataset.num_val=6", "dataset.num_test=6"]  # fmt: skip
DATA = {
    "images": ["dataset.image_size=16", "dataset.num_classes=10"],
    "tokens": ["dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=12", "dataset.vocab_size=32"],
}
STRATEGIES = [
    (strategy, *next(layout for layout in layouts(strategy) if layout[0] <= 2))
    for strategy in options("parallel")
    if strategy not in ("single", *NOT_EQUAL)
]
LEAN = {"hf mamba": 1e-6}  # it computes partly in float32

# Which strategies refuse which models, and the words that say why. All else computes what one process does.
NO_ROW = "and its forward cannot be cut at its blocks"
PIPELINES = ("pipeline", "ddp+pp", "pp+fsdp+tp")
ALONE = ("dp", "model-parallel")  # one process
ALL = [strategy for strategy, *_ in STRATEGIES if strategy not in (*ALONE, *CONTEXTS, *PIPELINES)]
NOT_IN_A_ROW = ["torchvision densenet", "codebook", "queue", "frozen part", "moe", "one moe", "hf mixtral",
                "x-transformers", "lstm"]  # fmt: skip
REFUSED = {
    **{(model, strategy): "does not have mixers()" for model in (*IMAGES, *TOKENS) for strategy in CONTEXTS},
    **{(model, strategy): NO_ROW for model in NOT_IN_A_ROW for strategy in PIPELINES},
    **{("gradient penalty", strategy): "a step on 2 processes fails with this model" for strategy in PIPELINES},
    **{("unet", strategy): "first in the output of ups.1.0; loss of step 1 is nan" for strategy in PIPELINES},
    **{(model, strategy): "divides the features of no linear layer" for strategy in ("tensor", "fsdp+tp")
       for model in ("hf gpt2", "hf gpt2, in eval mode", "weight norm")},
    **{(model, strategy): "parallel.find_unused_parameters=true" for model in ("moe", "one moe")
       for strategy in ("ddp", "ddp+mp", "zero", "auto", "fsdp", "hsdp")},
    **{("gradient penalty", strategy): "2 processes" for strategy in ("fsdp", "hsdp", "tensor", "fsdp+tp")},
    **{("teacher", strategy): "its forward changes teacher.0.weight" for strategy in ALL},
    **{("teacher", strategy): NO_ROW for strategy in PIPELINES},
    **{(model, strategy): "calls no known module of stacked experts" for strategy in FOR_EXPERTS
       for model in (*IMAGES, *TOKENS) if model != "hf mixtral"},
}  # fmt: skip


def line(model: str) -> list[str]:
    return [*RUN, *DATA["images" if model in IMAGES else "tokens"], "model._target_=tests.zoo.make", f"model.name='{model}'"]


def cells() -> Iterator[Any]:
    for number, model in enumerate([*IMAGES, *TOKENS]):
        for other, (strategy, ranks, mesh) in enumerate(STRATEGIES):
            if (number + other) % 4 == 0 or strategy == ("ddp", "fsdp")[
                number % 2
            ]:  # each model meets a quarter of them, in turn
                yield pytest.param(model, strategy, ranks, mesh, id=f"{model}-{name(strategy, ranks, mesh)}")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "ranks", "mesh"), [*cells()])
def test_a_model_computes_what_it_does_on_one_process_or_is_refused(
    model: str, strategy: str, ranks: int, mesh: list[str], tmp_path: Path
) -> None:
    make(model)  # what it imports, the command's processes then have
    words = [f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}"]
    said, tolerance = REFUSED.get((model, strategy)), LEAN.get(model, 1e-10)
    assert_computes_or_is_refused(line(model), words, said, root=tmp_path / "runs", tolerance=tolerance)


FAMILIES = ["codebook", "hf mixtral", "peft lora", "queue", "spectral norm", "layer drop"]


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_killed_it_ends_with_the_same_bits(model: str, tmp_path: Path) -> None:
    both = [*line(model), "checkpoint.every=2", "parallel=ddp", "launch.nproc_per_node=2"]
    assert_survives_a_kill(*both, at=3, root=tmp_path)
