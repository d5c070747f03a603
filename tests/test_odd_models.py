"""Strategies promise to take any model. These are what people have, and no row of blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.distributed import groups
from tests.harness import assert_close, command, finished, once, refused
from tests.parallel.test_model_parallel import on_emulated
from tests.test_conformance import CASES, CONTEXTS, FOR_EXPERTS, RUN, SMALL, name

MODELS = ["OneBlock", "OwnParameters", "Woven", "Chained", "Unused", "Scalar"]
LINE = [*RUN, *SMALL, "optimizer=adamw", "optimizer.lr=0.01", "trainer.ema_decay=0.8", "trainer.eval_every=3", "model.dim=12"]

PAIRS = [case for case in CASES if case[1] <= 2]
TAKES_NONE = {  # what a strategy asks and a model does not have
    **dict.fromkeys(CONTEXTS, "does not have mixers()"),
    **dict.fromkeys(("pipeline", "ddp+pp", "pp+fsdp+tp"), "does not have chain()"),
    **dict.fromkeys(FOR_EXPERTS, "calls no known module of stacked experts"),
}


def odd(model: str) -> list[str]:
    return [*LINE, f"model._target_=tests.odd_models.{model}"]


def refusal(strategy: str, model: str) -> str | None:
    if strategy in ("pipeline", "ddp+pp", "pp+fsdp+tp") and model in ("OneBlock", "OwnParameters", "Unused", "Scalar"):
        return f"parallel: pipeline: 2 stages, but {model} has 1 block; take fewer"  # which its forward enters three times
    if strategy in (*CONTEXTS, *FOR_EXPERTS) or model != "Chained":
        asked = TAKES_NONE.get(strategy)
        if asked is not None:
            return f"parallel: {model} {asked}"
    if model == "Unused" and strategy in ("ddp", "zero", "ddp+mp", "auto"):
        return "false, but the model's forward does not use spare.weight, spare.bias in every step (parallel.find_unused_parameters"
    return None


REFUSED = [("OneBlock", "pipeline"), ("Scalar", "fsdp"), ("Unused", "ddp")]


def cases() -> Iterator[Any]:
    for first, model in enumerate(MODELS):
        for second, case in enumerate(PAIRS):
            quick = {"Chained": ("fsdp", "tensor", "pipeline"), "OwnParameters": ("fsdp",)}.get(model, ())
            is_quick = case[1] == 2 and case[0] in quick or (model, case[0]) in REFUSED
            if is_quick or (first + second) % 3 == 0:
                yield pytest.param(model, case, id=f"{model}-{name(*case)}", marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "case"), [*cases()])
def test_it_computes_what_one_process_does_or_is_refused(model: str, case: tuple[str, int, list[str]], tmp_path: Path) -> None:
    strategy, ranks, mesh = case
    line = [*odd(model), f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}"]
    expected = refusal(strategy, model)
    if expected is None:
        assert_close(finished(*line, root=tmp_path / "runs"), once(*odd(model)))
        return
    assert expected in refused(
        *line, f"rehearse={str('does not use' in expected).lower()}"
    )  # the rehearsal's first step shows it
    if model == "Unused" and "find_unused" in expected:
        line.append("parallel.find_unused_parameters=true")
        assert_close(finished(*line, root=tmp_path / "used"), once(*odd(model)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv"])
def test_a_weight_that_stages_share_takes_no_buffers_with_it(schedule: str, tmp_path: Path) -> None:
    line = [*odd("Chained"), "parallel=pipeline", f"parallel.schedule={schedule}", "launch.nproc_per_node=2"]
    assert_close(finished(*line, root=tmp_path / "runs"), once(*odd("Chained")))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("on", "code"), [("null", 78), ("0", 1), ("1", 1)])
def test_a_gradient_of_an_earlier_micro_batch_is_not_taken_for_a_sum(on: str, code: int, tmp_path: Path) -> None:
    """If only one rank finds that its gradients are not summed, the other does not wait for it until the time-out."""
    line = [*odd("Fickle"), f"+model.on={on}", "global_batch_size=16", "micro_batch_size=4"]
    ddp = ["parallel=ddp", "launch.nproc_per_node=2", "launch.max_restarts=0", "rehearse=false"]

    def hasten() -> None:
        groups._TO_END_S = 1.0

    ended = command(*line, *ddp, root=tmp_path / "runs", before=hasten)
    assert ended.code == code, ended.output
    assert "find_unused_parameters: false, but the model's forward does not use every parameter" in ended.output
    assert on == "null" or f"rank {on} failed" in ended.output


@pytest.mark.slow
def test_the_code_of_stages_and_losses_makes_its_own_tensors(tmp_path: Path) -> None:
    line = [*odd("Making"), "task._target_=tests.odd_models.MakingLoss", "task.label_smoothing=0"]
    run = finished(*line, "parallel=pipeline", "launch.nproc_per_node=2", root=tmp_path / "runs")
    assert_close(run, once(*line))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["OneBlock", "Woven", "Chained"])
def test_its_layers_may_lie_on_two_devices(model: str, tmp_path: Path) -> None:
    before = on_emulated(2)
    run = finished(*odd(model), "parallel=model-parallel", root=tmp_path / "runs", before=before)
    assert_close(run, once(*odd(model)))
