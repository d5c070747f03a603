"""The fingerprint of a split, and a run whose data change between two starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from pydantic import TypeAdapter
from torch.utils.data import TensorDataset

from framework.checkpoint.state import Word
from framework.data.fingerprint import changes, fingerprint
from framework.data.map_style import MapStyle
from framework.data.source import Arrays, Files, Selected, Source, Windows
from tests.harness import command
from tests.test_resume import preempted

IMAGES, LABELS = np.arange(40, dtype=np.uint8).reshape(10, 4), np.arange(10)
NUMBERS = torch.linspace(-1, 1, 50_000).reshape(100, 500)


class Words:
    """A dataset of a user: texts and numbers, drawn when they are fetched."""

    def __init__(self, *, scale: float = 1.0, word: str = "word", length: int = 20) -> None:
        self.scale, self.word, self.length = scale, word, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"text": f"{self.word} {number}", "number": self.scale * (number + torch.rand(3)), "odd": object()}


class Rows:
    """A dataset of a user: the rows of a table."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return dict(self.frame.iloc[number])


def of(samples: Any) -> Source:
    return MapStyle(train=lambda: samples, val=lambda: samples, test=lambda: samples).load("train")


def changed(array: Any, at: Any, by: Any = 1) -> Any:
    other = array.clone() if isinstance(array, torch.Tensor) else array.copy()
    other[at] += by
    return other


@pytest.mark.parametrize(("one", "other", "what"), [
    (Arrays(IMAGES, LABELS), Arrays(changed(IMAGES, (3, 2)), LABELS), ["inputs has other content"]),
    (Arrays(IMAGES, LABELS), Arrays(IMAGES, changed(LABELS, 9)), ["targets has other content"]),
    (Arrays(IMAGES, LABELS), Selected(Arrays(IMAGES[:9], LABELS[:9]), np.arange(3)),
     ["length 10, now 9", "inputs uint8 [10, 4], now uint8 [9, 4]", "targets int64 [10], now int64 [9]"]),
    (Windows(LABELS, 3), Windows(changed(LABELS, 0), 3), ["tokens has other content"]),
    (of(TensorDataset(NUMBERS)), of(TensorDataset(NUMBERS.flip(0))),
     ["samples.tensors.0 has other content", "sample 0 has other content", "sample 99 has other content"]),
    (of(TensorDataset(NUMBERS)), of(TensorDataset(NUMBERS * 1.001)), ["samples.tensors.0 has other content"]),
    (of(Words()), of(Words(word="Word")), ["sample 0 has other content"]),
    (of(Words()), of(Words(scale=1.01)), ["sample 0 has other content"]),
    (of(Words()), of(Words(length=21)), ["length 20, now 21"]),
    (Arrays(np.array(["a", "b"], dtype=object), LABELS[:2]), Arrays(np.array(["a", "c"], dtype=object), LABELS[:2]),
     ["inputs has other content"]),
])  # fmt: skip
def test_other_data_are_found_and_named(one: Source, other: Source, what: list[str]) -> None:
    before, now = (fingerprint(source, seed=0) for source in (one, other))
    found = changes(before, now, but_for_rounding=True)
    assert set(what) <= set(found), found
    assert not changes(before, fingerprint(one, seed=0), but_for_rounding=False)


@pytest.mark.parametrize("kind", ["datasets", "pandas"])
def test_a_label_in_a_table_is_found(kind: str) -> None:
    def table(odd: int) -> Any:
        columns = {"text": [f"text {n}" for n in range(400)], "label": [n % 3 if n != 201 else odd for n in range(400)]}
        return datasets.Dataset.from_dict(columns) if kind == "datasets" else Rows(pandas.DataFrame(columns))

    before, now = (fingerprint(of(table(odd)), seed=0) for odd in (0, 1))
    (found,) = changes(before, now, but_for_rounding=True)
    assert found.endswith("label has other content")
    assert not changes(before, fingerprint(of(table(0)), seed=0), but_for_rounding=False)


def test_a_table_may_have_two_columns_of_one_name() -> None:
    frame = pandas.DataFrame([[1, 2.0], [3, 4.0]], columns=["a", "a"])
    assert "samples.frame.a" in fingerprint(of(Rows(frame)), seed=0)


def test_large_numbers_do_not_hide_others() -> None:
    """A time in seconds beside features."""
    one, other = (np.random.RandomState(seed).randn(2000, 5).astype(np.float32) for seed in (1, 2))
    one[:, 0] = other[:, 0] = 1.7e9
    before, now = (fingerprint(Arrays(table, np.zeros(2000)), seed=0) for table in (one, other))
    assert changes(before, now, but_for_rounding=True) == ["inputs has other content"]


def test_rounding_is_seen_and_is_no_other_data() -> None:
    before, now = (fingerprint(of(TensorDataset(NUMBERS * scale)), seed=0) for scale in (1.0, 1 + 1e-7))
    assert not changes(before, now, but_for_rounding=True)
    assert "samples.tensors.0 has other content" in changes(before, now, but_for_rounding=False)


def test_of_a_mapped_file_the_ends_and_blocks_between_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(bytes(1 << 23))
    ids = np.memmap(tmp_path / "ids", np.uint16, "r+")
    before = fingerprint(Windows(ids, 8), seed=0)
    for place, is_found in ((0, True), (-1, True), (len(ids) // 2, False)):  # 64 blocks have half of the file
        ids[place] += 1
        assert bool(changes(before, fingerprint(Windows(ids, 8), seed=0), but_for_rounding=True)) == is_found, place
        ids[place] -= 1


class Listed(Words):
    """A dataset of a user that holds a list of its samples' files and labels, as torchvision's ImageFolder does."""

    def __init__(self, items: Any) -> None:
        super().__init__(length=200)
        self.items = self.imgs = items


@pytest.mark.parametrize("pair", [
    lambda folder, number, label: (f"{folder}/{number % 3}/{number}.png", label),
    lambda folder, number, label: {"path": Path(folder, str(number)), "label": np.int64(label)},
    lambda folder, number, label: label / 2,
], ids=["pairs", "mappings", "labels"])  # fmt: skip
@pytest.mark.parametrize("kind", [list, tuple, lambda pairs: dict(enumerate(pairs))], ids=["list", "tuple", "dict"])
def test_of_lists_of_numbers_and_texts_all_entries_count_and_their_folder_does_not(pair: Any, kind: Any) -> None:
    def found(folder: str = "/data/a", odd: int = -1) -> dict[str, str]:
        return fingerprint(of(Listed(kind([pair(folder, number, 7 * (number == odd)) for number in range(200)]))), seed=0)

    assert found()["samples.items"].startswith("200 entries ") and "samples.imgs" not in found()
    assert changes(found(), found("/elsewhere/b"), but_for_rounding=False) == []
    assert changes(found(), found(odd=101), but_for_rounding=True) == ["samples.items has other content"]


def test_of_files_names_sizes_and_contents_count(tmp_path: Path) -> None:
    def source(folder: Path) -> Files:
        return Files([str(path) for path in sorted(folder.iterdir())], np.zeros(3, dtype=np.int64), decode=lambda path: IMAGES)

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in "xyz":
            (tmp_path / folder / name).write_text(name)
    before = fingerprint(source(tmp_path / "a"), seed=0)
    assert changes(before, fingerprint(source(tmp_path / "b"), seed=0), but_for_rounding=False) == []
    (tmp_path / "b" / "y").write_text("Y")
    assert changes(before, fingerprint(source(tmp_path / "b"), seed=0), but_for_rounding=True) == ["contents has other content"]
    (tmp_path / "b" / "y").rename(tmp_path / "b" / "yy")
    assert "names has other content" in changes(before, fingerprint(source(tmp_path / "b"), seed=0), but_for_rounding=True)


class Odd:
    """A dataset that holds what no file or torch can hold, and a name that no text can."""

    def __init__(self) -> None:
        self.held = {"a\nb" * 500: np.ones(3, dtype=np.longdouble), "big": np.ones(3, dtype=">f4"), "sparse": torch.eye(3).to_sparse(),
                     "meta": torch.empty(3, device="meta"), "fields": np.zeros(2, dtype=[("x" * 400, "i4"), ("y", "f4")]),
                     "half": torch.ones(3, dtype=torch.bfloat16), "none": np.zeros((0, 3)), "flag": torch.tensor(True)}  # fmt: skip
        self.me = self

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        raise ValueError("damaged")


def test_a_fingerprint_never_fails_and_a_checkpoint_can_hold_it() -> None:
    found = fingerprint(of(Odd()), seed=0)
    words = TypeAdapter(dict[Word, Word])
    assert words.validate_python(found) == found and len(found) > 8
    assert not changes(found, fingerprint(of(Odd()), seed=0), but_for_rounding=False)


LINE = ["dataset=tokens", "dataset.vocab_size=50", "dataset.seq_len=16", "model=gpt", "model.dim=8", "model.num_layers=1",
        "model.num_heads=1", "trainer.max_steps=30", "trainer.eval_every=2", "trainer.log_every=1", "checkpoint.every=1"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("split", "strategy"), [("train", ["parallel=ddp", "launch.nproc_per_node=2"]), ("val", [])])
def test_a_run_goes_on_with_its_own_data_alone(split: str, strategy: list[str], tmp_path: Path) -> None:
    ids = np.arange(4000) % 50
    write: Callable[[str, np.ndarray], Any] = lambda name, ids: ids.astype(np.uint16).tofile(tmp_path / f"{name}.bin")  # noqa: E731
    for name in ("train", "val"):
        write(name, ids)
    line = [*LINE, f"dataset.root={tmp_path}", *strategy]
    stopped = preempted(*line, at=3, root=tmp_path / "runs")
    before = stopped.summary
    write(split, changed(ids, 7))
    refused = command(*line, root=tmp_path / "runs")
    assert refused.code == 78, refused.output
    assert f"run.data: the data are not those of the checkpoint: {split}: tokens has other content" in refused.output
    assert refused.summary == before, "the run is as it was"
    write(split, ids)
    restored = preempted(*line, at=6, root=tmp_path / "runs")
    assert "continuing from" in restored.output, restored.output
    write(split, changed(ids, 7))
    accepted = command(*line, "run.data=accept", root=tmp_path / "runs")
    assert accepted.code == 0 and accepted.directory == stopped.directory, accepted.output
    start = json.loads((accepted.directory / "provenance.json").read_text())["starts"][-1]
    assert start["accepted"] == [f"{split}: tokens has other content"]
    assert start["data"]["train"]["length"] == "249" and start["data"].keys() >= {"train", "val", "test"}
    assert command(*line, root=tmp_path / "runs").code == 0
    write("val", ids[:3000])
    of_finished = command(*line, root=tmp_path / "runs")
    assert of_finished.code == 78 and "run.data: " in of_finished.output and "val: length " in of_finished.output
    assert "finished already" not in of_finished.output and of_finished.summary["status"] == "finished"
    write("val", changed(ids, 7) if split == "val" else ids)
    same = command("mode=eval", f"run.dir={accepted.directory}", f"eval.split={split}", root=tmp_path / "runs")
    write(split, ids)
    other = command("mode=eval", f"run.dir={accepted.directory}", f"eval.split={split}", root=tmp_path / "runs")
    assert (same.code, other.code) == (0, 0) and "have changed" not in same.output
    assert f"the data of {split} have changed since the run: tokens has other content" in other.output
