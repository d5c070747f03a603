"""A checkpoint made to do harm, with a manifest that is right, is refused: nothing runs, nothing outside is touched."""

import json
import os
import pickle
import re
import resource
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.format import Chunk, chunks_fault, digest
from framework.checkpoint.manifest import MANIFEST, read_state, step_of
from framework.checkpoint.store import CheckpointStore
from framework.distributed.world import World
from framework.runtime.environment import Environment
from framework.runtime.exits import NoValidCheckpoint
from tests.checkpoint.sealing import Content, edit, seal
from tests.harness import Ended, assert_same_bits, command, finished

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=16", "dataset.num_test=16", "dataset.image_size=8",
    "model=mlp", "model.dim=8", "global_batch_size=16", "trainer.max_epochs=3", "trainer.log_every=1",
    "checkpoint.every=4", "checkpoint.keep_last=100",
]  # fmt: skip
DDP = ["parallel=ddp", "launch.nproc_per_node=2"]
SHARD = "shard-00001.safetensors"
STRANGER = 54321  # a user that is not us


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.canary}'",)


Attack = Callable[[Path, Path], object]  # (the checkpoint, a folder outside the run)
Header = dict[str, Any]


def link(path: Path, outside: Path) -> None:
    """Move a file or directory away, and leave a link to it, which would read as if nothing had happened."""
    there = outside / path.name
    shutil.move(path, there)
    path.symlink_to(there)


def lead_out(path: Path, outside: Path) -> None:
    shutil.copy(path / SHARD, path.parent.parent / "away.safetensors")
    name = "../../away.safetensors"
    edit(path, lambda manifest: manifest["files"].update({name: digest(path / name)}))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_zeros(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


def edit_header(path: Path, edit: Callable[[Header], Any]) -> None:
    content = (path / SHARD).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    (path / SHARD).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def edit_places(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    def in_header(header: Header) -> None:
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        edit(places)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)

    edit_header(path, in_header)


def enlarge(path: Path, outside: Path) -> None:
    """Describe a tensor of terabytes, which a file with a hole that large really has."""
    terabytes = 1 << 43

    def add(header: Header) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header["optimizer/x/y"] = {"dtype": "U8", "shape": [terabytes], "data_offsets": [end, end + terabytes]}

    edit_header(path, add)
    os.truncate(path / SHARD, (path / SHARD).stat().st_size + terabytes)
    edit(path, lambda manifest: manifest["files"][SHARD].update(size=(path / SHARD).stat().st_size))


def rename(path: Path, tensor: str) -> None:
    def in_header(header: Header) -> None:
        name = next(name for name in header if name.startswith("model/"))
        header[tensor] = header.pop(name)

    edit_header(path, in_header)
    edit_places(path, lambda places: places.update({tensor: places.pop(next(name for name in places if name[:6] == "model/"))}))


def set_state(path: Path, key: str, value: Any) -> None:
    def change(content: Content) -> None:
        node = content["state"]
        *above, last = key.split(".")
        for part in above:
            node = node[part]
        node[last] = value

    edit(path, change)


def weight(header: Header) -> Header:
    return next(entry for name, entry in sorted(header.items()) if name.startswith("model/") and len(entry["shape"]) == 2)


def shard(content: Callable[[bytes], bytes]) -> Attack:
    return lambda path, outside: (path / SHARD).write_bytes(content((path / SHARD).read_bytes()))


def sized(size: int) -> bytes:
    return struct.pack("<Q", size)


def place(value: Any) -> Attack:
    return lambda path, outside: edit_places(path, lambda places: next(iter(places.values())).update(saved_offsets=value))


DEEP = b'{"a":' * 50_000
MISPLACED, NO_FILE, NO_STATE = "misplaces its tensors", "is not a safetensors file", "its state is not the state of a run"
NOT_ONE = "has chunks that do not make up one tensor"
SEALED: dict[str, tuple[str, Attack]] = {  # the reason for which it is to be refused; the manifest is made right after it
    "a_pickle_in_metadata": (
        "manifest.json is damaged: files..metadata.[key]",
        lambda path, outside: (path / ".metadata").write_bytes(pickle.dumps(Payload(outside / "canary"))),
    ),
    "a_pickle_for_a_shard": (NO_FILE, lambda path, outside: (path / SHARD).write_bytes(pickle.dumps(Payload(outside / "canary")))),
    "a_pipe_for_a_shard": (f"'{SHARD}' is a device or a pipe instead of a file", lambda path, outside: replace_by_pipe(path / SHARD)),
    "a_header_of_4_GiB": (NO_FILE, shard(lambda content: sized(2**32) + content[8:])),
    "a_header_of_absurd_length": (NO_FILE, shard(lambda content: sized(2**64 - 1) + content[8:])),
    "a_header_nested_deeply": (NO_FILE, shard(lambda content: sized(len(DEEP)) + DEEP)),
    "a_tensor_of_terabytes": (NO_FILE, lambda path, outside: edit_header(path, lambda header: weight(header).update(shape=[2**40, 8]))),
    "a_tensor_of_another_kind": ("does not belong to the model", lambda path, outside: rename(path, "../../canary")),
    "a_tensor_whose_name_clears_the_screen": ("does not belong to the model", lambda path, outside: rename(path, "model/\x1b[2J")),
    "a_chunk_placed_far_out": (
        NOT_ONE,
        lambda path, outside: edit_places(
            path, lambda places: [p["saved_offsets"].__setitem__(0, 2**40) for p in places.values() if p["saved_offsets"]]
        ),
    ),
    "one_chunk_twice": (NOT_ONE, lambda path, outside: shutil.copy(path / SHARD, path / SHARD.replace("00001", "00002"))),
    "a_place_that_is_negative": (MISPLACED, place([-1])),
    "a_place_that_is_text": (MISPLACED, place(["x"])),
    "a_place_that_is_deep": (MISPLACED, place([[[]]])),
    "a_place_that_is_huge": (MISPLACED, place([10**30])),
    "a_place_that_is_no_list": (MISPLACED, place({"a": 1})),
    "a_place_of_other_dimensions": (
        "has chunks of different dimensions",
        lambda path, outside: edit_places(
            path, lambda places: [place.update(saved_offsets=[0] * 9) for place in places.values()]
        ),
    ),
    "no_places": ("does not say where its tensors belong", lambda path, outside: edit_header(path, lambda header: header.pop("__metadata__"))),
    "a_state_without_facts": (NO_STATE, lambda path, outside: edit(path, lambda content: content["state"].pop("facts"))),
}  # fmt: skip
UNSEALED: dict[str, tuple[str, Attack]] = {  # on the manifest itself
    "a_name_that_leads_out": ("manifest.json is damaged: files.../../", lead_out),
    "a_linked_shard": ("is a symbolic link instead of a file", lambda path, outside: link(path / SHARD, outside)),
    "a_linked_manifest": ("'manifest.json' is a symbolic link instead of a file", lambda path, outside: link(path / MANIFEST, outside)),
    "a_linked_checkpoint": ("is a symbolic link instead of a directory", link),
    "a_pipe_for_the_manifest": ("'manifest.json' is a device or a pipe instead of a file", lambda path, outside: replace_by_pipe(path / MANIFEST)),
    "a_file_of_terabytes_of_nothing": ("more than its disk has", enlarge),
    "a_negative_size": ("manifest.json is damaged", lambda path, outside: edit(path, lambda manifest: manifest["files"][SHARD].update(size=-1))),
}  # fmt: skip
if os.geteuid() == 0:  # others may not make devices, and cannot give files away
    SEALED |= {
        "a_device_without_an_end": (
            f"'{SHARD}' is a device or a pipe instead of a file",
            lambda path, outside: replace_by_zeros(path / SHARD),
        ),
        "a_strangers_directory": (
            f"belongs to another user (uid {STRANGER}), who can change it at any moment; if you trust them, copy",
            lambda path, outside: os.chown(path, STRANGER, -1),
        ),
        "a_strangers_file": (
            f"'{SHARD}' belongs to another user (uid {STRANGER})",
            lambda path, outside: os.chown(path / SHARD, STRANGER, -1),
        ),
    }
TEXTS = {
    "nested_deeply": (b"[" * 100_000, "nested too deeply"),
    "of_nested_objects": (b'{"a":' * 100_000, "nested too deeply"),
    "gigantic": (b" " * (17 << 20), "is too large"),
    "not_utf_8": (b'{"step": "\xff"}', "is damaged"),
    "with_a_key_twice": (b'{"format": 2, "format": 2, "files": {}, "step": 1}', "a key occurs twice"),
    "with_a_huge_integer": (b'{"step": ' + b"9" * 10_000 + b"}", "is damaged"),
    "a_list": (b"[]", "is"),
    "empty": (b"", "is damaged"),
}
UNSEALED |= {
    f"a_manifest_{label}": (reason, lambda path, outside, text=text: (path / MANIFEST).write_bytes(text))
    for label, (text, reason) in TEXTS.items()
}
VALUES: dict[str, Any] = {
    "progress.step": ["x", -1, 10**30, 1.5, None],
    "progress.wall_s": [float("nan"), -1.0],
    "progress.extra": [1],
    "metrics": [[], "x", {"val": []}, {"val": {"last": {}, "best": {}}}, {"../x": {}}],
    "monitor": [[1], {}, "x"],
    "patience.num_bad": [-1, "x"],
    "patience": [None],
    "loss_scale.value": [float("inf"), 0.0, "x"],
    "facts": [[], {"num_samples": []}, {"optimizer": "\x1b[2J"}, {"\ud800": 1}],
    "data": [[], {"train": "x"}, {"../x": {}}, {"val": {"x": 1}}, {"val": {"x": "\x1b[2J"}}],
    "record_id": [1, "../x-00000000", "x-00000000\n", "x-1"],
    "unknown": [1],
}
SEALED |= {
    f"a_state_with_{key}_{number}": (NO_STATE, lambda path, outside, key=key, value=value: set_state(path, key, value))
    for key, values in VALUES.items()
    for number, value in enumerate(values)
}
ATTACKS = SEALED | UNSEALED


# --- The tests


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A finished run of 12 steps with its checkpoints of steps 4, 8 and 12."""
    return finished(*RUN, root=tmp_path_factory.mktemp("hostile") / "runs")


def make(name: str, *, of: Path, at: Path, outside: Path) -> str:
    """Make a hostile checkpoint of a good one. Returns the reason for which it is to be refused."""
    reason, action = ATTACKS[name]
    outside.mkdir()
    shutil.copytree(of, at)
    edit(at, lambda content: content.update(step=step_of(at)))
    seal(at)
    action(at, outside)
    if name in SEALED:
        seal(at)
    return reason


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_calm(ended: Ended) -> None:
    assert "Traceback" not in ended.output, ended.output
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 << 20, "KiB: something large was read"


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_checkpoint_is_refused(name: str, ended: Ended, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_00000008"
    reason = make(name, of=ended.directory / "checkpoints" / checkpoint.name, at=checkpoint, outside=tmp_path / "outside")
    before = snapshot(tmp_path / "outside")
    world = World.start(Environment.read(), backend="gloo", timeout_s=60, scratch=None)
    store = CheckpointStore(checkpoint.parent, world=world, keep_last=1, keep_best=0, mode="min")
    with pytest.raises(NoValidCheckpoint, match=re.escape(reason)) as caught:
        store.named(checkpoint)
    assert str(caught.value).isprintable()
    assert snapshot(tmp_path / "outside") == before, "something outside was touched, or a payload has run"


@pytest.mark.parametrize(
    "name", ["a_pickle_for_a_shard", "a_linked_checkpoint", "a_pipe_for_the_manifest", "a_manifest_gigantic"]
)
def test_a_run_does_not_begin_from_a_hostile_checkpoint(name: str, ended: Ended, tmp_path: Path) -> None:
    checkpoint = tmp_path / "other" / "checkpoints" / "step_00000008"
    reason = make(name, of=ended.directory / "checkpoints" / checkpoint.name, at=checkpoint, outside=tmp_path / "outside")
    refused = command(*RUN, "name=next", f"run.resume={checkpoint}", root=tmp_path / "runs", timeout_s=60)
    assert refused.code == 65 and f"{checkpoint}: " in refused.output and reason in refused.output, refused.output
    assert not (tmp_path / "outside" / "canary").exists()
    assert_calm(refused)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [[], DDP], ids=["single", "ddp 2"])
def test_hostile_checkpoints_are_passed_over_for_an_older_good_one(ranks: list[str], ended: Ended, tmp_path: Path) -> None:
    expected = finished(*RUN, *ranks, root=tmp_path / "expected") if ranks else ended
    run = Ended(0, "", tmp_path / "runs")
    shutil.copytree(expected.root, run.root)
    (run.directory / "model.safetensors").unlink()
    checkpoints = run.directory / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000012")
    (tmp_path / "outside").mkdir()
    reasons = {}
    for number, name in enumerate(ATTACKS, start=9):  # steps 9, 10, 11, 12 and on: some stand where the run will save
        path = checkpoints / f"step_{number:08d}"
        reasons[path] = make(name, of=checkpoints / "step_00000008", at=path, outside=tmp_path / "outside" / name)
    before = snapshot(tmp_path / "outside")
    again = finished(*RUN, *ranks, "checkpoint.keep_last=1", root=run.root, timeout_s=120)
    lines = again.output.splitlines()
    for path, reason in reasons.items():
        assert any(f"skipped checkpoint: {path}: " in line and reason in line for line in lines), (path, reason)
    assert "continuing from" in again.output and "step_00000008" in again.output
    assert_same_bits(again, expected)
    assert (checkpoints / "step_00000012" / MANIFEST).is_file(), "what was committed was not pruned for what is invalid"
    assert snapshot(tmp_path / "outside") == before
    assert_calm(again)


def test_rows_of_a_run_to_begin_from_are_not_read_through_a_link(ended: Ended, tmp_path: Path) -> None:
    shutil.copytree(ended.directory, tmp_path / "other")
    replace_by_pipe(tmp_path / "other" / "metrics.jsonl")
    path = tmp_path / "other" / "checkpoints" / "step_00000008"
    refused = command(*RUN, "name=next", f"run.resume={path}", root=tmp_path / "runs", timeout_s=60)
    assert refused.code == 65 and "'metrics.jsonl' is a device or a pipe instead of a file" in refused.output, refused.output


def test_a_measured_value_may_be_infinite_in_our_own_state(ended: Ended, tmp_path: Path) -> None:
    path = tmp_path / "step_00000008"
    shutil.copytree(ended.directory / "checkpoints" / path.name, path)

    def change(content: Content) -> None:
        content["state"]["metrics"]["train"]["last"] |= {"perplexity": float("inf"), "grad_norm": None}
        content["state"]["patience"]["best"] = float("nan")

    edit(path, change)
    assert read_state(path)["metrics"]["train"]["last"]["perplexity"] == float("inf")


@pytest.mark.parametrize(("kind", "name"), [("link", "lock"), ("link", "train.log"), ("pipe", "config.yaml")])
def test_a_run_directory_that_leads_elsewhere_is_refused(kind: str, name: str, ended: Ended, tmp_path: Path) -> None:
    run = Ended(0, "", tmp_path / "runs")
    shutil.copytree(ended.root, run.root)
    (tmp_path / "outside").mkdir()
    file = next(run.root.glob("default/*")) / name
    file.touch()
    if kind == "link":
        link(file, tmp_path / "outside")
    else:
        replace_by_pipe(file)
    before = snapshot(tmp_path / "outside")
    refused = command(*RUN, root=run.root, timeout_s=60)
    assert refused.code == 78 and f"run.dir: {file} is not a plain file" in refused.output, refused.output
    assert snapshot(tmp_path / "outside") == before


@pytest.mark.parametrize(
    ("parts", "is_whole"),
    [
        ([([], [])], True),
        ([([], []), ([], [])], False),
        ([([0], [4]), ([4], [3])], True),
        ([([0], [4]), ([3], [4])], False),
        ([([0], [4]), ([5], [3])], False),
        ([([0, 0], [2, 3]), ([0, 3], [2, 2]), ([2, 0], [1, 3]), ([2, 3], [1, 2])], True),
        ([([0, 0], [2, 3]), ([0, 2], [2, 3])], False),
        ([([0, 0], [2, 2]), ([2, 2], [2, 2]), ([0, 0], [2, 2]), ([2, 0], [2, 2])], False),
        ([([0], [0])], True),
        ([([0], [3]), ([3], [0])], True),
    ],
)
def test_chunks_make_up_a_tensor_or_not(parts: list[tuple[list[int], list[int]]], is_whole: bool) -> None:
    chunks = [Chunk("model/x", offsets, sizes, "F32", "file") for offsets, sizes in parts]
    assert (chunks_fault(chunks) is None) == is_whole
