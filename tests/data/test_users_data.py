"""Data of users: the same samples in any order of first use and with any loader processes; a fault is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework.build.components import kept_on_cpu
from framework.cli.run import builder_of, checked_line
from framework.data.load import load_split
from framework.data.loader import Loader
from framework.data.map_style import MapStyle
from framework.data.order import Order
from framework.data.source import Split
from framework.runtime.exits import Unfit, headline
from framework.samplers.values import values_of
from tests.faulty_data import Damaged, DrawnSplit, Dying, Epochs, Odd, Points, Records, drop
from tests.harness import refused, typed

X, TWO = torch.ones(3), torch.ones(2, 3)


def loader_of(train: Callable[[], Any], *, num_workers: int = 0, **options: Any) -> Loader:
    draw = options.pop("draw", None)
    dataset = MapStyle(train=partial(train), val=partial(Points), test=partial(Points), num_workers=num_workers, **options)
    source = load_split(dataset, "train", seed=3)
    order = Order(num_samples=len(source), global_batch_size=10, seed=3, drop_last=False,
                  draw=draw and partial(draw, source=source, seed=3))  # fmt: skip
    return Loader(dataset, source, order=order, micro_batch_size=5, dp_rank=0, dp_size=1, device=torch.device("cpu"),
                  dtype=torch.float32, split="train")  # fmt: skip


def inputs_of(made: Loader, count: int) -> list[torch.Tensor]:
    steps = list(islice(made.train(0), count))
    made.close()
    return [micro_batch.inputs for step in steps for micro_batch in step.micro_batches]


def samples_of(order: list[Split], *, seed: int = 0) -> dict[str, list[Any]]:
    """Return the numbers that each split has drawn, after the splits are loaded in this order."""
    dataset = MapStyle(train=partial(DrawnSplit, n=28), val=partial(DrawnSplit), test=partial(DrawnSplit, first=28))
    found = {}
    for split in order:
        torch.rand(7)  # what was drawn before does not matter
        found[split] = load_split(dataset, split, seed=seed).samples.orders
    return found


def test_a_split_that_draws_its_samples_has_the_same_in_any_order_of_first_use() -> None:
    expected = samples_of(["train", "val", "test"])
    assert samples_of(["test", "val", "train"]) == expected != samples_of(["train", "val", "test"], seed=1)
    for name in ("numpy", "random", "torch"):  # two parts of one permutation are disjoint
        assert not set(expected["train"][name]) & set(expected["test"][name])


def test_a_load_leaves_the_generators_as_they_are() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_split(MapStyle(train=partial(DrawnSplit)), "train", seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("buffering", [0, 8192], ids=["raw", "buffered"])
def test_loader_processes_do_not_move_each_others_place_in_an_open_file(buffering: int, tmp_path: Path) -> None:
    read = partial(Records, str(tmp_path / "records.bin"), buffering=buffering)
    alone, with_processes = (loader_of(read, num_workers=n) for n in (0, 2))
    ours, theirs = inputs_of(alone, 20), inputs_of(with_processes, 20)
    assert len(ours) == 40 and all(map(torch.equal, ours, theirs))
    for made in (alone, with_processes):
        made.source.samples.file.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_breaks_its_contract_ends_the_run_from_a_loader_process_too(num_workers: int) -> None:
    made = loader_of(Points, num_workers=num_workers, draw=Epochs("none").epoch)
    with pytest.raises(Unfit, match=r"^sampler: epoch 2 has object of shape \[\]"):
        inputs_of(made, 40)
    made.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_of_another_shape_is_named(num_workers: int) -> None:
    made = loader_of(partial(Odd, n=40, size=11, at=17), num_workers=num_workers)
    with pytest.raises(ValueError, match=r"samples .*17.* of train do not make a batch"):
        inputs_of(made, 4)
    made.close()


def test_a_loader_process_that_is_killed_is_reported_with_its_signal_and_a_remedy() -> None:
    made = loader_of(partial(Dying, at=3), num_workers=1)
    with pytest.raises(RuntimeError) as caught:
        inputs_of(made, 4)
    made.close()
    assert headline(caught.value).startswith("a loader process died: "), headline(caught.value)
    for how in ("(pid 17) is killed by signal: Killed. ", "(pid(s) 17, 18) exited unexpectedly"):
        said = headline(RuntimeError(f"DataLoader worker {how}"))
        assert "died: killed by signal: Killed (if memory or" in said or "died: exited unexpectedly (if memory or" in said


def test_a_sample_that_is_none_is_damaged_unless_a_collate_function_takes_it() -> None:
    with pytest.raises(ValueError, match="sample 1 of train: TypeError: it is None"):
        loader_of(Damaged).source.sample(1)
    assert loader_of(Damaged, on_error="skip").source.sample(1)[1] == 2
    assert loader_of(Damaged, collate=drop).source.sample(1) is None


@pytest.mark.parametrize(("sample", "expected"), [
    (X, (TWO, None)), ((X,), ((TWO,), None)), ((X, X), (TWO, TWO)), ([X, X, X], ((TWO, TWO, TWO), None)), ({"x": X}, ({"x": TWO}, None)),
])  # fmt: skip
def test_a_batch_that_is_no_pair_is_the_inputs(sample: Any, expected: Any) -> None:
    assert repr(MapStyle(train=partial(list, [sample] * 40)).load("train").gather(np.arange(2))) == repr(expected)


def test_a_batch_of_another_type_is_one_argument() -> None:
    source = MapStyle(train=partial(list, [X] * 40), collate=len).load("train")
    assert source.gather(np.arange(2)) == ((2,), None)


def test_named_tensors_stay_on_the_cpu_for_a_model_that_needs_them_there() -> None:
    """Such as the lengths of `pack_padded_sequence`."""
    made = loader_of(Points, collate=lambda samples: ({"x": torch.stack([x for x, _ in samples]), "length": torch.tensor([12] * len(samples))},
                                                      torch.tensor([y for _, y in samples])))  # fmt: skip
    made = replace(made, device=torch.device("meta"), keep_on_cpu=["length"])
    (micro_batch, *_) = next(made.train(0)).micro_batches
    devices = {name: tensor.device.type for name, tensor in micro_batch.inputs.items()} | {
        "targets": micro_batch.targets.device.type
    }
    assert devices == {"x": "meta", "length": "cpu", "targets": "meta"}


@pytest.mark.parametrize("value", ["length", [1]])
def test_what_stays_on_the_cpu_is_a_list_of_names(value: Any) -> None:
    assert kept_on_cpu({"keep_on_cpu": ["length"]}) == ["length"]
    with pytest.raises(ValueError, match="dataset.keep_on_cpu="):
        kept_on_cpu({"keep_on_cpu": value})


FOLDS = ["dataset=synthetic", "dataset.num_train=30", "dataset.num_val=4", "dataset.num_test=7", "model=mlp", "model.dim=8",
         "dataset.folds=3"]  # fmt: skip


def test_the_folds_of_a_sweep_hold_out_each_training_sample_once() -> None:
    held_out = list[int]()
    for fold in range(3):
        build = builder_of(checked_line([*FOLDS, f"dataset.fold={fold}"]))
        train, val = (build.source(split)._numbers.tolist() for split in ("train", "val"))  # type: ignore[attr-defined,arg-type]
        assert sorted(train + val) == list(range(30)) and len(val) == 10 and len(build.source("test")) == 7
        held_out += val
        targets = values_of(build.source("val"), "targets", key="sampler.weights")
        assert np.array_equal(targets, build.source("val").gather(np.arange(10))[1])
    assert sorted(held_out) == list(range(30))


@pytest.mark.parametrize("word", ["dataset.fold=3", "dataset.fold=-1", "dataset.fold=x", "dataset.folds=1"])
def test_a_fold_that_is_not_there_is_refused(word: str) -> None:
    assert refused(*FOLDS, *(["dataset.fold=0"] if "folds" in word else []), word).startswith(word.partition("=")[0])


def test_a_sweep_of_folds_trains_each(tmp_path: Path) -> None:
    line = [*FOLDS, "dataset.fold=range(3)", "trainer.max_epochs=1", "rehearse=false"]
    ended = typed("-m", *line, directory=tmp_path)
    assert ended.code == 0, ended.output
    rows = [json.loads(path.read_text())["metrics"]["val"]["last"]["loss"] for path in tmp_path.glob("runs/*/*/summary.json")]
    assert len(set(rows)) == 3
