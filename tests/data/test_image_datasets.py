"""Datasets of image files: MNIST and Fashion-MNIST, CIFAR, image folders."""

import gzip
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from framework.data import published
from framework.data.image_folder import ImageFolder
from framework.data.load import load_split
from framework.data.published import CIFAR10, CIFAR100, MNIST, FashionMNIST
from framework.data.source import Arrays, Files, decode_image
from tests.data.test_datasets import SPLITS, everything

# published sets


def write_idx(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, *, suffix: str = "") -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": generator.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": generator.integers(0, 10, 20, dtype=np.uint8),
        "t10k-images-idx3-ubyte": generator.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": generator.integers(0, 10, 10, dtype=np.uint8),
    }
    for name, array in arrays.items():
        write_idx(folder / f"{name}{suffix}", array)
    return arrays


def check_mnist(dataset: MNIST | FashionMNIST, arrays: dict[str, np.ndarray]) -> None:
    assert dataset.problems() == []
    for split, name, part in (("train", "train", slice(15)), ("val", "train", slice(15, 20)), ("test", "t10k", slice(10))):
        inputs, targets = everything(dataset.load(split))
        assert np.array_equal(inputs[:, 0], arrays[f"{name}-images-idx3-ubyte"][part])
        assert np.array_equal(targets, arrays[f"{name}-labels-idx1-ubyte"][part])
        assert (inputs.dtype, targets.dtype) == (np.uint8, np.int64)


def test_mnist_reads_what_was_written(tmp_path: Path) -> None:
    check_mnist(MNIST(root=str(tmp_path), num_val=5), write_mnist(tmp_path / "MNIST" / "raw"))


def test_fashion_mnist_of_debian_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "DEBIAN", tmp_path / "debian")
    check_mnist(FashionMNIST(root=str(tmp_path), num_val=5), write_mnist(tmp_path / "debian", suffix=".gz"))
    assert [path.name for path in tmp_path.iterdir()] == ["debian"]


def test_a_damaged_file_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="MNIST/raw cannot be read: .*delete it"):
        MNIST(root=str(tmp_path), num_val=5).load("train")


def test_missing_files_are_named_with_the_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = MNIST(root=str(tmp_path)).problems()
    assert problem.startswith("dataset.root: train-images") and problem.endswith(
        f"{tmp_path}/MNIST/raw (dataset.download=true)"
    )
    monkeypatch.setattr(published, "DEBIAN", tmp_path / "debian")
    (problem,) = FashionMNIST(root=str(tmp_path)).problems()
    assert problem.endswith("(dataset.download=true or apt-get install dataset-fashion-mnist)")
    assert FashionMNIST(root=str(tmp_path), download=True).problems() == []


def test_num_val_leaves_something_to_train_on(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    with pytest.raises(ValueError, match=r"dataset\.num_val=20: must be below the 20 images"):
        MNIST(root=str(tmp_path), num_val=20).load("train")


def test_download_fetches_mnist_into_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    arrays = write_mnist(tmp_path / "server", suffix=".gz")
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", [(f"{name}.gz", None) for name in arrays])
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "server"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        source = MNIST(root=str(tmp_path / "data"), num_val=5, download=True).load("test")
        server.shutdown()
    assert np.array_equal(source.inputs[:, 0], arrays["t10k-images-idx3-ubyte"])


@pytest.mark.slow
@pytest.mark.skipif(not published.DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_of_debian_has_6000_of_each_class(tmp_path: Path) -> None:
    dataset = FashionMNIST(root=str(tmp_path))
    assert dataset.problems() == []
    train, val, test = (dataset.load(split) for split in SPLITS)
    assert (len(train), len(val), len(test)) == (55_000, 5_000, 10_000)
    assert np.array_equal(np.bincount(train.targets) + np.bincount(val.targets), [6000] * 10)
    assert np.array_equal(np.bincount(test.targets), [1000] * 10)
    mean, std = train.inputs.mean() / 255, train.inputs.std() / 255
    assert (mean, std) == (pytest.approx(*FashionMNIST.mean, abs=1e-3), pytest.approx(*FashionMNIST.std, abs=1e-3))


TEN = ("cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin")
HUNDRED = ("cifar-100-binary", ["train.bin"], "test.bin")


@pytest.mark.parametrize(("dataset_class", "files", "coarse"), [(CIFAR10, TEN, []), (CIFAR100, HUNDRED, [0])])
def test_cifar_reads_what_was_written(dataset_class: type, files, coarse: list[int], tmp_path: Path):
    generator = np.random.default_rng(0)
    folder, train, test = files
    (tmp_path / folder).mkdir()
    written = {}
    for name in [*train, test]:
        written[name] = generator.integers(0, 256, (4, 3072), dtype=np.uint8)
        records = [bytes([*coarse, label]) + pixels.tobytes() for label, pixels in enumerate(written[name], start=1)]
        (tmp_path / folder / name).write_bytes(b"".join(records))
    dataset = dataset_class(root=str(tmp_path), num_val=2)
    assert dataset.problems() == []
    inputs, targets = everything(dataset.load("val"))
    assert np.array_equal(inputs, written[train[-1]][-2:].reshape(-1, 3, 32, 32))
    assert targets.tolist() == [3, 4]
    assert len(dataset.load("train")) == 4 * len(train) - 2
    assert len(dataset.load("test")) == 4


def test_missing_or_damaged_cifar_is_a_problem(tmp_path: Path):
    (problem,) = CIFAR100(root=str(tmp_path)).problems()
    assert problem == f"dataset.root: train.bin, test.bin not in {tmp_path}/cifar-100-binary (dataset.download=true)"
    assert CIFAR100(root=str(tmp_path), download=True).problems() == []
    with pytest.raises(ValueError, match="data_batch_1.bin, .* not in"):
        load_split(CIFAR10(root=str(tmp_path)), "train", seed=0)
    (tmp_path / "cifar-100-binary").mkdir()
    for name, content, fault in (
        ("train.bin", bytes(3075), "3075 bytes"),
        ("test.bin", bytes([0, 100]) + bytes(3072), "class 100"),
    ):
        (tmp_path / "cifar-100-binary" / "train.bin").touch()
        (tmp_path / "cifar-100-binary" / name).write_bytes(content)
        (tmp_path / "cifar-100-binary" / "test.bin").touch()
        with pytest.raises(ValueError, match=f"{name} is damaged: .*{fault}"):
            CIFAR100(root=str(tmp_path)).load(name.removesuffix(".bin"))


# Image folder


def write_images(root: Path, *, num: int, split: str = "train", size: tuple[int, int] = (12, 8)) -> None:
    """Write `num` images of one colour for each of two classes, the colour telling them apart."""
    for label, name in enumerate(("ant", "bee")):
        folder = root / split / name
        folder.mkdir(parents=True)
        for i in range(num):
            Image.new("RGB", size, (i, 100 * label, 7)).save(folder / f"{i:03}.png")


def test_image_folder_reads_what_was_written(tmp_path: Path):
    for split, num in (("train", 5), ("val", 2), ("test", 1)):
        write_images(tmp_path, split=split, num=num)
    dataset = ImageFolder(root=str(tmp_path), image_size=4)
    assert dataset.problems() == []
    assert dataset.info == {"in_channels": 3, "image_size": 4, "num_classes": 2}
    for split, num in (("train", 5), ("val", 2), ("test", 1)):
        inputs, targets = everything(dataset.load(split))
        assert targets.tolist() == [0] * num + [1] * num
        colours = [(i, 100 * label, 7) for label in (0, 1) for i in range(num)]
        assert np.array_equal(inputs, np.broadcast_to(np.array(colours)[:, :, None, None], (2 * num, 3, 4, 4)))


def test_image_folder_carves_missing_splits_by_file_name(tmp_path: Path):
    write_images(tmp_path, num=200)
    dataset = ImageFolder(root=str(tmp_path), image_size=1)
    before = {split: {tuple(row) for row in everything(dataset.load(split))[0].reshape(-1, 3)} for split in SPLITS}
    assert [len(rows) for rows in before.values()] == [pytest.approx(n, abs=20) for n in (320, 40, 40)]
    assert len(set.union(*before.values())) == sum(map(len, before.values())) == 400
    for path in sorted((tmp_path / "train").glob("*/*1.png")):
        path.unlink()
    for split in SPLITS:
        assert {tuple(row) for row in everything(dataset.load(split))[0].reshape(-1, 3)} < before[split]


def test_image_folder_decodes_on_demand_what_is_large(tmp_path: Path):
    write_images(tmp_path, num=50)
    once, on_demand = (ImageFolder(root=str(tmp_path), decode_once_gib=gib, image_size=8).load("train") for gib in (1, 0))
    assert isinstance(once, Arrays) and isinstance(on_demand, Files)
    for array, decoded in zip(everything(once), everything(on_demand), strict=True):
        assert np.array_equal(array, decoded)


def test_decoding_takes_the_centre_square(tmp_path: Path):
    pixels = np.zeros((6, 10), dtype=np.uint8)
    pixels[:, 2:8] = np.arange(36).reshape(6, 6)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert np.array_equal(decode_image(tmp_path / "x.png", image_size=6, in_channels=1)[0], pixels[:, 2:8])
    assert decode_image(tmp_path / "x.png", image_size=3, in_channels=3).shape == (3, 3, 3)


def test_image_folder_problems_name_the_folder(tmp_path: Path):
    dataset = ImageFolder(root=str(tmp_path))
    assert dataset.problems() == [
        f"dataset.root: {tmp_path}/train has no class folders (expected {tmp_path}/train/<class>/*.png)"
    ]
    assert dataset.info == {"in_channels": 3, "image_size": 64}
    write_images(tmp_path, num=1)
    assert all("image in" in problem for problem in dataset.problems()) and dataset.problems()
    (tmp_path / "val" / "wasp").mkdir(parents=True)
    assert any("no" in problem and "wasp, which val has" in problem for problem in dataset.problems())
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad\.png cannot be read"):
        decode_image(tmp_path / "bad.png", image_size=4, in_channels=3)
    Image.new("1", (16000, 16000)).save(tmp_path / "bomb.png")  # 32 KB, of which 768 MB would be unpacked
    with pytest.raises(ValueError, match=r"bomb\.png cannot be read as an image: .* exceeds limit"):
        decode_image(tmp_path / "bomb.png", image_size=4, in_channels=3)
