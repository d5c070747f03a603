"""A damaged checkpoint is noticed, passed over, and never loaded in part."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.runtime.environment import Environment
from framework.runtime.log import LOGGER
from tests.checkpoint.sealing import edit, seal
from tests.harness import Ended, assert_same_bits, command, finished

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=16", "dataset.num_test=16", "dataset.image_size=8",
    "model=cnn", "model.channels=[4,8]", "global_batch_size=16", "trainer.max_epochs=3", "trainer.log_every=1",
    "checkpoint.every=4", "checkpoint.keep_last=2",
]  # fmt: skip
NUM_DAMAGES = 300
NUM_RUNS = 12  # whole commands
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


def damage(directory: Path, seed: int) -> tuple[Path, str]:
    """Damage the newest checkpoint of a run somewhere; return its path, and what was done."""
    rng = random.Random(seed)
    newest = directory / "checkpoints" / "step_00000012"
    return newest, rng.choice(DAMAGES)(rng.choice(sorted(newest.iterdir())), rng)


@pytest.mark.slow
def test_damage_is_noticed_and_the_older_checkpoint_taken(
    ended: Ended, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, unnoticed = World.start(Environment(), backend="gloo", timeout_s=5.0, scratch=None), []
    for seed in range(NUM_DAMAGES):
        shutil.copytree(ended.directory / "checkpoints", tmp_path / str(seed) / "checkpoints")
        newest, done = damage(tmp_path / str(seed), seed)
        store = CheckpointStore(newest.parent, world=world, keep_last=2, keep_best=0, mode="min")
        with caplog.at_level("WARNING", logger=LOGGER.name), our_log_seen():
            found = store.newest_valid()
        is_older = found is not None and found[0].name == "step_00000008" and found[1]["progress"]["step"] == 8
        unnoticed += [] if is_older and f"skipped checkpoint: {newest}" in caplog.text else [f"{seed}: {done}"]
    assert unnoticed == []


def test_damaged_checkpoints_of_later_steps_displace_no_valid_one(tmp_path: Path) -> None:
    def save(step: int, monitor: float, keep_last: int = 3) -> None:
        store = CheckpointStore(folder, world=World.alone(), keep_last=keep_last, keep_best=1, mode="min")
        store.save(step, {"model/weight": torch.ones(3)}, {"progress": {"step": step}, "monitor": monitor})

    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        save(step, monitor=2.0 / step)
    for step in (4, 6):
        flip_a_bit(next((folder / f"step_{step:08d}").glob("shard-*")), random.Random(0))
    save(3, monitor=5.0, keep_last=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000002", "step_00000003"]


@contextmanager
def our_log_seen() -> Iterator[None]:
    """Let pytest see our log, which otherwise has handlers of its own."""
    before, LOGGER.propagate = LOGGER.propagate, True
    try:
        yield
    finally:
        LOGGER.propagate = before


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_a_run_recovers_from_damage_to_the_same_bits(seed: int, unfinished: Ended, ended: Ended) -> None:
    newest, done = damage(unfinished.directory, seed)
    again = finished(*RUN, *RANKS, root=unfinished.root)
    assert f"skipped checkpoint: {newest}" in again.output, done
    assert "continuing from" in again.output and "step_00000008" in again.output, done
    assert_same_bits(again, ended)


def without_a_tensor(checkpoint: Path) -> str:
    for shard in checkpoint.glob("shard-*"):
        with safe_open(shard, framework="pt") as file:
            kept = {name: file.get_tensor(name) for name in file.keys() if name != "model/head.bias"}
            assert len(kept) < len(file.keys()), "it was there"
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            metadata = file.metadata() | {"DCP_SHARDING_INFO": json.dumps({name: places[name] for name in kept})}
        save_file(kept, shard, metadata=metadata)
    return "does not fit this run: model/head.bias is not in the checkpoint"


def in_another_type(checkpoint: Path) -> str:
    for shard in checkpoint.glob("shard-*"):
        with safe_open(shard, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata()
        save_file(tensors | {"model/head.bias": tensors["model/head.bias"].double()}, shard, metadata=metadata)
    return "does not fit this run: model/head.bias is torch.float64"


def of_another_step(checkpoint: Path) -> str:
    edit(checkpoint, lambda content: content["state"]["progress"].update(step=5))
    return "its state is of step 5"


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", [without_a_tensor, of_another_step])
def test_a_whole_checkpoint_that_does_not_fit_is_passed_over_for_one_that_does(
    change: Callable[[Path], str], unfinished: Ended, ended: Ended
) -> None:
    newest = unfinished.directory / "checkpoints" / "step_00000012"
    reason = change(newest)
    seal(newest)
    again = finished(*RUN, *RANKS, root=unfinished.root)
    assert f"skipped checkpoint: {newest}: {reason}" in again.output
    assert_same_bits(again, ended)


def test_where_no_checkpoint_fits_each_is_named(unfinished: Ended) -> None:
    checkpoints = sorted((unfinished.directory / "checkpoints").iterdir())
    for path in checkpoints:
        in_another_type(path)
        seal(path)
    again = command(*RUN, *RANKS, root=unfinished.root)
    assert again.code == 65
    assert all(f"{path}: does not fit this run: model/head.bias" in again.output for path in checkpoints)


def test_rows_that_were_lost_are_missed(unfinished: Ended, ended: Ended) -> None:
    path = unfinished.directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    before = len([line for line in lines if '"split": "test"' not in line])
    path.write_text("".join(lines[3:]))
    again = finished(*RUN, *RANKS, root=unfinished.root)
    assert f"{path} has lost 3 of the {before} rows before step 13" in again.output
    assert (again.directory / "model.safetensors").read_bytes() == (ended.directory / "model.safetensors").read_bytes()


def test_a_finished_run_says_that_its_last_rows_are_lost(ended: Ended, tmp_path: Path) -> None:
    run = Ended(0, "", tmp_path / "runs")
    shutil.copytree(ended.root, run.root)
    path = run.directory / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[: len(before) // 2])
    told = command(*RUN, *RANKS, root=run.root).output
    assert "finished already" in told and "has lost its last rows" in told
