"""Data in an object store, a real S3 server: fetched once, whole or not at all, and again when it changes there."""

import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import framework.runtime.objects
from framework.runtime.objects import Objects, StoreFailed, local_copy
from tests.harness import assert_same_bits, before_each, begin, command, end, finished, wait_for
from tests.s3_server import S3Server

QUICK = ["trainer.max_epochs=null", "trainer.max_steps=3", "trainer.log_every=1", "global_batch_size=8"]
GPT = ["model=gpt", "model.dim=16", "model.num_layers=1", "model.num_heads=2", "dataset.seq_len=8", *QUICK]
CNN = ["model=cnn", "model.channels=[4,8]", "dataset.image_size=8", *QUICK]


@pytest.fixture
def store(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    monkeypatch.setenv("STEADFAST_CACHE", str(tmp_path / "cache"))
    local_copy.cache_clear()
    return Objects(store)


def upload(store: Objects, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(path, str(path.relative_to(folder)))


def make_text(folder: Path) -> list[str]:
    (folder / "b").mkdir(parents=True)
    for name in ("a.py", "b/c.py"):
        (folder / name).write_text(f"{name} is a text\n" * 100)
    return ["dataset=text", *GPT]


def make_images(folder: Path) -> list[str]:
    for number in range(60):
        path = folder / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 4 * number, np.uint8)).save(path)
    return ["dataset=image_folder", *CNN]


@pytest.mark.slow
def test_a_dataset_in_a_store_is_the_dataset_in_a_folder(store: Objects, tmp_path: Path) -> None:
    line = make_images(tmp_path / "data")
    upload(store, tmp_path / "data")
    here = finished(*line, f"dataset.root={tmp_path}/data", root=tmp_path / "here")
    there = finished(*line, f"dataset.root={store.url}", root=tmp_path / "there")
    assert there.output.count(f"fetching {store.url}: ") == 1
    assert_same_bits(there, here)
    again = finished(*line, f"dataset.root={store.url}", "trainer.max_steps=2", root=tmp_path / "there")
    assert "fetching" not in again.output


@pytest.mark.slow
def test_commands_that_come_at_once_fetch_once(store: Objects, tmp_path: Path) -> None:
    line = [*make_text(tmp_path / "data"), f"dataset.root={store.url}"]
    upload(store, tmp_path / "data")
    roots = [tmp_path / f"runs_{number}" for number in range(3)]
    begun = [begin(*line, root=root) for root in roots]
    ended = [end(process, root=root) for process, root in zip(begun, roots)]
    assert [one.code for one in ended] == [0, 0, 0] and sum(one.output.count("fetching") for one in ended) == 1


@pytest.mark.slow
def test_one_object_and_a_pattern_are_data_too(store: Objects, tmp_path: Path) -> None:
    store.write("all.bin", np.arange(4000, dtype=np.uint16).tobytes())
    for name in ("x-0.tar", "x-1.tar", "y.tar", "deeper/x-2.tar"):
        store.write(name, name.encode())
    assert np.array_equal(np.fromfile(local_copy(f"{store.url}/all.bin"), np.uint16), np.arange(4000))
    pattern = Path(local_copy(f"{store.url}/x-*.tar"))
    assert pattern.name == "x-*.tar" and sorted(path.name for path in pattern.parent.iterdir()) == ["x-0.tar", "x-1.tar"]


def test_what_changes_in_the_store_is_fetched_again_by_the_next_command(store: Objects) -> None:
    store.write("a.txt", b"one")
    first = Path(local_copy(store.url), "a.txt")
    store.write("a.txt", b"two")  # of the same size
    assert Path(local_copy(store.url), "a.txt").read_bytes() == b"one", "a process sees one version"
    local_copy.cache_clear()  # as in another process
    assert Path(local_copy(store.url), "a.txt").read_bytes() == b"two" and first.read_bytes() == b"one"


def test_what_changes_while_it_is_fetched_is_no_copy(store: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("a.txt", b"one")
    original = Objects.get

    def get(self: Objects, name: str, path: Path) -> None:
        store.write(name, b"two")
        original(self, name, path)

    with monkeypatch.context() as change:
        change.setattr(Objects, "get", get)
        with pytest.raises(StoreFailed, match="has changed during the download"):
            local_copy(store.url)
    assert Path(local_copy(store.url), "a.txt").read_bytes() == b"two"


def kill_at_the_second_file() -> None:
    names = list[str]()

    def kill(objects: Objects, name: str, path: Path) -> None:
        if names:
            path.write_bytes(b"a part")
            os.kill(os.getpid(), signal.SIGKILL)
        names.append(name)

    before_each(Objects, "get", kill)


@pytest.mark.slow
def test_a_kill_leaves_no_part_of_the_data(store: Objects, tmp_path: Path) -> None:
    line = [*make_text(tmp_path / "data"), f"dataset.root={store.url}"]
    upload(store, tmp_path / "data")
    assert command(*line, root=tmp_path / "runs", before=kill_at_the_second_file).code == -signal.SIGKILL
    ended = finished(*line, root=tmp_path / "runs")
    assert ended.output.count("fetching") == 1
    assert_same_bits(ended, finished(*line[:-1], f"dataset.root={tmp_path}/data", root=tmp_path / "here"))


def slow_get() -> None:
    before_each(Objects, "get", lambda *_: (print("slowly", flush=True), time.sleep(1.0)))


def test_a_signal_ends_a_fetch_with_75(store: Objects, tmp_path: Path) -> None:
    line = [*make_text(tmp_path / "data"), f"dataset.root={store.url}"]
    upload(store, tmp_path / "data")
    process = begin(*line, root=tmp_path / "runs", before=slow_get)
    output = tmp_path / "runs.output"
    wait_for(lambda: output.exists() and "slowly" in output.read_text(), what="a fetch")
    process.terminate()
    ended = end(process, root=tmp_path / "runs")
    assert ended.code == 75 and "stopped before everything was fetched" in ended.output, ended.output


@pytest.mark.slow
def test_a_copy_that_was_cut_short_in_the_cache_is_fetched_again(store: Objects, tmp_path: Path) -> None:
    line = [*make_text(tmp_path / "data"), f"dataset.root={store.url}"]
    upload(store, tmp_path / "data")
    first = finished(*line, root=tmp_path / "first")
    (copy,) = (tmp_path / "cache").glob("*/b/c.py")
    os.truncate(copy, 100)
    again = finished(*line, root=tmp_path / "again")
    assert "fetching" in again.output
    assert_same_bits(again, first)


def silent_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A server that takes connections, and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    for name, value in S3Server(f"http://127.0.0.1:{listener.getsockname()[1]}").variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STEADFAST_CACHE", str(folder / "cache"))
    return listener


def test_a_store_that_never_answers_is_trouble_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient() -> None:
        framework.runtime.objects._PATIENCE_S = 1.0

    with silent_store(tmp_path, monkeypatch):
        line = [*make_text(tmp_path / "data"), "dataset.root=s3://silent/data"]
        refused = command(*line, root=tmp_path / "runs", before=impatient)
        assert refused.code == 74 and "cannot be listed: no answer in 1 s" in refused.output, refused.output


@pytest.mark.parametrize("asked", ["dataset.root", "run.mirror"])
def test_a_signal_is_answered_while_a_store_is_silent(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_store(tmp_path, monkeypatch) as listener:
        waits = begin(*make_text(tmp_path / "data"), f"{asked}=s3://silent/there", "rehearse=false", root=tmp_path / "runs")
        connection, _ = listener.accept()
        began = time.monotonic()
        waits.terminate()
        ended = end(waits, root=tmp_path / "runs")
        assert ended.code == 75 and time.monotonic() - began < 5, ended.output
        connection.close()


@pytest.mark.quick(2)
@pytest.mark.parametrize("wrong", ["no bucket", "no key", "no package"])
def test_data_that_is_not_to_be_had_is_a_problem_before_the_start(
    wrong: str, server: S3Server, store: Objects, tmp_path: Path
) -> None:
    root, said = {
        "no bucket": ("s3://elsewhere/data", "bucket does not exist"),
        "no key": (store.url, "cannot be listed: "),
        "no package": ("gs://bucket/data", "gcsfs not installed (pip install gcsfs)"),
    }[wrong]
    if wrong == "no key":
        server.refuse()
    ended = command("dataset=text", *GPT, f"dataset.root={root}", "optimizer.lr=-1", root=tmp_path / "runs")
    assert ended.code == 78 and "Traceback" not in ended.output and not list((tmp_path / "runs").iterdir())
    (line,) = (line for line in ended.output.splitlines() if line.startswith("dataset.root: "))
    assert said in line
