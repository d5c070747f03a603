"""What the store must be able to do, on a real S3 server and on a file system; and a mirror's claims."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

import framework.runs.mirror
from framework.checkpoint import manifest
from framework.checkpoint.format import digest
from framework.runs.directory import RunDirectory
from framework.runs.mirror import Mirror
from framework.runs.mirror_upload import MirrorTaken, Upload
from framework.runtime.lock import RunLocked
from framework.runtime.objects import Objects, StoreFailed, inside, url_problems


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store" if request.param == "file" else str(request.getfixturevalue("store"))


def test_objects_are_listed_read_written_and_removed(url: str, tmp_path: Path) -> None:
    objects = Objects(url)
    assert objects.listing() == {} and objects.read("a/b") is None
    objects.write("a/b", b"one")
    (tmp_path / "file").write_bytes(b"four")
    objects.put(tmp_path / "file", "a/c.tar")
    objects.write("a/b", b"three")
    assert {name: facts.size for name, facts in objects.listing().items()} == {"a/b": 5, "a/c.tar": 4}
    assert objects.listing("a").keys() == {"a/b", "a/c.tar"} and Objects(f"{url}/a").listing("*.tar").keys() == {"c.tar"}
    before = objects.listing()["a/b"].version
    objects.write("a/b", b"there")
    assert objects.listing()["a/b"].version != before
    objects.get("a/c.tar", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"four"
    objects.remove("a/b")
    objects.remove("a/b")
    assert objects.listing().keys() == {"a/c.tar"}
    with pytest.raises(StoreFailed, match="cannot be read: nothing"):
        objects.get("nothing", tmp_path / "none")


def test_of_several_that_create_an_object_one_succeeds(url: str) -> None:
    objects = Objects(url)
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            created = list(pool.map(lambda who, number=number: objects.create(str(number), bytes([who])), range(8)))
            assert created.count(True) == 1 and objects.read(str(number)) == bytes([created.index(True)])


def test_a_request_that_was_sent_twice_has_created_its_object(url: str) -> None:
    assert Objects(url).create("a", b"mine") and Objects(url).create("a", b"mine") and not Objects(url).create("a", b"yours")


class Overwriting(LocalFileSystem):
    """A store that does not support conditional writes."""

    protocol = "overwriting"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super()._open(path, mode.replace("x", "w"), **options)


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    fsspec.register_implementation("overwriting", Overwriting, clobber=True)
    url = f"overwriting://{tmp_path}/store"
    assert not url_problems("run.mirror", url)
    mirror = Mirror(url, directory(tmp_path / "run"))
    with pytest.raises(StoreFailed, match="does not support conditional writes") as caught:
        mirror.take(mirror.look())
    assert caught.value.is_wrong and not mirror.objects.listing()


@pytest.mark.parametrize("url", ["nothing", "s3://", "nosuch://bucket", "s3:/bucket"])
def test_what_is_no_url_is_a_problem(url: str) -> None:
    (problem,) = url_problems("run.mirror", url)
    assert problem.key == "run.mirror" and problem.code == 78


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "."])
def test_no_object_is_fetched_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="leads out"):
        inside(tmp_path, name)


# --- a mirror's claims


def directory(path: Path) -> RunDirectory:
    path.mkdir(parents=True, exist_ok=True)
    return RunDirectory(path)


def add_checkpoint(run: RunDirectory, step: int, text: str = "{}") -> None:
    target = run.checkpoints / manifest.directory_name(step)
    staging = run.checkpoints / f".tmp_{target.name}"
    staging.mkdir(parents=True)
    shard = staging / "shard-00001.safetensors"
    shard.write_text(text)
    manifest.commit(staging, target=target, files={shard.name: digest(shard)}, state={})


def steps(mirror: Mirror) -> list[tuple[int, int]]:
    return [(stored.step, stored.number) for stored in mirror.look().checkpoints]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be unable to look up processes: they are on another machine."""
    monkeypatch.setattr(framework.runs.mirror, "process_identity", dict)
    monkeypatch.setattr(framework.runs.mirror, "SIGN_S", 0.2)
    monkeypatch.setattr("framework.runs.mirror_upload.SIGN_S", 0.2)
    monkeypatch.setattr(framework.runs.mirror, "_DEAD_AFTER_S", 3.0)


def test_a_holder_that_gives_signs_of_life_is_not_disturbed_and_one_that_is_still_is_taken_for_dead(
    url: str, tmp_path: Path, elsewhere: None
) -> None:
    here, there = Mirror(url, directory(tmp_path / "here")), Mirror(url, directory(tmp_path / "there"))
    here.require_free(here.look())
    holding = here.take(here.look())
    upload = Upload(here.objects, here.directory, holding)
    seen = there.look()
    with upload.signs(), pytest.raises(RunLocked, match=f"is in use by process {os.getpid()} on "):
        there.require_free(seen)
    began = time.monotonic()
    there.require_free(there.look())
    assert 2.9 < time.monotonic() - began < 10.0
    add_checkpoint(here.directory, 4)
    assert there.take(there.look()).number == 2
    with pytest.raises(MirrorTaken):
        upload.sync()
    assert steps(here) == []
    with pytest.raises(RunLocked):  # what it has seen is not true any more
        here.take(seen)


def test_a_mirror_that_was_given_back_is_free_at_once_and_to_its_own_directory_always(
    url: str, tmp_path: Path, elsewhere: None
) -> None:
    here, there = Mirror(url, directory(tmp_path / "here")), Mirror(url, directory(tmp_path / "there"))
    Upload(here.objects, here.directory, here.take(here.look())).release(is_complete=True)
    began = time.monotonic()
    there.require_free(there.look())
    there.take(there.look())
    there.require_free(there.look())
    assert time.monotonic() - began < 2.0
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    copy = Mirror(url, directory(tmp_path / "copy"))
    began = time.monotonic()
    copy.require_free(copy.look())
    assert time.monotonic() - began > 2.9, "a copy of a directory is not the directory"


def test_what_is_pruned_here_is_removed_there_when_a_newer_one_is_there(url: str, tmp_path: Path) -> None:
    mirror = Mirror(url, directory(tmp_path / "run"))
    upload = Upload(mirror.objects, mirror.directory, mirror.take(mirror.look()))
    add_checkpoint(mirror.directory, 4)
    upload.sync()
    manifest.discard(mirror.directory.checkpoints / "step_00000004")
    upload.sync()
    assert steps(mirror) == [(4, 1)]
    add_checkpoint(mirror.directory, 8)
    add_checkpoint(mirror.directory, 12)
    upload.sync()
    assert steps(mirror) == [(12, 1), (8, 1)]
    for step in (8, 12):  # a rollback: back to 6, and then another step 8
        manifest.discard(mirror.directory.checkpoints / manifest.directory_name(step))
    add_checkpoint(mirror.directory, 6)
    upload.sync()
    assert steps(mirror) == [(6, 1)]
    add_checkpoint(mirror.directory, 8, text="[]")
    upload.sync()
    assert (
        steps(mirror) == [(8, 1), (6, 1)]
        and mirror.objects.read("000001/checkpoints/step_00000008/shard-00001.safetensors") == b"[]"
    )


def test_a_later_holder_removes_the_checkpoints_of_an_earlier_and_of_none_before_its_beginning(
    url: str, tmp_path: Path
) -> None:
    mirror = Mirror(url, directory(tmp_path / "run"))
    (tmp_path / "run" / "config.yaml").touch()
    add_checkpoint(mirror.directory, 4)
    Upload(mirror.objects, mirror.directory, mirror.take(mirror.look())).sync()
    frozen = Upload(mirror.objects, mirror.directory, mirror.take(mirror.look()))
    for step in (8, 12):
        upload = Upload(mirror.objects, mirror.directory, mirror.take(mirror.look()))
        upload.sync()
        assert steps(mirror)[0][0] == step - 4
        add_checkpoint(mirror.directory, step)
        manifest.discard(mirror.directory.checkpoints / manifest.directory_name(step - 4))
        upload.sync()
        assert [step for step, _ in steps(mirror)] == [step]
    assert {name[:6] for name in mirror.objects.listing() if "claim" not in name} == {"000004"}
    with pytest.raises(MirrorTaken):  # though what the next holder has put is gone by now
        frozen.sync()
    mirror.directory.move_aside()
    mirror.begin_anew()
    anew = mirror.take(mirror.look())
    assert (anew.number, anew.begins) == (5, 5) and steps(mirror) == []
    add_checkpoint(mirror.directory, 2)
    Upload(mirror.objects, mirror.directory, anew).sync()
    assert steps(mirror) == [(2, 5)]
    assert "000004/checkpoints/step_00000012/manifest.json" in mirror.objects.listing()


@pytest.mark.parametrize("claim", [b"", b"{", b"[]", b'{"begins": "x", "token": 5}'])
def test_a_claim_that_a_kill_has_cut_short_hides_no_checkpoint(claim: bytes, url: str, tmp_path: Path) -> None:
    mirror = Mirror(url, directory(tmp_path / "run"))
    add_checkpoint(mirror.directory, 4)
    Upload(mirror.objects, mirror.directory, mirror.take(mirror.look())).sync()
    mirror.objects.write("000002/claim.json", claim)
    assert steps(mirror) == [(4, 1)]
    assert mirror.take(mirror.look()).number == 3


def test_a_holder_that_is_overtaken_while_it_prunes_removes_nothing_of_the_next(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Mirror(url, directory(tmp_path / "here")), Mirror(url, directory(tmp_path / "there"))
    add_checkpoint(here.directory, 4)
    upload = Upload(here.objects, here.directory, here.take(here.look()))
    upload.sync()
    add_checkpoint(here.directory, 8)
    original, calls = Upload._require, list[int]()

    def require(self: Upload) -> None:
        """Frozen behind the last check, of the pruning."""
        original(self)
        calls.append(1)
        if self is upload and len(calls) == 2:
            add_checkpoint(there.directory, 12)
            Upload(there.objects, there.directory, there.take(there.look())).sync()

    monkeypatch.setattr(Upload, "_require", require)
    upload.sync()
    assert (12, 2) in steps(there), "of the next holder"
    with pytest.raises(MirrorTaken):
        add_checkpoint(here.directory, 16)
        upload.sync()
