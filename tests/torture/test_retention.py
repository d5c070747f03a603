"""Random histories of saves and crashes, on a file system that may lose power at any moment: a valid checkpoint is there."""

import random
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import manifest
from framework.checkpoint.format import digest
from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.runtime.environment import Environment
from framework.runtime.files import flush_to_disk
from tests.checkpoint.sealing import content_of
from tests.torture.power_cut import RecordedDisk

NUM_HISTORIES = 500
NUM_QUICK = 20


class Crash(BaseException):
    """The process is killed: nothing of what follows happens."""


def write(store: CheckpointStore, beside: Path, tensors: Any) -> dict[str, Any]:
    """Stand in for the writer of tensors: it makes a file and flushes that, not the directory."""
    shard = beside / "shard-00001.safetensors"
    shard.write_bytes(tensors["content"])
    flush_to_disk(shard)
    return {shard.name: digest(shard)}


def valid_steps(directory: Path) -> list[int]:
    steps = []
    for path in manifest.candidates(directory):
        try:
            for name, entry in manifest.read_manifest(path).items():
                manifest.verify_file(path / name, entry)
        except manifest.Invalid:
            continue
        steps.append(manifest.step_of(path) or 0)
    return steps


@pytest.mark.quick(NUM_QUICK)
@pytest.mark.parametrize("seed", range(NUM_HISTORIES))
def test_a_valid_checkpoint_exists_at_all_times(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(CheckpointStore, "_write", write)
    world = World.start(Environment.read(), backend="auto", timeout_s=1.0, scratch=None)
    directory = tmp_path / "disk" / "run" / "checkpoints"
    (tmp_path / "disk").mkdir()
    committed = [0]  # the newest step whose save has returned
    num_cuts = [0]
    kill_in = [-1]

    def look() -> None:
        kill_in[0] -= 1
        if kill_in[0] == 0:
            raise Crash
        if rng.random() < 0.1:
            num_cuts[0] += 1
            left = tmp_path / f"left_{num_cuts[0]}"
            with monkeypatch.context() as undo:  # the model does not follow itself
                undo.setattr(disk, "_depth", 1)
                disk.top.write_after_power_cut(left, rng)
                manifest.put_back(left / "run" / "checkpoints")
            found = valid_steps(left / "run" / "checkpoints")
            assert not committed[0] or (found and found[0] >= committed[0]), f"{found}, but {committed[0]} was committed"

    disk = RecordedDisk(tmp_path / "disk", monkeypatch, at_each=look)
    step = 0
    for _ in range(rng.randrange(4, 12)):
        store = CheckpointStore(  # what retention keeps may be another at each start
            directory, world=world, keep_last=rng.randrange(1, 4), keep_best=rng.randrange(3), mode=rng.choice(["min", "max"])
        )
        kill_in[0] = rng.randrange(1, 25) if rng.random() < 0.4 else -1
        try:
            for _ in range(rng.randrange(1, 4)):
                step += rng.randrange(1, 50) if step == 0 or rng.random() < 0.7 else 0  # an evaluation was made later
                content, monitor = rng.randbytes(rng.randrange(200)), rng.choice([None, rng.random()])
                store.save(step, {"content": content}, {"monitor": monitor})
                committed[0] = step
        except Crash:
            manifest.put_back(directory)
            step = max([0, *valid_steps(directory)])  # where the next start continues
    kept = valid_steps(directory)
    assert (kept[0] if kept else 0) >= committed[0]
    for path in manifest.candidates(directory):
        assert content_of(path)["state"].keys() == {"monitor"}
    assert num_cuts[0] > 0
