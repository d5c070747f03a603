"""A damaged checkpoint is noticed, passed over, and never loaded in part."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.runtime.environment import Environment
from framework.runtime.log import LOGGER
from tests.harness import Ended, assert_same_bits, command, finished, slow_but

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=16", "dataset.num_test=16", "dataset.image_size=8",
    "model=cnn", "model.channels=[4,8]", "global_batch_size=16", "trainer.max_epochs=3", "trainer.log_every=1",
    "checkpoint.every=4", "checkpoint.keep_last=2",
]  # fmt: skip
NUM_DAMAGES = 300
NUM_RUNS, NUM_QUICK = 24, 6  # whole runs
RANKS = ["parallel=fsdp", "launch.nproc_per_node=2"]  # the two ranks write a file each


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A finished run of 12 steps whose last two checkpoints, of steps 8 and 12, are kept."""
    return finished(*RUN, *RANKS, root=tmp_path_factory.mktemp("damage") / "runs")


@pytest.fixture
def unfinished(ended: Ended, tmp_path: Path) -> Ended:
    """A copy of it, as if it had been killed after its last checkpoint, before the results were written."""
    copy = Ended(ended.code, ended.output, tmp_path / "runs")
    shutil.copytree(ended.root, copy.root)
    (copy.directory / "model.safetensors").unlink()
    return copy


def flip_a_bit(path: Path, random: random.Random) -> str:
    content = bytearray(path.read_bytes())
    position = random.randrange(len(content))
    content[position] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(content))
    return f"bit flipped in byte {position} of {path.name}"


def truncate(path: Path, random: random.Random) -> str:
    size = random.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.truncate(size)
    return f"{path.name} cut to {size} bytes"


def delete(path: Path, random: random.Random) -> str:
    path.unlink()
    return f"{path.name} deleted"


def swap_with_the_older(path: Path, random: random.Random) -> str:
    other = path.parent.with_name("step_00000008") / path.name
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    return f"{path.name} taken from step 8" if mine != theirs else "nothing"


DAMAGES: list[Callable[[Path, random.Random], str]] = [flip_a_bit, flip_a_bit, truncate, delete, swap_with_the_older]


def damage(ended: Ended, seed: int) -> tuple[Path, str]:
    """Damage the newest checkpoint somewhere; return its path, and what was done."""
    rng = random.Random(seed)
    newest = ended.directory / "checkpoints" / "step_00000012"
    return newest, rng.choice(DAMAGES)(rng.choice(sorted(newest.iterdir())), rng)


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_damage_is_noticed_and_the_older_checkpoint_taken(
    seed: int, unfinished: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    newest, done = damage(unfinished, seed)
    world = World.start(Environment(), backend="gloo", timeout_s=5.0, scratch=None)
    store = CheckpointStore(newest.parent, world=world, keep_last=2, keep_best=0, mode="min")
    with caplog.at_level("WARNING", logger=LOGGER.name), our_log_seen():
        found = store.newest_valid()
    assert found is not None and found[0].name == "step_00000008" and found[1]["progress"]["step"] == 8, done
    assert f"checkpoint passed over: {newest}" in caplog.text, done


@contextmanager
def our_log_seen() -> Iterator[None]:
    """Let pytest see our log, which otherwise has handlers of its own."""
    before, LOGGER.propagate = LOGGER.propagate, True
    try:
        yield
    finally:
        LOGGER.propagate = before


@pytest.mark.parametrize("seed", slow_but(range(NUM_QUICK), range(NUM_RUNS)))
def test_a_run_recovers_from_damage_to_the_same_bits(seed: int, unfinished: Ended, ended: Ended) -> None:
    newest, done = damage(unfinished, seed)
    again = finished(*RUN, *RANKS, root=unfinished.root)
    assert f"checkpoint passed over: {newest}" in again.output, done
    assert "continuing from" in again.output and "step_00000008" in again.output, done
    assert_same_bits(again, ended)


def test_with_no_valid_checkpoint_left_it_stops_and_says_why_for_each(unfinished: Ended) -> None:
    checkpoints = unfinished.directory / "checkpoints"
    for name in ("step_00000008", "step_00000012"):
        flip_a_bit(checkpoints / name / "state.json", random.Random(0))
    before = sorted(path.name for path in checkpoints.iterdir())
    again = command(*RUN, *RANKS, root=unfinished.root)
    assert again.code == 65
    for name in before:
        assert again.output.count(f"{checkpoints / name}: state.json does not match its checksum") == 1
    assert sorted(path.name for path in checkpoints.iterdir()) == before, "nothing was deleted"
    assert again.summary["status"] == "failed"


def test_starting_over_moves_the_old_run_aside(unfinished: Ended, ended: Ended) -> None:
    directory = unfinished.directory
    again = command(*RUN, *RANKS, "run.resume=never", root=unfinished.root)
    assert again.code == 0, again.output
    aside = directory.with_name(directory.name + ".old-1")
    assert (aside / "checkpoints" / "step_00000012").is_dir()
    assert (directory / "model.safetensors").read_bytes() == (ended.directory / "model.safetensors").read_bytes()


def test_a_directory_without_a_manifest_is_not_a_checkpoint(unfinished: Ended, ended: Ended) -> None:
    half = unfinished.directory / "checkpoints" / "step_00000099"
    half.mkdir()
    (half / "state.json").write_text(json.dumps({}))
    again = finished(*RUN, *RANKS, root=unfinished.root)
    assert f"checkpoint passed over: {half}: no readable manifest.json" in again.output
    assert_same_bits(again, ended)
