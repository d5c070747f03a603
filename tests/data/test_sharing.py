"""The processes of a node hold a small dataset once, and leave no file of it behind."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from framework.build import training
from framework.data.source import Source
from framework.runtime.environment import Environment
from tests.harness import finished

RUN = ["model=mlp", "model.dim=8", "trainer.max_epochs=null", "trainer.max_steps=3", "checkpoint.every=null",
       "parallel=ddp"]  # fmt: skip


def place_of(array: np.ndarray) -> tuple[str, str] | None:
    """Return (device and inode, path) of the file that the array's memory maps; None for memory without a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= array.ctypes.data < last:
            return (f"{device} {inode}", path[0]) if inode != "0" else None
    raise AssertionError("the array is nowhere in memory")


def note_places(folder: Path) -> Callable[[], None]:
    """Return what makes each rank of a command write down where its arrays are."""

    def plant() -> None:
        original = training.load_shared

        def load_shared(*args: object, **kwargs: object) -> Source:
            source = original(*args, **kwargs)  # type: ignore[arg-type]
            places = {name: place_of(array) for name, array in vars(source).items()}
            (folder / f"{Environment.read().rank}.json").write_text(json.dumps(places))
            return source

        training.load_shared = load_shared  # type: ignore[assignment]

    return plant


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_of_a_node_map_the_same_memory_and_no_file_is_left(ranks: int, tmp_path: Path) -> None:
    finished(*RUN, f"launch.nproc_per_node={ranks}", root=tmp_path / "runs", before=note_places(tmp_path))
    places = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert sorted(places[0]) == ["inputs", "targets"]
    for name in places[0]:
        assert len({place[name][0] for place in places}) == 1, places
        assert places[0][name][1] == "/memfd:steadfast_data (deleted)"  # it never had a name that could be left


def test_one_process_alone_shares_nothing(tmp_path: Path) -> None:
    finished(*RUN[:-1], root=tmp_path / "runs", before=note_places(tmp_path))
    places = json.loads((tmp_path / "0.json").read_text())
    assert places == {"inputs": None, "targets": None}
