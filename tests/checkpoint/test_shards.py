"""The files of a checkpoint: what they cost, who writes what, and that torch's reader and writer understand them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, load, save

from framework.checkpoint import format
from framework.checkpoint.chunks import Holding, WritePlan, chunk_of, chunks_of, deal
from framework.checkpoint.format import Chunk, digest, inventory_of, read_regions, write_shard
from framework.checkpoint.saver import Saver
from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.loggers.sink import RunInfo
from framework.runs.directory import RunDirectory
from framework.runtime.environment import Environment
from framework.training.recorder import Recorder
from tests.harness import finished
from tests.test_resume import RUN, STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
TENSORS = {
    "model/matrix": torch.arange(12.0).reshape(3, 4),
    "model/bf16": torch.arange(5).to(torch.bfloat16),
    "model/channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "model/transposed": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
    "model/flag": torch.tensor([True, False, True]),
    "model/byte": torch.tensor([1], dtype=torch.uint8),
    "model/number": torch.tensor(7),
    "model/complex": torch.tensor([1 + 2j], dtype=torch.complex64),
    "model/nothing": torch.empty(0, 3),
    "model/float8": torch.arange(3.0).to(torch.float8_e4m3fn),
}


def chunked(tensors: dict[str, Tensor]) -> dict[Chunk, Tensor]:
    return {chunk_of(name, tensor): tensor for name, tensor in tensors.items()}


def empty_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(
            actual[name].to(torch.complex64), tensor.to(torch.complex64)
        ), name


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "shard-00001.safetensors", chunked(TENSORS))
    assert entry == digest(tmp_path / "shard-00001.safetensors"), "the checksum taken on the way is the file's"
    found, targets = inventory_of(tmp_path, ["shard-00001.safetensors"]), empty_like(TENSORS)
    read_regions(tmp_path, found, chunks_of(targets))
    assert_equal(targets, TENSORS)


def test_torch_reads_what_we_write_and_we_read_what_torch_writes(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if tensor.numel() and tensor.is_contiguous()}
    (tmp_path / "ours").mkdir()
    write_shard(tmp_path / "ours" / "shard-00001.safetensors", chunked(tensors))
    targets = empty_like(tensors)
    load(targets, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    assert_equal(targets, tensors)
    writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True, thread_count=1)
    save(dict(tensors), storage_writer=writer, no_dist=True)
    (name,) = (path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    targets = empty_like(tensors)
    read_regions(tmp_path / "theirs", inventory_of(tmp_path / "theirs", [name]), chunks_of(targets))
    assert_equal(targets, tensors)


@pytest.mark.parametrize("cut", [[(0, 5), (5, 7)], [(0, 1), (1, 2), (2, 7)]])
def test_a_part_is_read_from_the_parts_that_it_overlaps(cut: list[tuple[int, int]], tmp_path: Path) -> None:
    whole = torch.arange(42.0).reshape(7, 6)
    for number, (begin, end) in enumerate(cut):
        for half in (0, 1):
            part = whole[begin:end, 3 * half : 3 * half + 3]
            chunk = Chunk("model/x", (begin, 3 * half), tuple(part.shape))
            write_shard(tmp_path / f"shard-{number}{half}.safetensors", {chunk: part})
    found = inventory_of(tmp_path, sorted(path.name for path in tmp_path.iterdir()))
    target = torch.zeros(7, 6, dtype=torch.float64)
    read_regions(tmp_path, found, chunks_of({"model/x": target}))
    assert torch.equal(target, whole.double())


# --- who writes what


def test_each_chunk_is_written_once_and_the_bytes_are_dealt_evenly() -> None:
    replicas = [{Chunk(f"model/{i}", (0,), (size,)): size for i, size in enumerate([900, 300, 300, 300, 7, 5])}] * 3
    dealt = deal([Holding(0, table) for table in replicas])
    assert sum(map(len, dealt)) == 6 and set.union(*dealt) == replicas[0].keys()
    loads = [sum(replicas[0][chunk] for chunk in mine) for mine in dealt]
    assert max(loads) == 900 and sorted(loads)[1:] >= [300, 900]
    shared = {Chunk("model/y", (0,), (2,)): 8}
    assert deal([Holding(4, shared), Holding(3, shared), Holding(9, {})]) == [set(), {*shared}, set()], "who has the least"


def test_ranks_tell_what_they_hold_only_when_it_has_changed() -> None:
    asked: list[Any] = []

    def distinct(flag: bool) -> dict[int, bool]:
        asked.append(flag)
        return {0: flag}

    def dealt(value: Any, deal: Any) -> Any:
        asked.append(value)
        return deal([value, value])[1]

    agreement = SimpleNamespace(distinct=distinct, scatter_plan=dealt, sum=lambda counts: counts * 2)
    plan = WritePlan(SimpleNamespace(agreement=agreement))
    first = plan.mine(TENSORS)
    assert 0 < len(first) < len(TENSORS) and len(asked) == 3
    assert plan.mine(TENSORS).keys() == first.keys() and asked[3:] == [False]
    plan.mine(TENSORS | {"optimizer/x/momentum": torch.zeros(9)})
    assert len(asked) == 7


def test_the_processes_of_ddp_share_the_writing(tmp_path: Path) -> None:
    ended = finished(*RUN, *STRATEGIES["ddp 2"], root=tmp_path)
    newest = max(ended.directory.glob("checkpoints/*"))
    sizes = [sum(tensor.stat().st_size for tensor in newest.glob(f"shard-0000{rank}.*")) for rank in (1, 2)]
    assert 0.5 < sizes[0] / sizes[1] < 2


# --- what a save costs: counted


@pytest.fixture
def world() -> World:
    return World.start(Environment.read(), backend="auto", timeout_s=60.0, scratch=None)


def test_a_save_flushes_five_times(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows, the shard, the manifest, the folder of both, and its name."""
    recorder = Recorder(RunDirectory(tmp_path), world=world, sinks={})
    recorder.open(RunInfo(tmp_path, "id", "name", 0, 100, {}))
    store = CheckpointStore(tmp_path / "checkpoints", world=world, keep_last=1, keep_best=0, mode="min")
    saver = Saver(store, world=world, is_async=False, max_failures=0, facts={})
    fsync, flushed = os.fsync, list[str]()

    def noted(descriptor: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    saver.save(1, TENSORS, {"monitor": None}, flush=recorder.flush)
    monkeypatch.setattr(os, "fsync", noted)
    saver.save(2, TENSORS, {"monitor": None}, flush=recorder.flush)
    monkeypatch.undo()
    recorder.close()
    names = ["metrics.jsonl", "shard-00001.safetensors", ".manifest.json", ".tmp_", "checkpoints"]
    assert len(flushed) == 5 and all(one.startswith(name) for one, name in zip(flushed, names)), flushed


def test_a_save_copies_no_tensor_and_holds_the_interpreter_for_a_block_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.zeros(24 << 20, dtype=torch.uint8)
    written: list[int] = []

    def write(descriptor: int, block: memoryview) -> int:
        if len(block) > 1 << 20:
            first = torch.frombuffer(block, dtype=torch.uint8)
            assert large.data_ptr() <= first.data_ptr() < large.data_ptr() + large.numel(), "the tensor's own memory"
        written.append(len(block))
        return os.write(descriptor, block)

    monkeypatch.setattr(format, "os", SimpleNamespace(**vars(os) | {"write": write}))
    write_shard(tmp_path / "shard-00001.safetensors", {Chunk("model/x", (0,), (large.numel(),)): large})
    assert sorted(written)[-3:] == [8 << 20] * 3


@pytest.mark.slow
def test_a_save_takes_no_memory_beside_the_state(tmp_path: Path) -> None:
    program = f"""
import resource, sys, torch
from pathlib import Path
from framework.checkpoint.format import Chunk, digest, write_shard
def write(name, size):
    write_shard(Path({str(tmp_path)!r}, name), {{Chunk("model/x", (0,), (size,)): torch.ones(size)}})
    digest(Path({str(tmp_path)!r}, name))
write("a", 1000)
tensor = torch.ones(50_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_shard(Path({str(tmp_path)!r}, "b"), {{Chunk("model/x", (0,), (tensor.numel(),)): tensor}})
digest(Path({str(tmp_path)!r}, "b"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and int(told.stdout) < 40_000, (told.stdout, told.stderr)  # KiB, of a state of 200 MB
