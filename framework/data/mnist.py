"""MNIST: 70,000 handwritten digits of 28 x 28 pixels."""

from framework.data.idx import IDXImages


class MNIST(IDXImages):
    """The four IDX files, in torchvision's folder root/MNIST/raw."""

    name = "MNIST"
    mean, std = (0.1307,), (0.3081,)
    flip = False
