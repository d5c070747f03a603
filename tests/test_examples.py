"""The worked projects of examples/: each a folder of a user's own, on 1, 2 and 3 processes, killed, and as its README says."""

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Ended, assert_close, assert_same_bits, typed
from tests.pages import ROOT
from tests.test_resume import after_step, crash, preempt

# What makes each so small that all of this is quick; in float64, so that sums in another order agree to the last digits.
SMALL = ["precision=fp64", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.log_every=1", "trainer.eval_every=2",
         "checkpoint.every=2", "global_batch_size=12", "micro_batch_size=3", "rehearse=false"]  # fmt: skip
EXAMPLES: dict[str, list[str]] = {
    "gan": [], "simclr": [], "distillation": [], "self_distillation": [], "policy_gradient": ["task.longest=6"],
    "segmentation": [], "lora_gpt2": [], "streamed_lm": [], "remote_embedding": ["trainer.limit_batches=2"],
    "lightning_module": ["task.module.width=8"], "carried_state": ["model.dim=8"],
}  # fmt: skip
PROCESSES = {
    "one": [],
    "ddp 2": ["parallel=ddp", "launch.nproc_per_node=2"],
    "ddp 3": ["parallel=ddp", "launch.nproc_per_node=3"],
    "fsdp 2": ["parallel=fsdp", "launch.nproc_per_node=2"],
}
TOLERANCE = 1e-8


def ran(name: str, *line: str, folder: Path, before: Callable[[], None] | None = None) -> Ended:
    """Run an example in a copy of its folder, as its user would."""
    if not folder.exists():
        shutil.copytree(ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    return typed(f"experiment={name}", *SMALL, *EXAMPLES[name], *line, directory=folder, before=before)


def whole(name: str, how: str, folder: Path) -> Ended:
    ended = ran(name, *PROCESSES[how], folder=folder)
    assert ended.code == 0, ended.output
    return ended


CELLS = [(name, how) for name in EXAMPLES for how in ("ddp 3", "fsdp 2")]


FOLDER = tempfile.TemporaryDirectory(prefix="steadfast_examples_")


@functools.cache
def alone(name: str) -> Ended:
    return whole(name, "one", Path(FOLDER.name, name))


def test_each_folder_is_tried() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()} == {"project", *EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), sorted(CELLS, key=lambda cell: cell != ("policy_gradient", "ddp 3")))
def test_its_rows_are_the_same_on_any_number_of_processes(name: str, how: str, tmp_path: Path) -> None:
    assert_close(whole(name, how, tmp_path / name), alone(name), tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"), [*[*zip(EXAMPLES, itertools.cycle(["ddp 2", "fsdp 2"]))][::3], ("remote_embedding", "one")]
)
def test_killed_it_ends_with_the_same_bits(name: str, how: str, tmp_path: Path) -> None:
    expected = whole(name, how, tmp_path / "whole" / name)
    killed = ran(name, *PROCESSES[how], folder=tmp_path / "cut" / name, before=after_step(3, crash))
    assert killed.code < 0, killed.output
    assert_same_bits(whole(name, how, tmp_path / "cut" / name), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_learns_what_its_readme_says(name: str, tmp_path: Path) -> None:
    """The first command of the README, rehearsal and all; its last line says what a number of the run is below or above."""
    folder = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    text = (folder / "README.md").read_text()
    first, *_ = [line.partition("  #")[0].split() for line in text.splitlines() if line.startswith("steadfast ")]
    ended = typed(*first[1:], directory=folder, timeout_s=500)
    assert ended.code == 0, ended.output
    promise = next(line for line in text.splitlines() if line.startswith("Expected: "))
    split, metric, relation, number = promise.removeprefix("Expected: ").strip("`.").split()
    value = json.loads((ended.directory / "summary.json").read_text())["metrics"][split]["last"][metric]
    assert value < float(number) if relation == "<" else value > float(number), (promise, value)


# --- the remote embedding: a strategy of its own, whose processes differ

REMOTE = "remote_embedding"
PLAIN = ["parallel=single", "launch.nproc_per_node=1"]


@pytest.mark.slow
def test_a_table_in_another_process_is_trained_as_in_the_same(tmp_path: Path) -> None:
    """Uneven shares, the norm clipped over both parts; on three processes, one of the four micro-batches is a rank's second."""
    clip = "trainer.clip_grad_norm=0.05"
    one = ran(REMOTE, *PLAIN, clip, folder=tmp_path / "one" / REMOTE)
    remote = ran(REMOTE, "launch.nproc_per_node=3", clip, folder=tmp_path / "remote" / REMOTE)
    assert remote.code == one.code == 0, remote.output
    assert_close(remote, one, tolerance=TOLERANCE)


@pytest.mark.slow
def test_a_run_with_a_table_in_another_process_goes_on_without_rpc(tmp_path: Path) -> None:
    stopped = ran(REMOTE, folder=tmp_path / "stopped" / REMOTE, before=after_step(2, preempt))
    assert stopped.code == 75, stopped.output
    elsewhere = ran(REMOTE, *PLAIN, f"run.resume={stopped.directory}", folder=tmp_path / "other" / REMOTE)
    assert elsewhere.code == 0, elsewhere.output
    assert_close(elsewhere, ran(REMOTE, *PLAIN, folder=tmp_path / "one" / REMOTE), tolerance=TOLERANCE)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused = ran(REMOTE, "parallel.table=tabel", folder=tmp_path / REMOTE)
    assert refused.code == 78 and "parallel.table: tabel" in refused.output and "embedding, dense" in refused.output
    averaged = ran(REMOTE, "trainer.ema_decay=0.9", folder=tmp_path / REMOTE)
    assert averaged.code == 78 and "averaged" in averaged.output
