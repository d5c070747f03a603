"""mode=bench: what a back end's collectives take. Nothing is trained, and no run is touched."""

import re
from pathlib import Path

import pytest

from framework.modes.bench import COLLECTIVES
from tests.harness import command, finished

RUN = ["parallel=ddp", "launch.nproc_per_node=3", "bench.largest_mib=1", "mode=bench"]


def test_each_collective_is_timed_by_size_and_no_run_is_touched(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = finished("model=mlp", "model.dim=4", "dataset=synthetic", "dataset.num_train=8", "trainer.max_steps=1", root=root)
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    ended = command(*RUN, root=root)
    assert ended.code == 0, ended.output
    for collective in COLLECTIVES:
        found = re.findall(rf"^{collective.name} +([\d,]+) +([\d,.]+) +([\d.]+)$", ended.output, flags=re.M)
        sizes = [int(size.replace(",", "")) for size, _, _ in found]
        assert len(sizes) == 4 and sizes == sorted(sizes) and all(size % 12 == 0 for size in sizes), ended.output
        assert all(float(us.replace(",", "")) > 0 for _, us, _ in found)
        rate = sizes[-1] * collective.share(3) / (float(found[-1][1].replace(",", "")) / 1e6) / 1e9
        assert float(found[-1][2]) == pytest.approx(rate, abs=0.006)
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before


def test_what_a_back_end_lacks_is_said_and_the_others_are_timed(tmp_path: Path) -> None:
    def plant() -> None:
        from framework.modes import bench

        def lacking(*_: object) -> None:
            raise RuntimeError("no such thing\nhere")

        bench.COLLECTIVES = (bench.COLLECTIVES[0]._replace(run=lacking), bench.COLLECTIVES[4])

    ended = command(*RUN, root=tmp_path, before=plant)
    assert ended.code == 0
    assert re.search(r"^all_reduce +- +no such thing here$", ended.output, flags=re.M)
    assert len(re.findall(r"^broadcast ", ended.output, flags=re.M)) == 4


def test_one_process_is_refused(tmp_path: Path) -> None:
    ended = command("mode=bench", root=tmp_path)
    assert ended.code == 78
    assert re.search("mode: bench.*only one process.*launch.nproc_per_node=2", ended.output)
