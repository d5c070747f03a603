"""A run's mirror in an object store, a real S3 server: what it outlives, and that two commands never both write there."""

import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import framework.launch.mirrored
import framework.runs.mirror
from framework.checkpoint.manifest import step_of
from framework.runs.mirror import committed
from framework.runtime.objects import Objects
from tests.harness import Ended, assert_same_bits, command, finished, once, together, wait_for
from tests.s3_server import S3Server
from tests.test_resume import RUN, STRATEGIES, after_step, crash


def runs(store: str) -> set[str]:
    """The folders of the runs with checkpoints, without those of earlier starts."""
    found = {name.partition("/checkpoints/")[0] for name in Objects(store).listing() if "/checkpoints/" in name}
    return {run for run in found if ".old-" not in run}


def mirror(store: str) -> Objects:
    (run,) = runs(store)
    return Objects(f"{store}/{run}")


def steps(store: str) -> list[int | None]:
    return [step_of(Path(name)) for name in committed(mirror(store).listing())]


def wait_for_step(store: str, step: int) -> None:
    wait_for(lambda: bool(runs(store)) and step in steps(store), what=f"step {step} in {store}")


def killed(store: str, *awaited: int, root: Path, strategy: str = "single", more: Sequence[str] = ()) -> Ended:
    """Run, with these steps' checkpoints in the store before the next step, and kill everything two steps after the last."""

    def plant() -> None:
        for step in awaited:
            after_step(step + 1, partial(wait_for_step, store, step))()
        after_step(awaited[-1] + 2, crash)()

    ended = command(*RUN, *STRATEGIES[strategy], f"run.mirror={store}", *more, root=root, before=plant)
    assert ended.code == -signal.SIGKILL, ended.output
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["launch.nnodes=1:2"]], ids=["local", "elastic"])
def test_a_killed_run_whose_directory_is_lost_ends_with_the_same_bits(more: list[str], store: str, tmp_path: Path) -> None:
    strategy = "ddp 2"
    line = [*RUN, *STRATEGIES[strategy], *more, f"run.mirror={store}"]
    killed(store, 8, root=tmp_path / "runs", strategy=strategy)
    shutil.rmtree(tmp_path / "runs")
    ended = finished(*line, root=tmp_path / "runs")
    assert "fetched step_00000008 from s3://" in ended.output
    assert_same_bits(ended, once(*RUN, *STRATEGIES[strategy]))
    assert ended.directory.name == once(*RUN, *STRATEGIES[strategy]).directory.name, "run.mirror is not part of the id"
    here = sorted(path.name for path in (ended.directory / "checkpoints").iterdir())
    assert sorted(committed(mirror(store).listing())) == here

    shutil.rmtree(tmp_path / "runs")
    again = finished(*line, root=tmp_path / "runs")
    assert "finished already, at step 21" in again.output
    assert_same_bits(again, once(*RUN, *STRATEGIES[strategy]))


@pytest.mark.slow
def test_a_damaged_checkpoint_in_the_store_is_passed_over(store: str, tmp_path: Path) -> None:
    killed(store, 4, 8, root=tmp_path / "runs")
    assert steps(store) == [8, 4]
    objects = mirror(store)
    (name,) = (name for name in objects.listing() if "step_00000008" in name and name.endswith(".safetensors"))
    content = bytearray(objects.read(name) or b"")
    content[-1] ^= 1
    objects.write(name, bytes(content))
    shutil.rmtree(tmp_path / "runs")
    ended = finished(*RUN, f"run.mirror={store}", root=tmp_path / "runs")
    assert "does not match its checksum; skipping it" in ended.output and "fetched step_00000004" in ended.output
    assert_same_bits(ended, once(*RUN))

    for step in (20, 21):
        objects.write(f"checkpoints/step_000000{step}/shard-00001.safetensors", b"{}")
    objects.remove("summary.json")
    shutil.rmtree(tmp_path / "runs")
    lost = command(*RUN, f"run.mirror={store}", root=tmp_path / "runs")
    assert lost.code == 65 and lost.output.count("shard-00001.safetensors has 2 bytes instead of") >= 2, lost.output


def log_has(words: str, root: Path) -> bool:
    return any(words in path.read_text() for path in root.glob("*/*/train.log"))


@pytest.mark.slow
def test_training_goes_on_while_the_store_refuses(server: S3Server, store: str, tmp_path: Path) -> None:
    def warned() -> None:
        said = "training continues, and the upload is tried again in"
        wait_for(lambda: log_has(said, tmp_path / "runs"), what="a warning")

    def plant() -> None:
        after_step(6, together(lambda: wait_for_step(store, 4), server.refuse))()
        after_step(9, together(warned, server.accept))()

    ended = finished(*RUN, f"run.mirror={store}", root=tmp_path / "runs", before=plant)
    assert "cannot be" in ended.output
    assert_same_bits(ended, once(*RUN))
    assert steps(store) == [21, 20]


@pytest.mark.slow
def test_what_is_missing_at_the_end_is_said_and_put_by_the_same_command(server: S3Server, store: str, tmp_path: Path) -> None:
    def plant() -> None:
        framework.launch.mirrored._PATIENCE_S = 2.0
        after_step(10, together(lambda: wait_for_step(store, 8), server.refuse))()

    line = [*RUN, f"run.mirror={store}"]
    ended = command(*line, root=tmp_path / "runs", before=plant)
    assert ended.code == 74 and "lacks checkpoints/step_00000021, checkpoints/step_00000020" in ended.output, ended.output
    assert_same_bits(ended, once(*RUN))
    refused = command(*line, root=tmp_path / "runs")
    assert refused.code == 74 and "finished already" in refused.output and "run.mirror: " in refused.output, refused.output
    server.accept()
    assert steps(store)[0] == 8
    again = finished(*line, root=tmp_path / "runs")
    assert "finished already" in again.output
    assert steps(store) == [21, 20]
    shutil.rmtree(tmp_path / "runs")
    assert_same_bits(finished(*line, root=tmp_path / "runs"), once(*RUN))


@pytest.mark.parametrize("place", ["a bucket that is not there", "no key"])
def test_a_place_that_is_wrong_is_refused_before_the_start(place: str, server: S3Server, store: str, tmp_path: Path) -> None:
    if place == "no key":
        server.refuse()
    else:
        store = "s3://elsewhere/runs"
    refused = command(*RUN, f"run.mirror={store}", root=tmp_path / "runs")
    assert refused.code == 78 and f"run.mirror: {store}/default/" in refused.output, refused.output
    assert "Traceback" not in refused.output and not list((tmp_path / "runs").iterdir())


# --- two commands, one mirror


@pytest.mark.slow
def test_starting_over_leaves_the_earlier_run_aside(store: str, tmp_path: Path) -> None:
    line = [*RUN, f"run.mirror={store}"]
    killed(store, 12, root=tmp_path / "runs")
    killed(store, 4, root=tmp_path / "runs", more=["run.resume=never"])
    assert steps(store) == [4]
    aside = Objects(f"{mirror(store).url}.old-1")
    assert "step_00000012" in committed(aside.listing()), "it is kept"
    shutil.rmtree(tmp_path / "runs")
    ended = finished(*line, root=tmp_path / "runs")
    assert "fetched step_00000004" in ended.output
    assert_same_bits(ended, once(*RUN))


@pytest.mark.slow
def test_an_older_directory_is_brought_up_to_date_and_a_newer_one_is_not(store: str, tmp_path: Path) -> None:
    killed(store, 4, root=tmp_path / "runs")
    shutil.copytree(tmp_path / "runs", tmp_path / "older")
    killed(store, 12, root=tmp_path / "runs")
    shutil.copytree(tmp_path / "runs", tmp_path / "newer")
    older = finished(*RUN, f"run.mirror={store}", root=tmp_path / "older")
    assert "fetched step_00000012" in older.output
    assert_same_bits(older, once(*RUN))
    objects = mirror(store)
    for name in committed(objects.listing()):  # as if the later ones had never come there
        objects.remove(f"checkpoints/{name}/manifest.json")
    objects.write("summary.json", (tmp_path / "newer").joinpath("default", older.directory.name, "summary.json").read_bytes())
    newer = finished(*RUN, f"run.mirror={store}", root=tmp_path / "newer")
    assert "fetched" not in newer.output and "continuing from" in newer.output
    assert_same_bits(newer, once(*RUN))
    assert steps(store) == [21, 20]


# --- run.resume=s3://...


@pytest.mark.slow
def test_a_run_begins_with_a_run_or_checkpoint_in_a_store_as_with_a_path(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADFAST_CACHE", str(tmp_path / "cache"))
    first = finished(*RUN, f"run.mirror={store}", root=tmp_path / "first")
    longer = [*RUN, "trainer.max_epochs=4"]
    by_path = finished(*longer, f"run.resume={first.directory}", root=tmp_path / "by_path")
    shutil.copytree(first.directory, tmp_path / "copy")
    run = f"{store}/default/{first.directory.name}"
    urls = [run, f"{run}/checkpoints/step_00000021", f"file://{tmp_path}/copy"]
    for number, url in enumerate(urls):
        assert_same_bits(finished(*longer, f"run.resume={url}", root=tmp_path / f"by_url_{number}"), by_path)
    refused = command(*longer, f"run.resume={store}/nothing", root=tmp_path / "refused")
    assert refused.code == 78 and f"run.resume: {store}/nothing has no checkpoint" in refused.output, refused.output
