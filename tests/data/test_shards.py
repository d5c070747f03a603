"""Records in shards: what is written is read, by its number, from any process; damage is named."""

import builtins
import io
import json
import multiprocessing
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from framework.data.shards import Shards, Tables, Tar, write_tar

SIZES = (5, 1, 7)


def records(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"input.npy": np.arange(3) + number, "cls": number % 4, "txt": f"sample {number}"}
        for number in range(first, first + count)
    ]


def tars(folder: Path) -> str:
    for number, size in enumerate(SIZES):
        write_tar(folder / f"train-{number}.tar", records(sum(SIZES[:number]), size))
    return str(folder / "train-*.tar")


def lines(folder: Path) -> str:
    for number in range(len(SIZES)):
        rows = [{"text": f"sample {i} äöü", "label": i % 4} for i in range(sum(SIZES[:number]), sum(SIZES[: number + 1]))]
        text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / f"train-{number}.jsonl").write_text(text + "\n" * (number % 2))
    return str(folder / "train-*.jsonl")


def parquet(folder: Path) -> str:
    for number in range(len(SIZES)):
        values = list(range(sum(SIZES[:number]), sum(SIZES[: number + 1])))
        table = pyarrow.table({"x": [[v, v + 1] for v in values], "label": [v % 4 for v in values]})
        pyarrow.parquet.write_table(table, folder / f"train-{number}.parquet", row_group_size=3)
    return str(folder / "train-*.parquet")


def of_kind(kind: str, folder: Path) -> Shards:
    if kind == "tar":
        return Tar(tars(folder))
    return Tables(lines(folder) if kind == "jsonl" else parquet(folder))


def check(shards: Shards, kind: str) -> None:
    assert len(shards) == sum(SIZES) and shards.cumulative_sizes == [5, 6, 13]
    for number in (12, 0, 5, 6, 4, *range(13)):
        record = shards[number]
        if kind == "tar":
            assert record["input.npy"].tolist() == [number, number + 1, number + 2]
            assert record["cls"] == number % 4 and record["txt"] == f"sample {number}"
        elif kind == "jsonl":
            assert record == {"text": f"sample {number} äöü", "label": number % 4}
        else:
            assert record == {"x": [number, number + 1], "label": number % 4}


@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet"])
def test_each_record_can_be_read_by_its_number(kind: str, tmp_path: Path) -> None:
    shards = of_kind(kind, tmp_path)
    check(shards, kind)
    with pytest.raises(IndexError):
        shards[13]
    assert shards.name_of(6).endswith(f"train-2.{kind}, record 0")


@pytest.mark.parametrize("kind", ["tar", "jsonl"])
def test_forked_processes_read_the_same_open_files(kind: str, tmp_path: Path) -> None:
    shards = of_kind(kind, tmp_path)
    check(shards, kind)  # now they are open
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=check, args=(shards, kind)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet"])
def test_the_records_of_a_file_are_counted_once_until_the_file_changes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    original = io.open

    def noted(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(str(file))
        return original(file, *arguments, **options)

    check(of_kind(kind, tmp_path), kind)
    for module in (tarfile,) if kind == "tar" else (builtins, io):  # reading a record of a tar file opens it, without tarfile
        monkeypatch.setattr(module, "open" if module is not tarfile else "bltn_open", noted)
    pattern = str(tmp_path / f"train-*.{kind}")
    check(Tar(pattern) if kind == "tar" else Tables(pattern), kind)
    assert not [path for path in opened if path.endswith(f".{kind}")]
    last, first = tmp_path / f"train-2.{kind}", tmp_path / f"train-0.{kind}"
    last.write_bytes(first.read_bytes())
    assert len(Tar(pattern) if kind == "tar" else Tables(pattern)) == 5 + 1 + 5


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{no json")
    with pytest.raises(ValueError, match=r"a\.jsonl cannot be read as json"):
        Tables(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.xls").touch()
    with pytest.raises(ValueError, match=r"a\.xls is not a table \(\.jsonl"):
        Tables(str(tmp_path / "a.xls"))


def test_images_and_json_in_a_tar_file_are_decoded(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    write_tar(tmp_path / "a.tar", [{"png": file.getvalue(), "json": {"boxes": [1, 2]}, "cls": np.int64(3), "bin": b"\x00\x01"}])
    (record,) = [Tar(str(tmp_path / "a.tar"))[0]]
    assert np.array_equal(record["png"], pixels.transpose(2, 0, 1))
    assert record["json"] == {"boxes": [1, 2]} and record["cls"] == 3 and record["bin"] == b"\x00\x01"
    with pytest.raises(TypeError, match="a set cannot be in a record"):
        write_tar(tmp_path / "b.tar", [{"json": {1, 2}}])


def test_nothing_in_a_tar_file_is_unpickled(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    write_tar(tmp_path / "a.tar", [{"npy": file.getvalue()}])
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Tar(str(tmp_path / "a.tar"))[0]


def test_what_is_no_tar_file_and_what_is_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(ValueError, match=r"a\.tar cannot be read as a tar file"):
        Tar(str(tmp_path / "a.tar"))
    whole = Tar(tars(tmp_path).replace("train-*", "train-2"))
    content = (tmp_path / "train-2.tar").read_bytes()
    (tmp_path / "train-2.tar").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="ends within"):
        whole[6]
    with pytest.raises(ValueError, match="there is no such file"):
        Tar(str(tmp_path / "missing-*.tar"))
