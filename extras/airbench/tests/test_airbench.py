"""The recipe computes what a bare script of its method does, on any number of processes and after a kill."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bare_airbench
from extras.airbench.parts import second_moments, whitening_filters
from framework.build.training import Builder
from framework.data.loader import Loader
from framework.distributed.world import World
from framework.engine.seam import MicroBatch
from framework.runtime.environment import Environment
from tests.harness import assert_close, assert_same_bits, checked, finished, once
from tests.test_recipes import write_cifar
from tests.test_resume import killed_and_continued

WIDTHS, BIASES_LR, HEAD_LR = [4, 6, 6], 2.0, 0.7
LINE = [
    "experiment=airbench", "precision=fp64", f"model.widths={WIDTHS}", "global_batch_size=8", f"optimizer.sgd_lr={BIASES_LR}",
    f"optimizer.groups=[{{match: head.weight, lr: {HEAD_LR}}}, {{match: whiten.bias, share: 0.375}}]", "trainer.max_epochs=2",
    "trainer.log_every=1", "checkpoint.every=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("airbench")
    write_cifar(root)  # 80 images for training, and 16 for the test
    return [*LINE, f"dataset.root={root}"]


def loader_of(line: list[str], *, split: str = "train") -> Loader:
    world = World.start(Environment({}), backend="auto", timeout_s=60.0, scratch=None)
    return Builder(checked(*line), world=world).splits().loader(split)


def batches(line: list[str], count: int) -> Iterator[MicroBatch]:
    for _, step in zip(range(count), loader_of(line).train(0)):
        yield from step.micro_batches


def test_the_first_layer_whitens_the_patches() -> None:
    draws = torch.Generator().manual_seed(0)
    images = F.avg_pool2d(torch.randn(50, 3, 34, 34, generator=draws, dtype=torch.float64), 3, stride=1)  # neighbours are alike
    filters = whitening_filters(second_moments(images) / len(images), eps=0.0, in_channels=3)
    outputs = F.conv2d(images, filters).transpose(0, 1).flatten(1)
    moments = outputs @ outputs.T / outputs.shape[1]
    one = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(moments, torch.cat([torch.cat([one, -one]), torch.cat([-one, one])], dim=1))


@pytest.mark.parametrize("micro_batch_size", ["null", "3"])
def test_each_image_is_mirrored_in_every_other_epoch(micro_batch_size: str, line: list[str]) -> None:
    line = [*line, "dataset.translate=0", f"micro_batch_size={micro_batch_size}"]
    loader, mirrored = loader_of(line), dict[int, list[bool]]()
    for batch in batches(line, 40):  # four epochs
        stored = map(torch.from_numpy, loader.source.gather(np.asarray(batch.samples)))
        plain = loader.dataset.transform(*stored, keys=None)[0].double()
        for sample, image, own in zip(batch.samples, batch.inputs, plain):
            assert torch.equal(image, own) or torch.equal(image, own.flip(-1))
            mirrored.setdefault(sample, []).append(not torch.equal(image, own))
    assert len(mirrored) == 80 and {tuple(times) for times in mirrored.values()} == {(True, False) * 2, (False, True) * 2}
    assert 20 < sum(times[0] for times in mirrored.values()) < 60


def test_an_image_is_shifted_by_up_to_two_pixels_with_its_reflection(line: list[str]) -> None:
    (batch,), loader = batches(line, 1), loader_of(line)
    plain = loader.dataset.transform(*map(torch.from_numpy, loader.source.gather(np.asarray(batch.samples))), keys=None)[
        0
    ].double()
    padded = F.pad(plain, (2,) * 4, mode="reflect")
    shifts = set[tuple[int, int]]()
    for image, own in zip(batch.inputs, padded):
        crops = {(down, right): own[:, down : down + 32, right : right + 32] for down in range(5) for right in range(5)}
        (shift,) = [at for at, crop in crops.items() if torch.equal(image, crop) or torch.equal(image, crop.flip(-1))]
        shifts.add(shift)
    assert len(shifts) > 3


def test_a_square_is_cut_out(line: list[str]) -> None:
    black = -torch.tensor(bare_airbench.MEAN) / torch.tensor(bare_airbench.STD)
    (batch,) = batches([*line, "dataset.cutout=12"], 1)
    places = (batch.inputs - black.view(-1, 1, 1)).abs().amax(1) < 1e-5
    assert places.sum((1, 2)).tolist() == [144] * 8 and (places.any(2).sum(1) == 12).all()


def of_bare(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of our model under the names of the bare script's."""
    names = {"whiten": "whiten", "head": "head"}
    for block in range(len(WIDTHS)):
        layers = {"conv1": 1, "norm1": 3, "conv2": 5, "norm2": 6}
        names |= {f"blocks.{block}.{name}": f"layers.{7 * block + place}" for name, place in layers.items()}
    return {
        f"{names[layer]}.{leaf}": value
        for (layer, _, leaf), value in zip((key.rpartition(".") for key in state), state.values())
    }


def all_samples(loader: Loader) -> tuple[Tensor, Tensor]:
    stored = map(torch.from_numpy, loader.source.gather(np.arange(len(loader.source))))
    images, labels = loader.dataset.transform(*stored, keys=None)
    return images.double(), labels


def test_a_bare_script_computes_the_same(line: list[str]) -> None:
    run, world = once(*line), World.start(Environment({}), backend="auto", timeout_s=60.0, scratch=None)
    net = bare_airbench.Net(WIDTHS).double()
    net.load_state_dict(of_bare(Builder(checked(*line), world=world).model().state_dict()))
    bare_airbench.whiten(net, all_samples(loader_of(line))[0])
    optimizers = bare_airbench.optimizers_of(net, biases_lr=BIASES_LR, head_lr=HEAD_LR)
    losses = [
        bare_airbench.take_step(net, optimizers, batch.inputs, batch.targets, step=step, steps=20, dtype=None).item()
        for step, batch in enumerate(batches(line, 20))
    ]
    assert losses == pytest.approx([row["loss"] for row in run.rows if row["split"] == "train"], rel=1e-9)
    for name, value in of_bare(run.weights).items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    measured = {row["split"]: row["tta_accuracy"] for row in run.rows if row["split"] != "train"}
    accuracy = bare_airbench.accuracy(net, *all_samples(loader_of(line, split="test")))
    assert measured == {"val": accuracy, "test": accuracy}


@pytest.mark.slow
def test_it_continues_after_a_kill_as_if_nothing_had_happened(line: list[str], tmp_path: Path) -> None:
    assert_same_bits(killed_and_continued(*line, at=11, root=tmp_path / "runs"), once(*line))


@pytest.mark.slow
def test_two_processes_compute_what_one_does(line: list[str], tmp_path: Path) -> None:
    two = finished(*line, "parallel=ddp", "launch.nproc_per_node=2", "rehearse=true", root=tmp_path / "runs")
    assert_close(two, once(*line), tolerance=1e-8)
