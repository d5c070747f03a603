"""What all tests share: one thread, no network, warnings as errors (pyproject.toml names the exceptions)."""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.s3_server import S3Server

KEEPS_BYTECODE = not sys.dont_write_bytecode
sys.dont_write_bytecode = False  # while tests are collected: else each process compiles all of them, a quarter of the time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and then it stops no run
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = (
    "passive"  # the threads of a rehearsal that wait for each other leave the CPU to the other tests
)
os.environ["WANDB_MODE"] = "offline"
MACHINE = os.environ["PYTHONPATH"] = str(Path(__file__).with_name("machine"))
CACHE = tempfile.TemporaryDirectory(prefix="steadfast_cache_")
os.environ["STEADFAST_CACHE"] = CACHE.name
os.environ["HF_DATASETS_CACHE"] = f"{CACHE.name}/tables"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(MACHINE)
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401  # of this folder, unless this Python has one

LONG = (
    "test_product", "test_tutorial", "test_rehearsal", "test_conformance", "test_wandb", "test_cuda", "test_extend",
    "test_loop", "test_from_lightning", "test_mpi", "test_evaluate", "test_provenance", "test_mps",
)  # fmt: skip


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are CPUs: a test that waits leaves its CPU to another."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="of the tests that were chosen, run one part of several: 1/6, then 2/6, ...")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of a test after its first N as slow, if it is marked `quick(N)`. Then keep the tests of `--part`.

    The parts are made by the tests' names, so that each test always is in the same part. Files that take long go first.
    """
    sys.dont_write_bytecode = not KEEPS_BYTECODE
    seen = Counter[str]()
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None and item.get_closest_marker("slow") is None:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > quick.args[0]:
                item.add_marker("slow")
    items.sort(key=lambda item: item.path.stem not in LONG)
    part, parts = map(int, config.getoption("--part").split("/"))
    in_part = [zlib.crc32(item.nodeid.encode()) % parts == part - 1 for item in items]
    config.hook.pytest_deselected(items=[item for item, is_in in zip(items, in_part) if not is_in])
    items[:] = [item for item, is_in in zip(items, in_part) if is_in]


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: a collection would only look at it


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(scope="module")
def server() -> Iterator["S3Server"]:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from tests.s3_server import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def store(server: "S3Server", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL of the test's own in an S3 server, which this process and its commands can reach."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    yield server.url_of(tmp_path.name)
    server.accept()
