"""Every two features of a run together: on two processes what one process computes, and after a stop the same bits.

The quick tests have each value of each kind in one pair; the slow ones have the whole product.
"""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from framework.config.folders import options
from tests.harness import assert_close, assert_same_bits
from tests.product import Trained, trained
from tests.test_conformance import FOR_EXPERTS, NOT_EQUAL, layouts
from tests.test_turns import TURNS

RUN = ["precision=fp64", "global_batch_size=7", "micro_batch_size=2", "trainer.max_epochs=null", "trainer.max_steps=6",
       "trainer.log_every=1", "trainer.eval_every=3", "trainer.clip_grad_norm=0.5", "checkpoint.every=null",
       "dataset=synthetic", "dataset.num_train=33", "dataset.num_val=9", "dataset.num_test=8"]  # fmt: skip
TOKENS = [*RUN, "dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=8", "dataset.vocab_size=12"]
SMALL = ["model.dim=8", "model.num_layers=2", "model.num_heads=2"]
GPT = [*TOKENS, "model=gpt", *SMALL]
MOE = [*TOKENS, "model=moe", *SMALL, "model.num_experts=4"]
IMAGES = [*RUN, "dataset.image_size=8"]
GAN = [*IMAGES, "model._target_=tests.trainings.Gan", "task._target_=tests.trainings.Adversarial", TURNS, "trainer.clip_grad_norm=null"]  # fmt: skip
# BatchNorm takes no micro-batch of one sample; Adam would make steps of the rounding in the gradient of a bias before it
OWN = [*IMAGES, "model._target_=tests.trainings.Net", "global_batch_size=8", "micro_batch_size=3", "dataset.num_train=32",
       "optimizer=sgd", "optimizer.lr=0.05"]  # fmt: skip

PARTS = {
    "activations": ["modules=['*']"],
    "batch_warmup": ["start=3", "samples=12"],
    "gradient_norms": ["depth=2"],
    "histograms": ["every=2", "bins=3", "parameters=['*0*']"],
    "length_warmup": ["start=4", "steps=3", "multiple_of=2"],
    "loss_spikes": ["window=2", "factor=50"],
    "lr_range": ["stop_at=1000"],
    "plateau": ["patience=0", "threshold=0.5", "factor=0.5"],
    "predictions": ["count=3"],
    "sharpness": ["radius=0.05"],
    "swa": ["start=0.3", "every=2"],
    "text_samples": ["tokenizer={_target_: tests.own_parts.Letters}", "prompt=abc", "tokens=3", "count=1"],
    "time_limit": ["hours=100", "every=2"],
    "unfreeze": ["groups=[['*weight'],['*.0.*']]", "every=2"],
}
STRATEGIES = {name: layouts(name)[0] for name in options("parallel") if name not in NOT_EQUAL}
TWO = ["ddp", "fsdp", "zero", "pipeline", "tensor"]  # for pairs of other kinds, in turn
OWN_STEPS = ["Consistency", "Contrastive", "Distillation", "SelfDistillation", "GradientPenalty", "InPieces"]
PRECISIONS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-3, "fp16": 1e-3}  # the tolerance against one process
KEPT = {
    "ema": ["trainer.ema_decay=0.8"],
    "swa": ["part=swa", "part.swa.start=0.3"],
    "schedule-free": ["optimizer._target_=schedulefree.AdamWScheduleFree", "optimizer.lr=0.01", "optimizer.warmup_steps=2"],
    **{kind: [f"parallel.compression={kind}"] for kind in ("fp16", "bf16", "int8", "top_k", "powersgd")},
}
APPROXIMATE = ("fp16", "bf16")  # compression without a state


def test_every_part_of_conf_is_in_the_table() -> None:
    assert [*PARTS] == [name for name in options("part") if name != "none"]


def of_parts(*names: str) -> list[str]:
    return [f"part=[{','.join(names)}]", *(f"part.{name}.{word}" for name in names for word in PARTS[name])]


def model_for(strategy: str) -> list[str]:
    return MOE if strategy in FOR_EXPERTS else GPT


def under(strategy: str) -> list[str]:
    return [f"parallel={strategy}", *STRATEGIES[strategy][1]]


def diagonal(first: list[str], second: list[str]) -> set[tuple[str, str]]:
    return {(first[n % len(first)], second[n % len(second)]) for n in range(max(len(first), len(second)))}


def pairs(first: list[str], second: list[str], quick: set[tuple[str, str]]) -> list[Any]:
    """Return all pairs as a test's parameters, all but the quick ones marked slow."""
    return [
        pytest.param(*pair, marks=[] if pair in quick else pytest.mark.slow, id="-".join(pair))
        for pair in product(first, second)
        if pair[0] != pair[1]
    ]


ONE: dict[tuple[str, ...], Trained] = {}


def alone(line: list[str], root: Path) -> Trained:
    if tuple(line) not in ONE:
        (ONE[tuple(line)],) = trained(line, ranks=1, root=root / "one", stops=[None])
    return ONE[tuple(line)]


def check(
    line: list[str], *, parallel: list[str], ranks: int, root: Path, refused: str | None, tolerance: float = 1e-9
) -> None:
    """Compare with one process, and after a stop; or find that the line is refused with these words."""
    if refused is not None:
        words = ".*".join(re.escape(word) for word in refused.split() if word != "...")
        with pytest.raises(AssertionError, match=f"(?s){words}"):
            trained([*line, *parallel], ranks=ranks, root=root / "ranks", stops=[None])
        return
    whole, cut = trained([*line, *parallel], ranks=ranks, root=root / "ranks")
    assert_same_bits(cut, whole)
    assert cut.texts == whole.texts
    if tolerance:
        one = alone(line, root)
        assert_close(whole, one, tolerance=tolerance)
        assert (whole.texts, whole.weights.keys()) == (one.texts, one.weights.keys()) and one.weights


# --- what is refused, and the words that say why

REFUSED = {("text_samples", name): "no process has the outputs of the whole model" for name in STRATEGIES
           if name == "pipeline" or "context" in name or "pp" in name}  # fmt: skip
REFUSED |= {("predictions", name): "needs the outputs of whole samples" for name in STRATEGIES if "context" in name}


# each part, under as many strategies; the five that remain cut as some of these do
UNDER = {(part, strategy) for part, strategy in zip(PARTS, ["pipeline", "context", "ddp", "zero", "fsdp", "dp", "expert", "ddp+mp",
         "fsdp+context", "ddp+pp", "hsdp", "model-parallel", "parameter-server"])}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize(("part", "strategy"), pairs([*PARTS], [*STRATEGIES], UNDER))
def test_a_part_under_a_strategy(part: str, strategy: str, tmp_path: Path) -> None:
    line, ranks = [*model_for(strategy), *of_parts(part)], STRATEGIES[strategy][0]
    check(line, parallel=under(strategy), ranks=ranks, root=tmp_path, refused=REFUSED.get((part, strategy)))


NEXT = set([*zip(PARTS, [*PARTS][1:] + [*PARTS][:1])][::2])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("one", "other"), pairs([*PARTS], [*PARTS], NEXT))
def test_a_part_with_a_part(one: str, other: str, tmp_path: Path) -> None:
    strategy = TWO[[*PARTS].index(one) % 4]
    refused = REFUSED.get((one, other))
    if "text_samples" in (one, other) and strategy == "pipeline":
        refused = "no process has the outputs of the whole model"
    check([*GPT, *of_parts(one, other)], parallel=under(strategy), ranks=2, root=tmp_path, refused=refused)


REFUSED_WITH_TURNS = {
    "lr_range": "optimizer.turns: gives each step several losses and learning rates",
    "text_samples": "tokens: the dataset does not say how many a sample has",
    "predictions": "part.predictions: takes outputs and targets, but the task measures in its step()",
    "length_warmup": "shapes cannot be multiplied",  # of images, whose second dimension is not their length
}


ADDS = ("unfreeze", "sharpness", "histograms")  # to the step of a turn: its parameters, its passes, its gradients


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("part", "strategy"), pairs([*PARTS], TWO[:3], {*zip(ADDS, TWO), *((part, "ddp") for part in REFUSED_WITH_TURNS)})
)
def test_a_part_with_turns(part: str, strategy: str, tmp_path: Path) -> None:
    refused = REFUSED_WITH_TURNS.get(part)
    check([*GAN, *of_parts(part)], parallel=under(strategy), ranks=2, root=tmp_path, refused=refused)


REFUSED_STEPS = {("GradientPenalty", "fsdp"): "parallel.reshard_after_forward: true ... differentiates the model itself"}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("step", "precision"), pairs(OWN_STEPS, [*PRECISIONS], diagonal(OWN_STEPS, [*PRECISIONS])))
def test_an_own_step_in_a_precision(step: str, precision: str, tmp_path: Path) -> None:
    line = [*OWN, f"task._target_=tests.trainings.{step}", f"precision={precision}"]
    line += ["trainer.ema_decay=0.9"] if step == "SelfDistillation" else []
    strategy = TWO[OWN_STEPS.index(step) % 3]
    check(
        line,
        parallel=under(strategy),
        ranks=2,
        root=tmp_path,
        refused=REFUSED_STEPS.get((step, strategy)),
        tolerance=PRECISIONS[precision],
    )


SAVED_AT_END = ("int8", "top_k", "powersgd")


@pytest.mark.quick(2)
@pytest.mark.parametrize(("kept", "strategy"), pairs([*KEPT], ["ddp", "fsdp"], {(kept, "ddp") for kept in KEPT}))
def test_what_a_run_keeps_survives_a_stop(kept: str, strategy: str, tmp_path: Path) -> None:
    refused = "checkpoint.every ... keeps values from step to step" if kept in SAVED_AT_END else None
    if strategy == "fsdp" and kept in (*APPROXIMATE, *SAVED_AT_END):
        refused = "parallel.compression: unknown key"  # it is a hook of replicas
    line = [*GPT, "checkpoint.every=2", *(KEPT[kept] if kept in ("ema", "swa", "schedule-free") else [])]
    parallel = [*under(strategy), *(KEPT[kept] if kept not in ("ema", "swa", "schedule-free") else [])]
    tolerance = 0.0 if kept in APPROXIMATE else 1e-9
    check(line, parallel=parallel, ranks=2, root=tmp_path, refused=refused, tolerance=tolerance)
