"""Data that nobody here wrote: datasets of torch and Hugging Face as they are, shards, samplers, mixed samples; any number of processes."""

import io
import itertools
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from framework.build.training import Builder
from framework.distributed.world import World
from tests.harness import Says, assert_close, checked, command, finished, refused
from tests.test_resume import assert_survives_a_kill

RUN = ["precision=fp64", "global_batch_size=10", "trainer.max_epochs=null", "trainer.max_steps=7", "trainer.eval_every=3", "trainer.log_every=1",
       "optimizer.lr=0.01", "checkpoint.every=2"]  # fmt: skip
MAP = [
    "dataset=map_style",
    "dataset.train._target_=tests.test_any_data.Pictures",
    "dataset.facts={num_classes:4}",
    "model._target_=tests.test_any_data.Net",
]
TWO = "launch.nproc_per_node=2"


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """As torchvision's are: transforms draw from the generators of torch, numpy and Python."""

    def __init__(self, size: int = 40, damaged: int | None = None, alone: bool = False) -> None:
        self.size, self.damaged, self.alone = size, damaged, alone

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index == self.damaged:
            raise OSError("cannot identify image file")
        label = index % 4
        picture = torch.full((12,), float(label)) + torch.randn(12) * 0.1 + np.random.uniform() + random.random()
        return picture if self.alone else (picture, label)


class Growing(Pictures):
    """Its samples are the epoch, of which it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.full((12,), float(self.epoch)), index % 4


class Net(nn.Module):
    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class Words:
    """Samples of other lengths, as dictionaries of lists: as Hugging Face's datasets give them."""

    def __init__(self, size: int = 30) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 2 + index % 5
        return {
            "ids": [(index * 7 + place) % 11 + 1 for place in range(length)],
            "length": length,
            "label": index % 4,
            "text": "a" * length,
        }


class Padded:
    """A collate function of a class with arguments: pads to the longest."""

    def __init__(self, filler: int) -> None:
        self.filler = filler

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(sample["ids"]) for sample in samples)
        ids = torch.full((len(samples), longest), self.filler)
        for row, sample in zip(ids, samples):
            row[: len(sample["ids"])] = torch.tensor(sample["ids"])
        return {
            "ids": ids,
            "lengths": torch.tensor([s["length"] for s in samples]),
            "label": torch.tensor([s["label"] for s in samples]),
        }


class Bag(nn.Module):
    """Takes named inputs. What it computes depends on what is padded only by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.table(ids).sum(1) / lengths[:, None])


def tar_line(folder: Path) -> list[str]:
    for number, size in enumerate((9, 4, 17)):
        with tarfile.open(folder / f"train-{number}.tar", "w") as archive:
            for i in range(size):
                np.save(array := io.BytesIO(), np.full(12, (number + i) % 4, dtype=np.float32) + i / 40)
                for ending, content in {"npy": array.getvalue(), "cls": str((number + i) % 4).encode()}.items():
                    member = tarfile.TarInfo(f"{i:04d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return [*shards_line("webdataset", folder / "train-*.tar"), "dataset.inputs=npy", "dataset.targets=cls"]


def shards_line(kind: str, files: Path) -> list[str]:
    return ["dataset=map_style", "dataset.train._target_=datasets.load_dataset", f"dataset.train.path={kind}",
            f"dataset.train.data_files='{files}'", "dataset.train.split=train",
            "model._target_=tests.test_any_data.Net", "sampler=windowed", "sampler.window=8"]  # fmt: skip


def hf_line(folder: Path) -> list[str]:
    from datasets import Dataset

    Dataset.from_list([Words()[i] for i in range(30)]).save_to_disk(str(folder / "words"))
    return [
        "dataset=map_style",
        "dataset.train._target_=datasets.load_from_disk",
        f"+dataset.train.dataset_path='{folder / 'words'}'",
        *BAG,
    ]


BAG = ["dataset.inputs=[ids,lengths]", "dataset.targets=label", "+dataset.collate={_target_:tests.test_any_data.Padded,filler:0}",
       "model._target_=tests.test_any_data.Bag"]  # fmt: skip
LINES: dict[str, Any] = {
    "a dataset of torch": lambda _: MAP,
    "a dataset of Hugging Face": hf_line,
    "lengths that differ": lambda _: ["dataset=map_style", "dataset.train._target_=tests.test_any_data.Words", *BAG, "sampler=length_grouped", "sampler.lengths=length"],
    "tar shards": tar_line,
    "balanced classes": lambda _: [*MAP, "sampler=weighted"],
    "mixed samples": lambda _: [*MAP, "+dataset.batch_transform={_target_:tests.test_any_data.MixUp,alpha:0.4}"],
    "two sources": lambda _: ["dataset=map_style", "dataset.train={_target_:tests.test_any_data.two}", "model._target_=tests.test_any_data.Net", "sampler=mixture",
                              "sampler.weights=[1,3]"],
    "a dataset that knows its epoch": lambda _: ["dataset=map_style", "dataset.train._target_=tests.test_any_data.Growing", *MAP[2:]],
    "a curriculum": lambda _: [*MAP, "sampler=curriculum", "sampler.difficulty=targets"],
}  # fmt: skip


def two() -> Any:
    return torch.utils.data.ConcatDataset([Pictures(20), Pictures(30)])


class MixUp:
    """As torchvision.transforms.v2.MixUp: one share for a batch, labels become shares of classes."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        share = float(torch.distributions.Beta(self.alpha, self.alpha).sample(()))
        shares = nn.functional.one_hot(targets, 4).double()
        return inputs * share + inputs.roll(1, 0) * (1 - share), shares * share + shares.roll(1, 0) * (1 - share)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_is_told_the_epoch_of_its_samples(num_workers: int) -> None:
    """A split that is a share of train is evaluated as in the first epoch."""
    line = [
        "dataset=map_style",
        "dataset.train._target_=tests.test_any_data.Growing",
        *MAP[2:],
        f"dataset.num_workers={num_workers}",
    ]
    build = Builder(checked(*line, "global_batch_size=8"), world=World.alone())
    training, validation = (build.splits().loader(split) for split in ("train", "val"))
    for step in itertools.islice(training.train(0), 13):
        evaluated = next(validation.evaluate())
        assert {*step.micro_batches[0].inputs.unique().tolist()} == {float(step.epoch)}
        assert {*evaluated.micro_batches[0].inputs.unique().tolist()} == {0.0}
    assert step.epoch == 3


@pytest.mark.slow
@pytest.mark.parametrize("what", LINES)
def test_the_number_of_processes_and_of_loader_processes_changes_nothing(what: str, tmp_path: Path) -> None:
    line = [*RUN, *LINES[what](tmp_path), "micro_batch_size=3"]
    several = finished(*line, "parallel=ddp", TWO, "dataset.num_workers=2", root=tmp_path / "runs")
    assert_close(several, finished(*line, root=tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tar shards", "lengths that differ", "a dataset that knows its epoch", "a curriculum"])
def test_killed_it_goes_on_in_the_middle_with_the_same_bits(what: str, tmp_path: Path) -> None:
    line = [*RUN, *LINES[what](tmp_path), "micro_batch_size=3", "parallel=fsdp", TWO]
    assert_survives_a_kill(*line, at=5, root=tmp_path)


@pytest.mark.slow
def test_what_a_sample_draws_depends_on_its_number_also_without_micro_batches(tmp_path: Path) -> None:
    line = [*RUN, *MAP]
    alone = finished(*line, root=tmp_path / "one")
    several = finished(*line, "parallel=ddp", "launch.nproc_per_node=3", root=tmp_path / "several")
    assert_close(several, alone)


def test_missing_splits_are_shares_of_the_first_and_share_no_sample() -> None:
    from framework.data.map_style import MapStyle

    data = MapStyle(train=lambda: Pictures(), shares={"val": 0.2, "test": 0.1})
    numbers = [set(data.load(split)._numbers) for split in ("train", "val", "test")]
    assert [len(part) for part in numbers] == [28, 8, 4] and set.union(*numbers) == set(range(40))


def test_a_column_is_of_the_samples_and_not_what_the_dataset_calls_alike() -> None:
    from framework.data.map_style import MapStyle

    class Labelled(list[dict[str, int]]):
        targets, n, ages = [7, 7, 7], torch.tensor(3), torch.tensor([4, 5, 6])

    samples = Labelled({"fine": i, "n": 10 * i, "x": i} for i in range(3))
    source: Any = MapStyle(train=lambda: samples, val=lambda: samples, test=lambda: samples, inputs="x", targets="fine").load(
        "train"
    )
    assert [source.column(name).tolist() for name in ("targets", "n", "ages")] == [[0, 1, 2], [0, 10, 20], [4, 5, 6]]


@pytest.mark.slow
def test_a_damaged_sample_is_named_and_skipped_only_if_asked(tmp_path: Path) -> None:
    line = [
        *RUN, *MAP, "+dataset.train.damaged=17", "+dataset.val._target_=tests.test_any_data.Pictures", "trainer.max_steps=9",
        "launch.max_restarts=0",
    ]  # fmt: skip
    line = [
        *(word.replace("+dataset.val._target_", "dataset.val._target_") for word in line),
        "dataset.test._target_=tests.test_any_data.Pictures",
    ]
    failed = command(*line, root=tmp_path / "runs")
    assert failed.code == 1
    assert "sample 17 of train: OSError: cannot identify image file (dataset.on_error=skip takes the next one" in failed.output
    ended = finished(*line, "dataset.on_error=skip", root=tmp_path / "one")
    assert "sample 17 of train: OSError: cannot identify image file: skipped" in ended.output
    several = finished(*line, "dataset.on_error=skip", "parallel=ddp", TWO, root=tmp_path / "several")
    assert_close(several, ended)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(12), 0


REFUSED = {
    "a stream": ([*MAP, "dataset.train._target_=tests.test_any_data.Endless"], "dataset: ... Endless has no length ... dataset=stream ..."),
    "no pair": ([*MAP, "+dataset.train.alone=true"], "dataset: a batch has no targets, which this task needs (dataset.inputs and dataset.targets say which are which; ..."),
    "a wrong argument": ([*MAP, "+dataset.train.sise=3"], "dataset.train.sise: unknown key (did you mean dataset.train.size?)"),
    "targets alone": ([*MAP, "dataset.targets=y"], "dataset: ... dataset.targets needs dataset.inputs, too ..."),
    "no lengths": ([*MAP, "sampler=length_grouped", "sampler.lengths=length"], "sampler: it cannot order this data: ... sampler.lengths=length: ... .npy file"),
    "no sampler": ([*MAP, "sampler=randomly"], "sampler: no option 'randomly' ..."),
    "a mean": ([*MAP, "+dataset.batch_transform={_target_:tests.test_any_data.MixUp}"], "dataset.batch_transform.alpha: is missing ..."),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_refused_before_the_start(what: str) -> None:
    words, expected = REFUSED[what]
    assert refused(*RUN, *words, "rehearse=true") == Says(expected)


@pytest.mark.slow
def test_a_collate_function_that_draws_is_warned_of_where_it_is_cut_by_processes(tmp_path: Path) -> None:
    data = ["dataset=map_style", "dataset.train._target_=tests.faulty.Points", "dataset.facts={num_classes:10}",
            "dataset.collate={_target_:tests.faulty.masked,_partial_:true}", "model._target_=tests.faulty.Net"]  # fmt: skip
    line = [*RUN, *data, "rehearse=true", "parallel=ddp", TWO]
    said = "dataset: its collate function or a transform draws once for a whole micro-batch, so the results depend on"
    assert said in finished(*line, root=tmp_path / "by_ranks").output
    cut = finished(*line, "micro_batch_size=2", root=tmp_path / "cut")
    assert said not in cut.output
    assert_close(cut, finished(*RUN, *data, "micro_batch_size=2", root=tmp_path / "one"))
