"""The promise: how a run is executed does not change what it computes. Every strategy against one process, in float64."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.config.folders import option_node, options
from tests.harness import Ended, Says, assert_close, finished, once, refused

# Epochs of 4 steps of 14 samples and a short one of 10: micro-batches of 4, 4, 4 and 2, or of 4, 4 and 2, so that no
# rank's share is even.
RUN = ["precision=fp64", "global_batch_size=14", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=10",
       "trainer.log_every=1", "trainer.eval_every=5", "trainer.clip_grad_norm=0.5", "scheduler.warmup_steps=3",
       "checkpoint.every=null"]  # fmt: skip
IMAGES = ["dataset=synthetic", "dataset.num_train=66", "dataset.num_val=31", "dataset.num_test=32"]
SMALL = [*IMAGES, "dataset.image_size=8"]
TOKENS = [*IMAGES, "dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=13", "dataset.vocab_size=16"]
RESNET18 = "torchvision's resnet18"
SIZES = ["model.dim=16", "model.num_layers=4", "model.num_heads=4"]
MODELS = {
    "mlp": [*SMALL, "model=mlp", "model.dim=24", "model.num_layers=4", "model.dropout=0.1"],
    "cnn with BatchNorm": [*SMALL, "model=cnn", "model.channels=[4,8,8]", "model.norm=batch", "model.dropout=0.1"],
    "vit": [*SMALL, "model=vit", "model.dim=16", "model.num_layers=4", "model.num_heads=4"],
    "gpt, tied": [*TOKENS, "model=gpt", *SIZES, "model.tie_embeddings=true"],
    "experts": [*TOKENS, "model=moe", *SIZES, "model.num_experts=5", "model.balance=0.1", "model.tie_embeddings=true"],
    "two inputs": ["dataset._target_=tests.two_inputs.Pairs", "task=classification", "model._target_=tests.two_inputs.TwoInputs"],
    # at its end an image of 32 x 32 is one pixel: over fewer than 7 samples BatchNorm would make noise of rounding
    RESNET18: ["dataset=synthetic", "dataset.num_train=33", "dataset.num_val=7", "dataset.num_test=7", "model=torchvision",
               "model.name=resnet18", "micro_batch_size=7", "trainer.max_steps=6", "scheduler.warmup_steps=100"],
}  # fmt: skip
OPTIMIZERS = {
    "adamw": ["optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"],
    # the average of the weights is what is evaluated, and kept
    "sgd": ["optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "trainer.ema_decay=0.8", "trainer.eval_every=2"],
}


AXES = ("replicate", "shard", "tensor", "pipeline", "context", "expert")  # what cuts most comes last


def layouts(strategy: str) -> list[tuple[int, list[str]]]:
    """Return the numbers of ranks on which a strategy is tested, with its mesh: from the axes that its YAML names."""
    node = option_node("parallel", strategy)
    axes = [name for name in AXES if name in node]
    if not axes:
        return [(1, [])]
    inner = [f"parallel.{name}=1" for name in axes[1:-1]]
    if len(axes) == 1:
        return [(2, []), (3, []), (4, [])]
    along_last = [(ranks, [f"parallel.{axes[0]}=1", *inner, f"parallel.{axes[-1]}={ranks}"]) for ranks in (2, 3)]
    return [*along_last, (4, [f"parallel.{axes[0]}=2", *inner, f"parallel.{axes[-1]}=2"])]


# and says so; it has a test of its own, as have the parameter server's asynchronous mode and the pipeline's pipedream
NOT_EQUAL = ["local-sgd", "diloco", "gossip"]
FOR_EXPERTS = ["expert"]  # takes models of experts alone (tests/parallel/test_expert.py)
CASES = [
    (strategy, *layout)
    for strategy in options("parallel")
    if strategy not in ("single", *NOT_EQUAL)
    for layout in layouts(strategy)
]
# combinations of degrees that have no name
COMBINED = [("pipeline", 4, ["parallel.pipeline=2", "parallel.context=2"]), ("tensor", 4, ["parallel.tensor=2", "parallel.context=2"]),
            ("ddp", 4, ["parallel.replicate=2", "parallel.tensor=2"]), ("hsdp", 8, ["parallel.replicate=2", "parallel.tensor=2"]),
            ("fsdp", 4, ["parallel.shard=2", "parallel.expert=2"]), ("hsdp", 8, ["parallel.replicate=2", "parallel.expert=2"]),
            ("hsdp", 8, ["parallel.replicate=2", "parallel.context=2"]), ("ddp+pp", 8, ["parallel.pipeline=2", "parallel.tensor=2"]),
            ("zero", 4, ["parallel.replicate=2", "parallel.context=2"])]  # fmt: skip
VARIANTS = [("ddp", 2, ["trainer.activation_checkpointing=true", "parallel.static_graph=true"]),
          ("ddp", 2, ["parallel.gradient_as_bucket_view=false", "parallel.bucket_cap_mb=1"]),
          ("ddp", 2, ["parallel.find_unused_parameters=true"]),
          ("fsdp", 2, ["trainer.activation_checkpointing=true", "parallel.reshard_after_forward=false"]),
          ("fsdp", 2, ["parallel.cpu_offload=true"]),
          ("context", 2, ["parallel.attention=ring"]),
          ("context", 4, ["parallel.context=2", "parallel.attention=ring"]),
          ("fsdp+context", 4, ["parallel.context=2", "parallel.attention=ring", "trainer.activation_checkpointing=true"]),
          *(("pipeline", 2, [f"parallel.schedule={name}"]) for name in ("gpipe", "interleaved", "zero-bubble", "zbv")),
          ("pp+fsdp+tp", 4, ["parallel.pipeline=2", "parallel.shard=1", "parallel.tensor=2"]),
          ("pp+fsdp+tp", 8, ["parallel.pipeline=2", "parallel.shard=2", "parallel.tensor=2"]),
          ("pp+fsdp+tp", 2, ["parallel.pipeline=2", "parallel.tensor=1", "parallel.reshard_after_forward=true",
                             "parallel.schedule=gpipe"])]  # fmt: skip


def name(strategy: str, ranks: int, mesh: list[str]) -> str:
    return " ".join([strategy, str(ranks), *(option.partition(".")[2] for option in mesh)])


def one_process(model: str, optimizer: str) -> Ended:
    return once(*RUN, *MODELS[model], *OPTIMIZERS[optimizer])


# what cannot be, and the line that says so
REFUSED = {
    ("tensor", 3, "vit"): "parallel.tensor: 3 ... 16 features ... layers.0.attention.query",
    ("tensor", 3, "gpt, tied"): "parallel.tensor: 3 ... 16 features ... layers.0.attention.query",
    ("tensor", 3, "cnn with BatchNorm"): "parallel.tensor: 3 ... features ... CNN",
    ("tensor", 4, "cnn with BatchNorm"): "parallel.tensor: 4 ... features ... CNN",
    ("tensor", 3, "experts"): "parallel.tensor: 3 ... 16 features ... layers.0.attention.query",
}
CONTEXTS = ("context", "fsdp+context")
ANSWERS_NOT = "parallel: {} ... mixers()"
REFUSED |= {(strategy, ranks, model): ANSWERS_NOT.format(kind) for strategy in CONTEXTS for ranks in (2, 3, 4) for model, kind in [
    ("mlp", "MLP"), ("cnn with BatchNorm", "CNN"), ("vit", "ViT"), ("experts", "MoEGPT"), (RESNET18, "TorchvisionClassifier"), ("two inputs", "TwoInputs")]}  # fmt: skip
NO_EXPERTS = "parallel: {} calls no known module of stacked experts ... experts()"
REFUSED |= {("expert", ranks, model): NO_EXPERTS.format(kind) for ranks in (2, 3, 4) for model, kind in [
    ("mlp", "MLP"), ("cnn with BatchNorm", "CNN"), ("vit", "ViT"), ("gpt, tied", "GPT"), (RESNET18, "TorchvisionClassifier"),
    ("two inputs", "TwoInputs")]}  # fmt: skip
NO_CHAIN = "parallel: {} ... chain()"
REFUSED |= {("pipeline", ranks, model): NO_CHAIN.format(kind) for ranks in (2, 3, 4) for model, kind in [
    ("two inputs", "TwoInputs")]}  # fmt: skip
REFUSED |= {(strategy, *key[1:]): line for key, line in REFUSED.items() if key[0] == "pipeline"
            for strategy in ("ddp+pp", "pp+fsdp+tp")}  # fmt: skip
REFUSED |= {
    ("fsdp+tp", 3, model): REFUSED["tensor", 3, model] for model in ("vit", "gpt, tied", "experts", "cnn with BatchNorm")
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("strategy", "ranks", "model"), [*{key[0]: key for key in REFUSED}.values()])  # once for each strategy
def test_what_a_strategy_cannot_do_is_refused_before_the_start(strategy: str, ranks: int, model: str) -> None:
    mesh = next(mesh for name, count, mesh in CASES if (name, count) == (strategy, ranks))
    said = refused(*RUN, *MODELS[model], f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}")
    assert said == Says(REFUSED[strategy, ranks, model])
    assert re.search("ddp, zero, fsdp (or|and) hsdp,? (which )?take (any|most)", said)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "context"])
def test_dropout_is_refused_where_it_would_depend_on_the_ranks(strategy: str) -> None:
    mesh = next(mesh for name, count, mesh in CASES if (name, count) == (strategy, 2))
    line = [
        *RUN, *MODELS["gpt, tied"], "model.num_layers=1", "model.dropout=0.1", f"parallel={strategy}", *mesh,
        "launch.nproc_per_node=2",
    ]  # fmt: skip
    assert "parallel: 2 processes compute different results with this model than one process" in refused(*line, "rehearse=true")


DROPOUT = [("pipeline", 2), ("ddp", 3), ("fsdp", 2), ("ddp+pp", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), DROPOUT)
def test_dropout_draws_the_same_wherever_its_layer_lies(strategy: str, ranks: int, tmp_path: Path) -> None:
    """In embeddings, in residual branches, and inside of attention, where it is a function and no layer."""
    mesh = next(mesh for name, count, mesh in CASES if (name, count) == (strategy, ranks))
    line = [*RUN, *MODELS["gpt, tied"], "model.dropout=0.1", f"parallel={strategy}", *mesh]
    run = finished(*line, f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert_close(run, once(*RUN, *MODELS["gpt, tied"], "model.dropout=0.1"))


# ResNet-18 has eleven million parameters in float64; what more ranks do to uneven shares, two models show
AT_MOST_TWO_RANKS = [RESNET18, "vit", "two inputs", "mlp"]
CROSSED = [(*case, model) for case in CASES for model in MODELS
           if (case[0], case[1], model) not in REFUSED and (model not in AT_MOST_TWO_RANKS or case[1] <= 2)
           and (model != RESNET18 or case[0] in ("ddp", "fsdp", "pipeline"))]  # fmt: skip
CROSSED += [(*variant, model) for variant in VARIANTS for model in ("cnn with BatchNorm", "gpt, tied")
            if model == "gpt, tied" or not ("parallel.tensor=2" in variant[2] or "context" in variant[0])]  # fmt: skip
CROSSED += [(*layout, "experts" if any("expert" in option for option in layout[2]) else "gpt, tied") for layout in COMBINED]


# the whole, and the variants of a strategy, are for `-m slow`
QUICK = {1: ["gpt, tied"], 2: ["gpt, tied"]}  # models by the number of ranks


def crossed() -> Iterator[Any]:
    for strategy, ranks, mesh, model in CROSSED:
        for optimizer in OPTIMIZERS if ranks <= 2 and model == "cnn with BatchNorm" else ["adamw"]:
            is_plain = (strategy, ranks, mesh) in CASES and optimizer == "adamw"
            is_extra = strategy in ("ddp", "fsdp") and ranks in (2, 3) and model == "cnn with BatchNorm"
            is_one_of_many = strategy in (
                "hsdp",
                "fsdp+tp",
                "fsdp+context",
                "pp+fsdp+tp",
                "ddp+pp",
                "auto",
                "ddp+mp",
            )  # made of the others
            is_quick = is_plain and not is_one_of_many and (model in QUICK.get(ranks, []) or is_extra)
            marks = [] if is_quick else [pytest.mark.slow]
            case = f"{name(strategy, ranks, mesh)}-{model}-{optimizer}"
            yield pytest.param(strategy, ranks, mesh, model, optimizer, id=case, marks=marks)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("strategy", "ranks", "mesh", "model", "optimizer"), [*crossed()])
def test_ranks_compute_what_one_process_does(
    strategy: str, ranks: int, mesh: list[str], model: str, optimizer: str, tmp_path: Path
) -> None:
    line = [*RUN, *MODELS[model], *OPTIMIZERS[optimizer], f"parallel={strategy}", *mesh]
    run = finished(*line, f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert_close(run, one_process(model, optimizer))


# a batch of 2 among 3 ranks: one of them has nothing to do in any step
WHOLE = [*SMALL, "dataset.num_classes=12", "precision=fp64", "model=cnn", "model.channels=[4,8,8]", "global_batch_size=2", "trainer.max_epochs=null",
         "trainer.max_steps=20", "trainer.log_every=1", "optimizer=sgd", "optimizer.lr=0.01"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"),
    [
        pytest.param(*case, id=name(*case), marks=[] if case[0] in ("ddp", "fsdp", "pipeline") else [pytest.mark.slow])
        for case in CASES
        if case[1] == 3 and case[0] not in (*CONTEXTS, *FOR_EXPERTS)  # a CNN has no tokens
    ],
)
def test_without_a_micro_batch_size_models_without_batch_statistics_still_agree(
    strategy: str, ranks: int, mesh: list[str], tmp_path: Path
) -> None:
    line = [*WHOLE, f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}"]
    run = finished(*line, root=tmp_path / "runs")
    assert_close(run, once(*WHOLE))
    assert "depend on the number of processes" not in run.output


@pytest.mark.slow
def test_a_model_with_batch_statistics_is_told_to_set_micro_batch_size(tmp_path: Path) -> None:
    line = [*WHOLE, "model.norm=batch", "model.dropout=0.5", "parallel=ddp", "launch.nproc_per_node=2"]
    run = finished(*line, "global_batch_size=8", "rehearse=true", root=tmp_path / "runs")
    assert run.output.count("so the results depend on the number of processes (set micro_batch_size") == 1, run.output
