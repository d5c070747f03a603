"""Fashion-MNIST: 70,000 pictures of clothes, 28 x 28 pixels."""

from pathlib import Path

from framework.data.idx import IDXImages

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist


class FashionMNIST(IDXImages):
    """The four IDX files, in torchvision's folder root/FashionMNIST/raw, or else in the folder of Debian's package."""

    name = "FashionMNIST"
    mean, std = (0.2860,), (0.3530,)
    remedy = "dataset.download=true or apt-get install dataset-fashion-mnist"

    @property
    def folders(self) -> list[Path]:
        return [*super().folders, DEBIAN]
