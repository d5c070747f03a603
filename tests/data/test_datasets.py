"""All datasets: YAML files, import costs and sources; and the two that need no file, digits and synthetic."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from framework.config.folders import option_node
from framework.config.validation import component_problems
from framework.data.digits import Digits
from framework.data.source import Arrays, Source, Windows
from framework.data.synthetic import Synthetic

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(path.stem for path in (CONF / "dataset").glob("*.yaml") if "???" not in path.read_text())  # none to be given
SPLITS = ("train", "val", "test")


def node(option: str) -> dict:
    return yaml.safe_load((CONF / "dataset" / f"{option}.yaml").read_text())


def everything(source: Source) -> tuple[np.ndarray, np.ndarray]:
    return source.gather(np.arange(len(source)))


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def check_splits_cover(dataset, *, total: int) -> None:
    rows = [row.tobytes() for split in SPLITS for row in everything(dataset.load(split))[0]]
    assert len(rows) == len(set(rows)) == total


# Every option of the group


def test_importing_and_asking_for_problems_imports_no_torch():
    targets = [node(option)["_target_"] for option in OPTIONS]
    code = f"""
import importlib, sys
for target in {targets}:
    module, _, name = target.rpartition(".")
    dataset = getattr(importlib.import_module(module), name)()
    dataset.problems(), dataset.info
print([name for name in ("torch", "torchvision", "PIL") if name in sys.modules])
"""
    assert run_python(code) == "[]\n"


@pytest.mark.parametrize("option", OPTIONS)
def test_negative_num_workers_are_refused(option: str):
    node = {"_target_": option_node("dataset", option)["_target_"], "num_workers": -1}
    (problem,) = component_problems("dataset", node, known=[])
    assert str(problem) == "dataset.num_workers: -1 is out of range (at least 0)"


# Sources


def test_windows_are_cut_end_to_end_and_targets_are_inputs_shifted_by_one():
    source = Windows(np.arange(100, dtype=np.uint16), seq_len=9)
    assert len(source) == 11  # 11 * 9 + 1 = 100
    inputs, targets = source.gather(np.array([0, 10, 3]))
    assert inputs.dtype == np.uint16
    assert np.array_equal(inputs, np.array([0, 90, 27])[:, None] + np.arange(9))
    assert np.array_equal(targets, inputs + 1)
    assert len(Windows(np.arange(99), seq_len=9)) == 10


def test_a_source_without_a_sample_is_refused():
    with pytest.raises(ValueError, match="9 tokens hold no sample of seq_len=9"):
        Windows(np.arange(9), seq_len=9)
    with pytest.raises(ValueError, match="at least one sample"):
        Arrays(np.zeros((0, 1)), np.zeros(0))


# Digits


def test_digits_are_those_of_the_repository_and_splits_cover_them_once():
    loaded = [everything(Digits().load(split)) for split in SPLITS]
    pixels = np.rint(np.concatenate([inputs for inputs, _ in loaded]).reshape(-1, 64) * (16 / 255))
    targets = np.concatenate([targets for _, targets in loaded])
    # what UCI's page and scikit-learn's say of these 1797: the samples of each class, and the pixels' range
    assert np.bincount(targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (pixels.min(), pixels.max(), pixels.sum()) == (0, 16, 561718)
    assert [len(targets) for _, targets in loaded] == [1258, 180, 359]
    check_splits_cover(Digits(), total=1797)


def test_augmentation_needs_both_the_setting_and_keys():
    inputs, targets = map(torch.from_numpy, Digits().load("val").gather(np.arange(8)))
    keys = np.arange(8, dtype=np.uint64)
    plain, _ = Digits().transform(inputs, targets, keys=keys)
    assert torch.equal(Digits(augment=True).transform(inputs, targets, keys=None)[0], plain)
    assert not torch.equal(Digits(augment=True).transform(inputs, targets, keys=keys)[0], plain)


# Synthetic


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_synthetic_splits_are_disjoint_and_the_same_every_time(kind: str):
    check_splits_cover(Synthetic(kind=kind), total=1024 + 256 + 256)
    first, second = (everything(Synthetic(kind=kind).load("val")) for _ in range(2))
    assert all(map(np.array_equal, first, second))


def test_synthetic_images_are_learnable_and_normalised():
    train, val = (everything(Synthetic().load(split)) for split in ("train", "val"))
    means = np.stack([train[0][train[1] == label].mean(0) for label in range(10)]).reshape(10, -1)
    distances = ((val[0].reshape(-1, 1, means.shape[1]) - means) ** 2).sum(-1)
    assert np.array_equal(distances.argmin(1), val[1])
    images, _ = Synthetic().transform(torch.from_numpy(train[0]), torch.from_numpy(train[1]), keys=None)
    assert images.mean().item() == pytest.approx(0, abs=0.05)
    assert images.std().item() == pytest.approx(1, abs=0.05)


def test_synthetic_tokens_follow_one_circle_in_every_split():
    train, val = (everything(Synthetic(kind="tokens").load(split)) for split in ("train", "val"))
    assert train[0].shape == (1024, 64)
    counts = np.zeros((64, 64), dtype=int)
    np.add.at(counts, (train[0], train[1]), 1)
    assert (counts.argmax(1)[val[0]] == val[1]).mean() == pytest.approx(7 / 8 + 1 / 8 / 64, abs=0.01)


def test_synthetic_vectors_are_tanh_of_a_linear_map():
    inputs, targets = everything(Synthetic(kind="vectors", num_features=8, num_outputs=3).load("train"))
    assert (inputs.dtype, targets.dtype, targets.shape) == (np.float32, np.float32, (1024, 3))
    solution, *_ = np.linalg.lstsq(inputs.astype(np.float64), np.arctanh(targets.astype(np.float64)), rcond=None)
    assert np.abs(np.tanh(inputs @ solution) - targets).max() < 1e-4
