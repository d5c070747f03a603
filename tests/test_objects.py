"""What the store must be able to do, on a real S3 server and on a file system; and a mirror's owner."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import framework.runs.mirror
from framework.checkpoint import manifest
from framework.checkpoint.format import digest
from framework.runs.directory import RunDirectory
from framework.runs.mirror import Mirror, MirrorTaken, committed
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


@pytest.mark.quick(1)
def test_of_several_that_create_an_object_one_succeeds(url: str) -> None:
    objects = Objects(url)
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            created = list(pool.map(lambda who, number=number: objects.create(str(number), bytes([who])), range(8)))
            assert created.count(True) == 1 and objects.read(str(number)) == bytes([created.index(True)])


def test_a_request_that_was_sent_twice_has_created_its_object(url: str) -> None:
    assert Objects(url).create("a", b"mine") and Objects(url).create("a", b"mine") and not Objects(url).create("a", b"yours")


@pytest.mark.parametrize("url", ["nothing", "s3://", "nosuch://bucket", "s3:/bucket"])
def test_what_is_no_url_is_a_problem(url: str) -> None:
    (problem,) = url_problems("run.mirror", url)
    assert problem.key == "run.mirror" and problem.code == 78


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "."])
def test_no_object_is_fetched_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="leads out"):
        inside(tmp_path, name)


# --- a mirror's owner


def add_checkpoint(run: RunDirectory, step: int, text: str = "{}") -> None:
    target = run.checkpoints / manifest.directory_name(step)
    staging = run.checkpoints / f".tmp_{target.name}"
    staging.mkdir(parents=True)
    shard = staging / "shard-00001.safetensors"
    shard.write_text(text)
    manifest.commit(staging, target=target, files={shard.name: digest(shard)}, state={})


def mirror_of(url: str, folder: Path) -> Mirror:
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(url, RunDirectory(folder))
    mirror.take()
    return mirror


def steps(mirror: Mirror) -> list[int | None]:
    return [manifest.step_of(Path(name)) for name in committed(mirror.objects.listing())]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be unable to look up processes: they are on another machine."""
    monkeypatch.setattr(framework.runs.mirror, "process_identity", dict)


def test_the_last_command_that_takes_a_mirror_writes_there_and_no_earlier_one(
    url: str, tmp_path: Path, elsewhere: None
) -> None:
    here = mirror_of(url, tmp_path / "here")
    add_checkpoint(here.directory, 4)
    here.sync()
    there = mirror_of(url, tmp_path / "there")
    assert there.bring_back() and steps(there) == [4]
    add_checkpoint(here.directory, 8)
    with pytest.raises(MirrorTaken, match="has been taken by another command"):
        here.sync()
    manifest.discard(here.directory.checkpoints / "step_00000008")
    with pytest.raises(MirrorTaken):
        here.sync(is_last=True)
    add_checkpoint(there.directory, 12)
    there.sync()
    assert steps(there) == [12, 4]


def test_a_living_process_of_this_machine_keeps_its_mirror(url: str, tmp_path: Path) -> None:
    mirror_of(url, tmp_path / "here")
    with pytest.raises(RunLocked, match=f"is in use by process {os.getpid()} on "):
        mirror_of(url, tmp_path / "there")


@pytest.mark.parametrize("owner", [b"", b"{", b"[]", b'{"pid": "x", "token": 5}'])
def test_an_owner_that_a_kill_has_cut_short_is_none(owner: bytes, url: str, tmp_path: Path) -> None:
    Objects(url).write("owner.json", owner)
    mirror = mirror_of(url, tmp_path / "run")
    add_checkpoint(mirror.directory, 4)
    mirror.sync()
    assert steps(mirror) == [4]


def test_what_is_pruned_here_is_removed_there_when_a_newer_one_is_there(url: str, tmp_path: Path) -> None:
    mirror = mirror_of(url, tmp_path / "run")
    add_checkpoint(mirror.directory, 4)
    mirror.sync()
    manifest.discard(mirror.directory.checkpoints / "step_00000004")
    mirror.sync()
    assert steps(mirror) == [4]
    add_checkpoint(mirror.directory, 8)
    add_checkpoint(mirror.directory, 12)
    mirror.sync()
    assert steps(mirror) == [12, 8]
    for step in (8, 12):  # a rollback: back to 6, and then another step 8
        manifest.discard(mirror.directory.checkpoints / manifest.directory_name(step))
    add_checkpoint(mirror.directory, 6)
    mirror.sync()
    assert steps(mirror) == [6]
    add_checkpoint(mirror.directory, 8, text="[]")
    mirror.sync()
    assert steps(mirror) == [8, 6] and mirror.objects.read("checkpoints/step_00000008/shard-00001.safetensors") == b"[]"


def test_nothing_is_asked_of_the_store_while_nothing_changes(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = mirror_of(url, tmp_path / "run")
    add_checkpoint(mirror.directory, 4)
    mirror.sync()
    monkeypatch.setattr(Objects, "_answer", lambda *_, **__: pytest.fail("a request"))
    mirror.sync()


def test_a_run_that_starts_over_leaves_the_earlier_one_beside(url: str, tmp_path: Path) -> None:
    mirror = mirror_of(f"{url}/run", tmp_path / "run")
    for step in (4, 8):
        add_checkpoint(mirror.directory, step)
        mirror.sync()
        mirror.move_aside()
        manifest.discard(mirror.directory.checkpoints / manifest.directory_name(step))
        mirror._committed.clear()
        mirror.take() if not mirror.objects.read("owner.json") else None
    assert steps(mirror) == []
    assert committed(Objects(f"{url}/run.old-1").listing()) == ["step_00000004"]
    assert committed(Objects(f"{url}/run.old-2").listing()) == ["step_00000008"]
