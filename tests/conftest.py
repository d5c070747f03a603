"""What all tests share: one thread, no network, warnings as errors (pyproject.toml names the exceptions)."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are CPUs: a test that waits leaves its CPU to another."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
