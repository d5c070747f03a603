"""Parts of the loop: under every strategy what one process computes, resumed to the same bits, or refused before the start."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from framework.checkpoint.manifest import step_of
from framework.data.order import Order
from framework.engine.seam import Step
from framework.parts.batch_warmup import BatchWarmup
from framework.parts.swa import SWA
from framework.training.parts import LoopParts
from tests.harness import Says, assert_close, assert_same_bits, command, exact_rows, finished, model_of, once, refused
from tests.test_conformance import MODELS, RUN
from tests.test_resume import after_step, assert_survives_a_kill, crash, preempt


def own(*kinds: str) -> list[str]:
    """Return the line that gives a run these parts of tests/own_parts.py."""
    return [f"+part.{kind.lower()}._target_=tests.own_parts.{kind}" for kind in kinds]


OURS = ["part=[swa,unfreeze,gradient_norms,activations,length_warmup,batch_warmup]", "part.swa.start=0.5", "part.swa.every=2",
        "part.unfreeze.groups=[[layers.1.*],[layers.0.*]]", "part.unfreeze.every=2", "part.activations.modules=[layers.*]",
        "part.gradient_norms.depth=2", "part.length_warmup.start=4", "part.length_warmup.steps=3",
        "part.length_warmup.multiple_of=2", "part.batch_warmup.start=5", "part.batch_warmup.samples=20"]  # fmt: skip
OWN = own("Lookahead", "Loss", "Prune", "Grows", "Copies")
GPT = [*RUN, *MODELS["gpt, tied"], "trainer.log_every=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "parts"), [("ddp", OURS), ("fsdp", OWN), ("pipeline", OWN)], ids=["ours", "own", "own, in stages"]
)
def test_killed_it_ends_with_the_same_bits(strategy: str, parts: list[str], tmp_path: Path) -> None:
    line = [*GPT, *parts, f"parallel={strategy}", "launch.nproc_per_node=2", "checkpoint.every=2"]
    assert_survives_a_kill(*line, at=5, root=tmp_path)


def test_a_state_that_is_copied_at_each_call_is_kept(tmp_path: Path) -> None:
    line = [*RUN, *MODELS["mlp"], *own("Copies"), "checkpoint.every=2", "trainer.max_steps=8"]
    assert_survives_a_kill(*line, at=5, root=tmp_path)
    finished(*line, "rehearse=true", root=tmp_path / "rehearsed")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp"), ("fsdp", "pipeline")])
def test_it_goes_on_under_another_strategy(first: str, second: str, tmp_path: Path) -> None:
    line = [*GPT, *OWN, "launch.nproc_per_node=2", "checkpoint.every=2"]
    before = command(*line, f"parallel={first}", root=tmp_path / "first", before=after_step(4, crash))
    again = finished(*line, f"parallel={second}", f"run.resume={before.directory}", root=tmp_path / "second")
    assert_close(again, once(*GPT, *OWN))


def test_the_moments_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "moments"
    monkeypatch.setenv("MOMENTS", str(log))
    line = [*RUN, *MODELS["cnn with BatchNorm"], *own("Moments"), "trainer.max_steps=2", "trainer.log_every=2",
            "trainer.eval_every=null", "checkpoint.every=null", "micro_batch_size=7"]  # fmt: skip
    finished(*line, root=tmp_path / "runs")
    first, second = (["batch 7"] * 2, ["batch 7"] * 2)
    assert log.read_text().splitlines() == [
        "0 begun",
        "0 step_begun False", *(f"0 {item}" for item in first), "0 gradients_ready True", "1 step_taken",
        "1 step_begun True", *(f"1 {item}" for item in second), "1 gradients_ready True", "2 step_taken", "2 row",
        "2 evaluated val 2 False", "2 evaluated test 2 False", "2 saving", "2 ended",
    ]  # fmt: skip


# --- what they do


@pytest.mark.slow
def test_stochastic_weight_averaging_is_the_mean_of_the_weights(tmp_path: Path) -> None:
    swa = SWA(start=0.5, every=2)
    values, mean = [1.0, 5.0, 2.0, 8.0, 4.0, 3.0, 7.0, 6.0], 0.0
    for step, value in enumerate(values):
        mean += swa.average_share(step, total_steps=len(values)) * (value - mean)
    assert mean == pytest.approx((values[3] + values[5] + values[7]) / 3)
    line = [*GPT, "part=swa", "part.swa.start=0", "checkpoint.every=1", "checkpoint.keep_last=99"]
    ended = finished(*line, root=tmp_path / "runs")
    first, weights = model_of(ended).double().state_dict(), dict[str, list[Any]]()
    for folder in sorted((ended.directory / "checkpoints").iterdir()):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    if key.startswith("model/"):
                        weights.setdefault(key.removeprefix("model/"), []).append(tensors.get_tensor(key))
    with safe_open(ended.directory / "model.safetensors", framework="pt") as final:
        for key, steps in weights.items():
            start = first[key]
            expected = (start + sum(steps)) / (1 + len(steps))
            assert (final.get_tensor(key) - expected).abs().max() < 1e-12, key


def test_batches_grow_and_the_epochs_have_every_sample_once() -> None:
    warmup = BatchWarmup(start=2, samples=30, multiple_of=2)
    order = Order(num_samples=50, global_batch_size=8, seed=0, drop_last=False,
                  grow=lambda seen: warmup.batch_size(seen, global_batch_size=8))  # fmt: skip
    sizes, seen = [], 0
    samples: list[int] = []
    for _ in range(order.steps_in(2)):
        sizes.append(order.size(seen))
        samples += order.batch(seen)[1].tolist()
        seen += sizes[-1]
    assert seen == 100 and sorted(samples[:50]) == sorted(samples[50:]) == list(range(50))
    assert sizes[:6] == [2, 2, 2, 2, 2, 4] and max(sizes) == 8


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_ends_a_run_at_the_same_step_on_any_number_of_processes(ranks: int, tmp_path: Path) -> None:
    line = [
        *RUN, *MODELS["gpt, tied"], *own("Stopper"), "trainer.eval_every=2", "parallel=ddp", f"launch.nproc_per_node={ranks}",
    ]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    assert ended.summary["step"] == 2 and "it is good enough" in ended.output, ended.output
    evaluated = [row for row in ended.rows if row["split"] != "train"]
    assert [(row["split"], row["double_loss"] / row["loss"]) for row in evaluated] == [("val", 2), ("test", 2)]


def test_texts_may_have_a_tokenizer_of_their_own(tmp_path: Path) -> None:
    line = [*GPT, "part=text_samples", "part.text_samples.tokenizer={_target_: tests.own_parts.Letters}",
            "part.text_samples.prompt=abc",
            "part.text_samples.tokens=5", "part.text_samples.count=1", "trainer.eval_every=1", "trainer.max_steps=1"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    text = (ended.directory / "samples" / "1.txt").read_text().strip()
    assert text.startswith("abc") and len(text) == 8


def test_details_are_in_the_rows_and_not_on_the_terminal(tmp_path: Path) -> None:
    line = [*GPT, "part=[gradient_norms,activations]", "part.activations.modules=[layers.0]", "trainer.clip_grad_norm=1e-3"]
    ended = finished(*line, root=tmp_path / "runs")
    row = next(row for row in exact_rows(ended) if row["split"] == "train")
    norms = [value for key, value in row.items() if key.startswith("grad_norm:")]
    assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(row["grad_norm"], rel=1e-12)
    assert row["activation_rms:layers.0"] > 0 and "grad_norm:" not in ended.output


# --- what is refused before the start

REFUSED = {
    "Nothing": "part.nothing: a Nothing has no method that the loop calls (one of begun, ...",
    "Forgets": "part.forgets: restored from a checkpoint, ... takes a different step ... count changes ... (return it from state_dict(), ...",
    "Unstorable": "part.unstorable.when: is a value of type object, which no checkpoint can hold ...",
    "FailsLate": "part.failslate: it fails in a rehearsal: KeyError: 'late' ...",
    "OfRank": "part.ofrank: 2 processes compute different results with this model than one process: ... loop.sum() ...",
    "TakenColumn": "part.takencolumn: its column loss has the name of another column (use a new name; ...",
    "WholeMask": "part.wholemask: it fails in a rehearsal: RuntimeError: ... DTensor ...",
    "Judges": "part.judges: restored from a checkpoint, after an evaluation ... (return it from ...",
    "StateOfRank": "part.stateofrank.norm: differs between the processes ...",
    # what only the run can show
    "OnOneRankLate": "part.ononeranklate: ... without it, they compute the same (act alike ...",
    "EveryFifthOnShards": "part.everyfifthonshards: ... without it, they compute the same (act alike ...",
}


@pytest.mark.slow
@pytest.mark.parametrize("part", REFUSED)
def test_what_breaks_the_promise_is_refused_before_the_start(part: str) -> None:
    strategy = "ddp" if part == "OnOneRankLate" else "fsdp"
    line = [*RUN, *MODELS["gpt, tied"], *own(part), "rehearse=true", f"parallel={strategy}", "launch.nproc_per_node=2"]
    assert refused(*line).splitlines()[-1] == Says(REFUSED[part])


# --- steps after which the run cannot be saved

PHASES = [*RUN, *MODELS["mlp"], *own("Phases"), "trainer.max_steps=15", "checkpoint.every=3", "checkpoint.keep_last=9"]


@pytest.mark.slow
def test_a_checkpoint_and_a_stop_wait_for_a_step_after_which_the_run_can_be_saved(tmp_path: Path) -> None:
    whole = finished(*PHASES, root=tmp_path / "whole")
    assert [step_of(path) for path in sorted((whole.directory / "checkpoints").iterdir())] == [4, 8, 12, 15]
    stopped = command(*PHASES, root=tmp_path / "runs", before=after_step(5, preempt))
    assert (stopped.code, stopped.summary["step"]) == (75, 8), stopped.output
    assert_same_bits(finished(*PHASES, root=tmp_path / "runs"), whole)


def test_an_early_end_waits_too(tmp_path: Path) -> None:
    patience = [
        "trainer.early_stopping.monitor=train/loss",
        "trainer.early_stopping.patience=1",
        "trainer.early_stopping.min_delta=9",
    ]
    ended = finished(*PHASES, *patience, root=tmp_path / "runs")
    assert ended.summary["step"] == 4  # the patience ends in step 2


# --- what only the run can show


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rehearse"), [("fsdp", "false"), ("ddp", "false"), ("fsdp", "true")])  # fmt: skip
def test_new_data_of_a_weight_is_taken_or_refused_by_name(strategy: str, rehearse: str, tmp_path: Path) -> None:
    line = [*GPT, *own("Shrinks")]
    ended = command(*line, f"parallel={strategy}", "launch.nproc_per_node=2", f"rehearse={rehearse}", root=tmp_path / "runs")
    if strategy == "ddp":
        assert_close(ended, once(*line))
    else:
        assert ended.code == 78 and "part.shrinks: replaces the data of " in ended.output, ended.output
        assert "write into it: copy_" in ended.output


@pytest.mark.slow
def test_replicas_that_part_end_the_run_before_a_checkpoint(tmp_path: Path) -> None:
    line = [*RUN, *MODELS["gpt, tied"], *own("OnOneRankLate"), "rehearse=false", "checkpoint.every=2", "parallel=ddp"]
    ended = command(*line, "launch.nproc_per_node=2", root=tmp_path / "runs")
    assert ended.code == 1 and "is not the same on ranks 0 and 1" in ended.output, ended.output
    steps = [step_of(path) for path in (tmp_path / "runs").rglob("checkpoints/step_*")]
    assert steps and max(steps) == 4


class InSteps:
    def step_taken(self, loop: Any) -> None:
        pass


class InRows:
    def row(self, loop: Any) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("parts", "expected"), [([SWA()], 0), ([BatchWarmup(start=1, samples=4)], 0), ([InRows()], 1), ([InRows(), InSteps()], 4)]
)
def test_ranks_ask_each_other_for_an_end_only_if_a_part_could_have_asked_for_it(parts: list[Any], expected: int) -> None:
    """Counted: the messages in four steps, of which one has a row. A part without a moment never has the loop."""
    asked: list[bool] = []
    loop: Any = SimpleNamespace(
        engine=SimpleNamespace(parts={}), task=None, trained=dict, any=lambda flag: asked.append(flag), stopped="", step=0, seed=0,
        device=torch.device("cpu"), has_row=False, module=None,
    )  # fmt: skip
    held = LoopParts(dict(enumerate(parts)), loop)
    asked.clear()
    for number in range(4):
        held.begin_step(Step(0, 1, []), has_row=number == 3)
        held.step_taken()
        held.agree_on_end()
    assert asked == [False] * expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "acting",
    [own("StopsOnOneRank"), ["task._target_=tests.own_parts.ActingTask", "+task.act=stop on one rank"]],
    ids=["of a run", "of a task"],
)
def test_one_rank_on_which_a_part_stops_ends_the_run_on_all(acting: list[str], tmp_path: Path) -> None:
    line = [*RUN, *MODELS["cnn with BatchNorm"], *acting, "rehearse=false", "parallel=ddp", "launch.nproc_per_node=2"]
    ended = finished(*line, root=tmp_path / "runs")
    assert ended.summary["step"] == 4 and "seen enough" in ended.output, ended.output


ONLY_READS = r"row\(\) of a task's or a strategy's part only reads"


@pytest.mark.parametrize(("act", "says"), [
    ("rate in row", rf"lr_share: {ONLY_READS}"), ("stop in row", rf"stop\(\): {ONLY_READS}"),
    ("write in row", r"row\(\) writes into the weights"),
])  # fmt: skip
def test_a_part_of_a_task_that_acts_when_a_row_is_due_is_refused(act: str, says: str, tmp_path: Path) -> None:
    """The rows of a run with such a task are not part of its id: its result would depend on trainer.log_every."""
    acting = [*MODELS["cnn with BatchNorm"], "task._target_=tests.own_parts.ActingTask", f"+task.act={act}"]
    ended = command(*RUN, *acting, "trainer.log_every=2", "rehearse=false", root=tmp_path / "runs")
    assert ended.code != 0 and re.search(says, ended.output), ended.output


@pytest.mark.slow
def test_a_rate_that_follows_a_metric_falls_as_torch_lets_it_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    line = [*GPT, "part=plateau", "part.plateau.patience=0", "part.plateau.threshold=0.9", "part.plateau.min_share=1e-3",
            "trainer.eval_every=2", "checkpoint.every=3", "scheduler=constant", "scheduler.warmup_steps=0"]  # fmt: skip
    whole = once(*line)
    rows = [row for row in whole.rows if row["split"] == "train"]
    assert len(rows) >= 5 and [row["lr"] / rows[0]["lr"] for row in rows[:5]] == pytest.approx([1, 1, 1, 1, 0.1])
    assert command(*line, root=tmp_path / "runs", before=after_step(5, crash)).code != 0
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)
