"""metrics.jsonl at a resume: cut where a checkpoint says, without reading a row; and read row by row where it is not as it was."""

from pathlib import Path

import pytest

from framework.runs import metrics_file
from framework.runs.history import read_history
from framework.runs.metrics_file import Mark, MetricsFile, read_rows


def written(path: Path, steps: range, *, mark: Mark | None = None) -> Mark:
    file = MetricsFile(path, step=steps[0] - 1, mark=mark)
    for step in steps:
        file.log({"step": step, "split": "train", "loss": 1 / step})
        if step % 10 == 0:
            file.log({"step": step, "split": "val", "loss": 1 / step})
            file.log({"step": step, "split": "test", "loss": 1 / step})
    file.flush()
    file.close()
    return file.mark


def test_a_file_that_is_as_it_was_is_cut_without_reading_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    mark = written(path, range(1, 41))
    assert mark.num_rows == 44 and mark.num_bytes == path.stat().st_size
    written(path, range(41, 60), mark=mark)
    inode, lines = path.stat().st_ino, path.read_bytes()[: mark.num_bytes]
    read = []
    monkeypatch.setattr(metrics_file.json, "loads", lambda *_: read.append(1))
    MetricsFile(path, step=40, mark=mark).close()
    assert not read and path.stat().st_ino == inode and path.read_bytes() == lines
    monkeypatch.undo()
    assert written(path, range(41, 60), mark=mark) == written(tmp_path / "whole.jsonl", range(1, 60))
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("damage", ["a byte", "a line lost", "a line twice", "all lines twice", "cut short", "foreign lines"])
def test_a_file_that_is_not_as_it_was_is_read_row_by_row(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    mark = written(path, range(1, 41))
    whole = read_rows(path)
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "a byte":
        lines[20] = lines[20].replace(b'"step"', b'"stap"')
    elif damage == "a line lost":
        del lines[20]
    elif damage == "a line twice":
        lines.insert(20, lines[20])
    elif damage == "all lines twice":
        lines *= 2
    elif damage == "foreign lines":
        lines += [b"5\n", b"[1]\n", b'{"no": "step"}\n', b"\xff\xfe\n", b'{"step": 3, "spl']
    else:
        lines[-1] = lines[-1][:10]
    path.write_bytes(b"".join(lines))
    file = MetricsFile(path, step=40, mark=mark)
    is_lost = damage in ("a byte", "a line lost")
    assert ("has lost 1 of the 44 rows" in caplog.text) == is_lost
    missing = {"a byte": [20], "a line lost": [20], "cut short": [len(whole) - 1]}.get(damage, [])
    assert read_rows(path) == [row for number, row in enumerate(whole) if number not in missing]
    assert file.mark.num_bytes == path.stat().st_size and file.mark.fits(path)
    file.close()


def test_of_many_training_rows_the_last_and_some_before_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 1001))
    some, every = (read_history(path, monitor="val/loss", mode="min", most=most, aside=("lr",)) for most in (40, 10**6))
    train = some["train/loss"].steps
    assert 20 <= len(train) <= 40 and train[-1] == 1000 and len({b - a for a, b in zip(train, train[1:-1])}) == 1
    assert len(some["val/loss"].steps) == 100
    rows = [row for row in read_rows(path) if row["split"] == "train"]
    assert [*zip(every["train/loss"].steps, every["train/loss"].values)] == [(row["step"], row["loss"]) for row in rows]
