"""trainer.profile: a trace that can be read, and a run that is the same with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Ended, assert_same_bits, command, finished, once
from tests.test_conformance import SMALL
from tests.test_resume import after_step, preempt, preempted

LINE = [*SMALL, "model=cnn", "model.channels=[4,8,8]", "global_batch_size=14", "micro_batch_size=7", "trainer.max_epochs=null",
        "trainer.max_steps=9", "trainer.log_every=1", "trainer.eval_every=null", "checkpoint.every=null"]  # fmt: skip
PROFILE = "trainer.profile=true"


def traces(ended: Ended) -> list[str]:
    return sorted(path.name for path in ended.directory.glob("profile/*"))


def operations(ended: Ended, name: str) -> list[str]:
    events: list[dict[str, Any]] = json.loads((ended.directory / "profile" / name).read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "cpu_op"]


def test_the_trace_of_three_steps_has_the_models_operations_of_which_five_are_said(tmp_path: Path) -> None:
    run = finished(*LINE, PROFILE, root=tmp_path / "runs")
    assert traces(run) == ["step_00000004_rank_0.json"]
    names = operations(run, "step_00000004_rank_0.json")
    assert {"aten::conv2d", "aten::linear", "aten::convolution_backward", "aten::_fused_adamw_"} <= set(names)
    assert names.count("aten::linear") == 3 * 2  # steps of two micro-batches; the fifth step, which ends the epoch, has two too
    assert run.directory.name == once(*LINE).directory.name  # it is the same run
    assert_same_bits(run, once(*LINE))
    lines = run.output.splitlines()
    (at,) = [number for number, line in enumerate(lines) if "the 5 most expensive operations" in line]
    told = [line.split() for line in lines[at + 1 : at + 6]]
    assert all(words[1] == "ms" and words[2].endswith("%") for words in told)
    times = [float(words[0]) for words in told]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    assert any("aten::" in line for line in lines[at + 1 : at + 6]) and "%" not in lines[at + 6]
    assert "USDT" not in "".join(lines)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("value", "ranks"), [("true", [0]), ("all", [0, 1])])
def test_rank_0_records_or_all_do(value: str, ranks: list[int], tmp_path: Path) -> None:
    parallel = ["parallel=ddp", "launch.nproc_per_node=2"]
    run = finished(*LINE, *parallel, f"trainer.profile={value}", root=tmp_path / "runs")
    assert traces(run) == [f"step_00000004_rank_{rank}.json" for rank in ranks]
    assert all("aten::conv2d" in operations(run, name) for name in traces(run))
    assert run.output.count("the 5 most expensive operations") == 1


@pytest.mark.slow
def test_a_run_that_is_continued_is_recorded_again(tmp_path: Path) -> None:
    stopped = preempted(*LINE, PROFILE, at=3, root=tmp_path / "runs")
    assert traces(stopped) == []
    assert "trainer.profile: nothing is recorded, because the recording starts with step 4 of the process" in stopped.output
    run = finished(*LINE, PROFILE, root=tmp_path / "runs")
    assert traces(run) == ["step_00000007_rank_0.json"]
    assert_same_bits(run, once(*LINE))


@pytest.mark.slow
def test_a_run_that_ends_while_it_is_recorded_writes_what_there_is(tmp_path: Path) -> None:
    run = finished(*LINE, PROFILE, "trainer.max_steps=5", root=tmp_path / "runs")
    assert operations(run, "step_00000004_rank_0.json").count("aten::_fused_adamw_") == 2 * 2  # two steps, two groups


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    stopped = command(*LINE, root=tmp_path / "runs", before=after_step(1, preempt))
    (stopped.directory / "profile").write_text("in the way")
    run = finished(*LINE, PROFILE, root=tmp_path / "runs")
    assert run.output.count("could not be written") == 1
