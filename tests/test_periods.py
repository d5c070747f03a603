"""What is due by epochs, samples or minutes: when it is due, and that it changes no other row."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.config.frozen_file import recall
from framework.training.plan import Alarms
from tests.harness import Says, assert_same_bits, command, exact_rows, finished, once, refused
from tests.test_conformance import MODELS, RUN
from tests.test_resume import after_step, crash

LINE = [*RUN, *MODELS["mlp"], "trainer.log_every=1", "trainer.max_steps=null", "trainer.max_epochs=3", "drop_last=false"]


def steps(line: list[str], split: str) -> list[int]:
    return [row["step"] for row in once(*line).rows if row["split"] == split]


@pytest.mark.slow
def test_an_evaluation_is_due_by_epochs_and_samples_as_by_their_steps_also_after_a_kill(tmp_path: Path) -> None:
    plain = [*LINE, "trainer.eval_every=null", "checkpoint.every=null"]
    last = steps(plain, "train")[-1]
    epoch = last // 3
    by_epochs = [*LINE, "trainer.eval_every=1ep", "checkpoint.every=0.5ep"]
    assert steps(by_epochs, "val") == [epoch, 2 * epoch, last]
    of_training = [[row for row in exact_rows(once(*line)) if row["split"] == "train"] for line in (plain, by_epochs)]
    assert of_training[0] == of_training[1]
    assert command(*by_epochs, root=tmp_path / "runs", before=after_step(epoch + 1, crash)).code != 0
    assert_same_bits(finished(*by_epochs, root=tmp_path / "runs"), once(*by_epochs))
    size = int(next(word.partition("=")[2] for word in reversed(LINE) if word.startswith("global_batch_size=")))
    assert steps([*LINE, f"trainer.eval_every={2 * size}samples"], "val")[0] == 2


@pytest.mark.slow
def test_by_time_all_ranks_evaluate_after_the_same_steps_and_the_training_rows_are_the_same(tmp_path: Path) -> None:
    plain = [*LINE, "trainer.eval_every=null", "checkpoint.every=null"]
    ended = finished(*LINE, "trainer.eval_every=0.001s", "checkpoint.every=0.001s", "parallel=ddp", "launch.nproc_per_node=2",
                     root=tmp_path / "runs")  # fmt: skip
    evaluated = [row["step"] for row in ended.rows if row["split"] == "val"]
    assert len(evaluated) > 2 and evaluated == sorted(set(evaluated))
    mine, theirs = ([row["loss"] for row in rows if row["split"] == "train"] for rows in (ended.rows, once(*plain).rows))
    assert mine == pytest.approx(theirs, rel=1e-12)


def test_an_alarm_rings_once_although_its_flag_was_sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    agreement, saver = SimpleNamespace(any_flags=lambda *flags, now: list(flags)), SimpleNamespace(has_failed=False)
    ranks: list[Any] = [SimpleNamespace(rank=rank, agreement=agreement) for rank in (0, 1)]
    alarms, others = (Alarms("1min", 100, world=rank, saver=saver) for rank in ranks)  # type: ignore[arg-type]
    assert alarms.ask(now=True) == others.ask(now=True) == [False] * 3
    now[0] = 61.0
    assert alarms.ask(now=True)[1:] == [True, False] and others.ask(now=True)[1:] == [False, False]
    for one in (alarms, others):
        assert [one.heard([True, False], step=step)[0] for step in (7, 8, 20)] == [True, False, True]
    assert alarms.ask(now=True)[1:] == [False, False]


def test_a_warm_up_in_epochs_is_one_in_their_steps() -> None:
    epoch = steps([*LINE, "trainer.eval_every=null", "checkpoint.every=null"], "train")[-1] // 3
    in_epochs, in_steps = ([*LINE, f"scheduler.warmup_steps={words}"] for words in ("1ep", str(epoch)))
    rates = [[row["lr"] for row in once(*line).rows if row["split"] == "train"] for line in (in_epochs, in_steps)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("period", ["0ep", "1e", "-1ep", "1.5", "0"])
def test_what_is_no_period_is_refused(period: str) -> None:
    assert refused(*LINE, f"trainer.eval_every={period}") == Says(f"trainer.eval_every: ...{' (' if period != '0' else ''}")


@pytest.mark.slow
def test_tokens_and_samples_are_counted_as_steps_of_them() -> None:
    line = [*RUN, *MODELS["gpt, tied"], "trainer.log_every=1", "trainer.max_epochs=null", "trainer.max_steps=9"]
    found = once(*line)
    config = recall(found.directory)
    samples = 3 * config["global_batch_size"]
    tokens = samples * config["dataset"]["seq_len"]
    by_tokens = [*line, f"trainer.eval_every={tokens}tokens", f"scheduler.warmup_steps={tokens}tokens"]
    by_samples = [*line, f"trainer.eval_every={samples}samples", f"scheduler.warmup_steps={samples}samples"]
    in_steps = [*line, "scheduler.warmup_steps=3"]
    assert exact_rows(once(*by_tokens)) == exact_rows(once(*by_samples))
    assert steps(by_tokens, "val")[0] == 3
    rates = [[row["lr"] for row in once(*words).rows if row["split"] == "train"] for words in (by_tokens, in_steps)]
    assert rates[0] == rates[1]
    refusal = command(*LINE, "trainer.eval_every=100tokens", root=found.root / "others")
    assert refusal.code == 78 and "100tokens: counts tokens, but the dataset has no seq_len" in refusal.output
