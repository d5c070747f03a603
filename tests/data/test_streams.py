"""Streams: the order is that of the stream for any number of processes, and a killed run goes on at its place."""

import dataclasses
import json
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from framework.data.stream import ENDLESS, Stream, Streamed
from framework.randomness import seeded
from tests.harness import assert_close, command, finished, refused
from tests.test_any_data import RUN, TWO, Net
from tests.test_resume import after_step, crash

NET = ["dataset=stream", "dataset.facts={num_classes:4}", "model._target_=tests.test_any_data.Net", "micro_batch_size=3"]


def point(label: int, noise: float = 0.0) -> Tensor:
    return torch.full((12,), float(label % 4)) + torch.arange(12) * 0.1 * (1 + label % 7) + noise


class Drawn(IterableDataset[Any]):
    """Draws from every generator, shuffles by its epoch, and divides itself among loader processes: as torch's documentation does."""

    def __init__(self, size: int = 45) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order, worker = np.random.RandomState(self.epoch).permutation(self.size), get_worker_info()
        for number in order if worker is None else order[worker.id :: worker.num_workers]:
            noise = float(torch.randn(())) + np.random.uniform() + random.random()
            yield point(int(number), noise * 0.1), int(number) % 4


class Divided(Drawn):
    """Divides itself among the processes, as code for DistributedSampler's users does."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from list(super().__iter__())[rank::size]


class Sized(Drawn):
    def __len__(self) -> int:
        return self.size


class Remembering(IterableDataset[Any]):
    """Has a state, and notes in a file which samples are read."""

    def __init__(self, size: int = 1000, file: str = "") -> None:
        self.size, self.file, self.at = size, file, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            self.at += 1
            if self.file:
                with open(self.file, "a") as file:
                    file.write(f"{self.at - 1}\n")
            yield point(self.at - 1), (self.at - 1) % 4
        self.at = 0


class Lent(IterableDataset[Any]):
    """Works in the state that it was given, as in a buffer of a shuffle."""

    def __init__(self) -> None:
        self.left = [*range(20)]

    def state_dict(self) -> dict[str, Any]:
        return {"left": [*self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            number = self.left.pop()
            yield point(number), number


class Forgetful(Remembering):
    """Yields its samples in groups that are reversed, which its state does not know: as the buffer of a shuffle."""

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        while group := [*islice(items, 11)]:
            yield from reversed(group)


class Shuffled(Remembering):
    """Has a buffer that its state does not hold; after a restore, one of three samples is the next by chance."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


def lines(path: str) -> Iterator[Any]:
    """A generator function."""
    with open(path) as file:
        for line in file:
            record = json.loads(line)
            yield {"x": point(record["n"]).tolist(), "y": record["n"] % 4, "name": "n" * record["n"]}


@dataclasses.dataclass
class Told:
    x: Any
    text: Any
    spans: Any  # of other lengths


def told() -> Iterator[Any]:
    """Samples as a corpus has them: a dataclass with a text and an uneven list, and a label."""
    yield from ((Told(point(i), "a" * (i % 5), list(range(i % 4))), i % 4) for i in range(45))


def as_told(samples: list[Any]) -> Any:
    batch = Told(
        torch.stack([told.x for told, _ in samples]), [told.text for told, _ in samples], [told.spans for told, _ in samples]
    )
    return batch, torch.tensor([y for _, y in samples])


class Reader(Net):
    def forward(self, batch: Any) -> Tensor:
        lengths = torch.tensor([[len(text) + sum(spans)] for text, spans in zip(batch.text, batch.spans)], dtype=batch.x.dtype)
        return super().forward(batch.x + 0.1 * lengths)


def loaded(size: int = 45) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*set_vital")  # torchdata calls it
        return StatefulDataLoader(Drawn(size), batch_size=5, num_workers=2, collate_fn=swapped)


def swapped(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]) * 2, torch.tensor([y for _, y in samples])


def streamed(path: str, buffer: int = 0) -> Any:
    from datasets import load_dataset

    found = load_dataset("json", data_files=path, split="train", streaming=True)
    found = found.map(as_point, remove_columns=["n"])
    return found.shuffle(seed=3, buffer_size=buffer) if buffer else found


def as_point(record: dict[str, Any]) -> dict[str, Any]:
    return {"x": point(record["n"]).tolist(), "y": record["n"] % 4}


def written(folder: Path) -> list[Path]:
    files = [folder / f"part-{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text("".join(json.dumps({"n": number + 3 * i}) + "\n" for i in range(17 + number)))
    return files


def of(name: str, val: str = "{_target_: tests.data.test_streams.Drawn, size: 12}", **arguments: Any) -> list[str]:
    """Return the words for a stream, and one for validation; without it, the first samples."""
    inner = "".join(f", {key}: {value!r}" for key, value in arguments.items())
    own = f"dataset.val={val}" if val else "dataset.length.val=12"
    return ["dataset.train={_target_: tests.data.test_streams." + name + inner + "}", own]


def held_out(folder: Path) -> str:
    return f"{{_target_: tests.data.test_streams.streamed, path: '{folder / 'part-0.jsonl'}'}}"


KEYED = ["dataset.inputs=x", "dataset.targets=y"]
LINES: dict[str, Any] = {
    "endless epochs": lambda _: of("Drawn"),
    "a length": lambda _: of("Sized"),
    "divided among processes": lambda _: of("Divided"),
    "a length that is said": lambda _: [*of("Drawn"), "dataset.length.train=25"],
    "a generator": lambda folder: [*of("lines", "", path=str(written(folder)[0])), *KEYED, "dataset.collate={_target_: tests.data.test_streams.without_names, _partial_: true}"],
    "dataclasses and texts": lambda _: [*of("told", ""), "dataset.collate={_target_: tests.data.test_streams.as_told, _partial_: true}", "model._target_=tests.data.test_streams.Reader"],
    "a loader": lambda _: of("loaded", "{_target_: tests.data.test_streams.loaded, size: 12}"),
    "Hugging Face": lambda folder: [*of("streamed", held_out(folder), path=str(written(folder)[0].with_name("part-*.jsonl"))), *KEYED],
    "Hugging Face, shuffled": lambda folder: [
        *of("streamed", held_out(folder), path=str(written(folder)[0].with_name("part-*.jsonl")), buffer=7),
        *KEYED,
    ],
    "a state": lambda _: of("Remembering"),
    "a state that does not hold all": lambda _: of("Forgetful"),
}  # fmt: skip


def without_names(samples: list[Any]) -> Any:
    return {"x": torch.tensor([sample["x"] for sample in samples]), "y": torch.tensor([sample["y"] for sample in samples])}


@pytest.mark.slow
@pytest.mark.parametrize("what", LINES)
def test_the_number_of_processes_and_of_loader_processes_changes_nothing(what: str, tmp_path: Path) -> None:
    line = [*RUN, *NET, *LINES[what](tmp_path)]
    one = finished(*line, root=tmp_path / "one")
    assert_close(finished(*line, "parallel=ddp", TWO, "dataset.num_workers=2", "rehearse=true", root=tmp_path / "two"), one)


@pytest.mark.slow
@pytest.mark.parametrize("what", sorted(LINES, key=lambda what: what != "a length"))
def test_killed_it_goes_on_in_the_middle_with_the_same_numbers(what: str, tmp_path: Path) -> None:
    line = [*RUN, *NET, *LINES[what](tmp_path)]
    whole = finished(*line, root=tmp_path / "whole")
    two = ["parallel=ddp", TWO, "dataset.num_workers=1"]
    assert command(*line, *two, root=tmp_path / "cut", before=after_step(5, crash)).code < 0
    assert_close(finished(*line, root=tmp_path / "cut"), whole)  # and by one process, which changes nothing


@pytest.mark.slow
def test_a_state_saves_the_reading_of_what_came_before_if_it_leads_to_the_same_sample(tmp_path: Path) -> None:
    for name, is_saved in (("Remembering", True), ("Forgetful", False)):
        file = tmp_path / f"{name}.txt"
        line = [
            *RUN,
            *NET,
            *of(name, size=1000, file=str(file)),
            "trainer.max_steps=70",
            "trainer.eval_every=null",
            "checkpoint.every=60",
        ]
        assert command(*line, root=tmp_path / name, before=after_step(65, crash)).code < 0
        read_before = len(file.read_text().splitlines())
        ended = finished(*line, root=tmp_path / name)
        read = len(file.read_text().splitlines()) - read_before
        assert ("its state does not lead to the next sample" in ended.output) is not is_saved, ended.output
        assert read < 300 if is_saved else read > 700, (name, read)


REFUSED = {
    "epochs of a stream without an end": ([*of("Drawn"), "trainer.max_epochs=2", "trainer.max_steps=null"], "trainer.max_epochs counts epochs, and the stream of training samples has no length"),
    "an evaluation each epoch": ([*of("Drawn"), "trainer.eval_every=1ep"], "trainer.eval_every counts epochs"),
    "a sampler": ([*of("Drawn"), "sampler=weighted"], "sampler: a stream of training samples has its own order"),
    "folds": ([*of("Drawn"), "dataset.folds=3", "dataset.fold=0"], "dataset.folds: a stream has no folds"),
    "an index": ([*of("indexed")], "a list has an index (dataset=map_style takes it)"),
    "too short": ([*of("Drawn", size=30), "dataset.length.train=50"], "the stream has ended before sample 30 of 50 (dataset.length.train)"),
    "None": ([*of("holed")], "sample 15 of train: it is None (leave it out of the stream)"),
    "another each time": ([*of("Restless")], "dataset: the same samples differ each time"),
    "nothing": ([*of("Drawn", size=0)], "dataset.train: has no sample"),
}  # fmt: skip


def indexed() -> list[Any]:
    return [(point(i), i % 4) for i in range(40)]


def holed() -> Iterator[Any]:
    yield from [(point(i), i % 4) if i != 15 else None for i in range(40)]


class Restless(Drawn):
    """Draws its order from a generator of its own."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((point(int(i)), int(i) % 4) for i in np.random.default_rng().permutation(self.size))


@pytest.mark.quick(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_run_could_repeat_is_refused_before_the_start(what: str) -> None:
    words, expected = REFUSED[what]
    assert expected in refused(*RUN, *NET, *words, "rehearse=true")


def stored(shards: str) -> Any:
    import litdata

    warnings.filterwarnings("ignore", "The given buffer is not writable")
    return litdata.StreamingDataset(shards)


def record(number: int) -> Any:
    return point(number), number % 4


@pytest.mark.slow
def test_a_dataset_that_fetches_its_files_and_divides_itself_is_read_by_number(tmp_path: Path) -> None:
    """LitData's: each process finds one process, and the run orders the samples so that files are read one after the other."""
    litdata = pytest.importorskip("litdata")
    shards = str(tmp_path / "shards")
    write = f"import litdata; from tests.data.test_streams import record; litdata.optimize(record, list(range(60)), output_dir={shards!r}, chunk_size=16, num_workers=1)"
    subprocess.run([sys.executable, "-c", write], check=True, capture_output=True, timeout=120)
    assert len(litdata.StreamingDataset(shards)) == 60
    line = [*RUN, "dataset=map_style", f"dataset.train={{_target_: tests.data.test_streams.stored, shards: '{shards}'}}", "dataset.facts={num_classes: 4}",
            "model._target_=tests.test_any_data.Net", "micro_batch_size=3", "sampler=windowed", "sampler.window=16"]  # fmt: skip
    one = finished(*line, root=tmp_path / "one")
    assert_close(finished(*line, "parallel=ddp", TWO, "dataset.num_workers=2", "rehearse=true", root=tmp_path / "two"), one)


def test_a_place_is_found_again_in_every_process_and_epoch() -> None:
    """By number, forward and backward: the same samples."""
    with seeded(3):
        source = Stream(train=Sized, val=Sized).load("train")
    assert isinstance(source, Streamed) and len(source) == 45
    first = {place: source.sample(place)[0] for place in range(95)}
    for place in (0, 1, 44, 45, 46, 90, 3, 85, 84):
        torch.testing.assert_close(source.sample(place)[0], first[place], rtol=0, atol=0)
    assert not torch.equal(first[0], first[45])  # another epoch has another order


def test_the_first_samples_are_left_out_of_training_and_only_of_a_stream_that_always_begins_with_them() -> None:
    with seeded(3):
        data = Stream(train=told, length={"val": 5}, collate=as_told)
        train, val = data.load("train"), data.load("val")
        texts = [told.x[0].item() for told, _ in (train.sample(i) for i in range(80))]  # type: ignore[attr-defined]
        mine = [told.x[0].item() for told, _ in (val.sample(i) for i in range(len(val)))]  # type: ignore[attr-defined]
        everything = [told.x[0].item() for told, _ in told()]
        assert mine == everything[:5] and texts == [*everything[5:], *everything[5:]]
        with pytest.raises(ValueError, match="dataset.val: is missing, and each pass of train begins with other samples"):
            Stream(train=Drawn, length={"val": 5}).load("train")


def test_a_stream_without_an_end_begins_again_and_counts_its_passes() -> None:
    with seeded(0):
        source: Any = Stream(train=lambda: Drawn(10), val=Drawn).load("train")
    labels = [source.sample(place)[1] for place in range(30)]
    expected = [int(n) % 4 for epoch in range(3) for n in np.random.RandomState(epoch).permutation(10)]
    assert len(source) == ENDLESS and labels == expected


def test_a_mark_leads_to_the_place_that_it_was_taken_at_and_only_if_many_samples_agree() -> None:
    for stream, is_used in ((partial(Remembering, 200), True), (partial(Shuffled, 200), False)):
        found = list[Any]()
        for _ in range(2):
            with seeded(0):
                found.append(Stream(train=stream, val=Remembering, length={"train": 200}).load("train"))
        source, other = found
        assert isinstance(source, Streamed) and isinstance(other, Streamed)
        for place in range(0, 160, 10):
            mark = source.mark(place)
            expected = [source.sample(place + i)[1] for i in range(10)]
        assert mark["place"] == 80 and len(mark["next"]) == 64, "the last of which so many later samples are known"
        other.seek(json.loads(json.dumps(mark)))
        assert [other.sample(150 + i)[1] for i in range(10)] == expected
        assert (other._mark == mark) is is_used


def test_a_stream_that_works_in_its_state_begins_each_pass_with_the_same_samples() -> None:
    source = Stream(train=Lent, val=Remembering, length={"train": 20}).load("train")
    assert isinstance(source, Streamed)
    found = []
    for _ in range(2):
        source.seek({})
        found.append([source.sample(place)[1] for place in range(5)])
    assert found == [[19, 18, 17, 16, 15]] * 2


@pytest.mark.slow
def test_an_evaluation_of_a_stream_without_an_end_is_refused(tmp_path: Path) -> None:
    trained = finished(*RUN, *NET, *of("Drawn"), root=tmp_path / "runs")
    for mode in ("eval", "predict"):
        refused = command(f"mode={mode}", f"run.dir={trained.directory}", f"{mode}.split=train", root=tmp_path / mode)
        assert refused.code == 78 and "train: is a stream without an end (dataset.length.train=N)" in refused.output, (
            refused.output
        )
