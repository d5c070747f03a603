"""The recipes: what each asks for before it starts, and its first steps at a reduced size."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from framework.build.training import Builder
from framework.cli.run import checked_line
from framework.config.folders import options
from framework.data.published import DEBIAN
from framework.distributed.world import World
from framework.preflight.dry_build import dry_build
from framework.runtime.exits import Exit
from tests.harness import assert_close, command, exact_rows, finished


def write_cifar(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = random.integers(0, 256, (16, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)


def write_images(root: Path) -> None:
    """Two classes of twelve pictures in train and of two in val, which is linked as test."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(random.integers(0, 256, (70, 80, 3), dtype=np.uint8)).save(folder / f"{index}.JPEG")
    (root / "test").symlink_to("val")


def write_tokens(root: Path) -> None:
    """What nanoGPT's prepare.py writes: ids of GPT-2's tokenizer, uint16, in train.bin and val.bin."""
    root.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 20_000), ("val", 4_000)):
        random.integers(0, 50_257, count, dtype=np.uint16).tofile(root / f"{name}.bin")


@dataclass(frozen=True)
class Recipe:
    write: Callable[[Path], None]  # its data's real format, in small
    missing: str  # what is said without the data, {0} being its folder
    reduced: list[str]


FILES = ", ".join([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"])
SOURCE = "image-net.org/download: the images of ILSVRC 2012 in train/CLASS and val/CLASS, and val linked as test, or a tenth of train is kept for that"
NO_CIFAR = f"dataset.root: {FILES} not in {{0}}/cifar-10-batches-bin (dataset.download=true)"
RECIPES = {
    "airbench": Recipe(write_cifar, NO_CIFAR, ["model.widths=[4,6,6]", "optimizer.sgd_lr=2.0", "global_batch_size=8"]),
    "cifar10_resnet": Recipe(
        write_cifar,
        NO_CIFAR,
        ["dataset.num_val=8", "global_batch_size=4", "micro_batch_size=2"],
    ),
    "imagenet_resnet50": Recipe(
        write_images,
        f"dataset.root: {{0}}/train has no class folders (expected {{0}}/train/<class>/*.png; {SOURCE})",
        ["dataset.image_size=32", "dataset.num_workers=0", "model.depth=18", "global_batch_size=4", "micro_batch_size=2"],
    ),
    "gpt2_124m": Recipe(
        write_tokens,
        "dataset.root: {0}/train.bin, {0}/val.bin not found (train.bin and val.bin, or one file; nanoGPT's data/openwebtext/prepare.py writes them)",
        ["dataset.seq_len=32", "model.dim=16", "model.num_layers=2", "model.num_heads=2", "trainer.compile=false",
         "global_batch_size=4", "micro_batch_size=2"],
    ),
}  # fmt: skip
OF_THIS_MACHINE = {"fashion_mnist_cnn", "stdlib_gpt", "lr_range"}  # whose data is installed, not fetched


def test_every_recipe_is_tested() -> None:
    assert set(options("experiment")) == RECIPES.keys() | OF_THIS_MACHINE


@pytest.mark.parametrize("name", RECIPES)
def test_without_its_data_it_says_where_to_get_it_and_nothing_else(name: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    ended = command(f"experiment={name}", f"dataset.root={root}", root=tmp_path / "runs")
    assert ended.output.splitlines() == [RECIPES[name].missing.format(root)]
    assert ended.code == Exit.CONFIGURATION


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "launch", [[], ["launch=slurm", "launch.nnodes=4", "launch.nproc_per_node=8", "parallel=ddp"]], ids=["here", "cluster"]
)
def test_at_full_size_nothing_is_wrong_with_it(name: str, launch: list[str], tmp_path: Path) -> None:
    RECIPES[name].write(tmp_path / "data")
    line = [f"experiment={name}", f"dataset.root={tmp_path / 'data'}", f"run.root={tmp_path / 'runs'}", *launch]
    found = checked_line(line)
    assert found.config is not None, found.problems
    assert dry_build(Builder(found.config, world=World.alone()))[0] == [], (
        "the whole model, without storage, takes a batch of this data"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_ten_steps_of_it_on_one_process_and_on_two(name: str, tmp_path: Path) -> None:
    RECIPES[name].write(tmp_path / "data")
    line = [f"experiment={name}", f"dataset.root={tmp_path / 'data'}", *RECIPES[name].reduced,
            "trainer.max_steps=10", "trainer.log_every=1", "precision=fp64"]  # fmt: skip
    one = finished(*line, "parallel=single", root=tmp_path / "one")
    two = finished(*line, "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "two")
    assert [row["step"] for row in exact_rows(one) if row["split"] == "train"] == list(range(1, 11))
    assert_close(two, one, tolerance=1e-8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not DEBIAN.is_dir(), reason="no dataset-fashion-mnist here: tests/install_debian.sh installs it")
def test_an_epoch_of_fashion_mnist_is_on_its_way(tmp_path: Path) -> None:
    """All twelve reach 93 % (benchmarks/RESULTS.md), which takes a quarter of an hour."""
    run = finished("experiment=fashion_mnist_cnn", "trainer.max_epochs=1", root=tmp_path / "runs", timeout_s=850)
    assert run.summary["metrics"]["test"]["last"]["accuracy"] > 0.85
