"""On a machine with torchvision's CUDA wheel beside a torch for CPUs: `import torchvision` works in every Python of the tests.

Its extension does not load there, and then the import fails with "operator torchvision::nms does not exist" (pytorch/vision#8985),
although datasets, transforms and models need no operator. After the names are declared, all three work. Python imports this file
when it starts; until an import of torchvision it costs nothing, and where the extension loads it does nothing.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

_LIBRARY: list[Any] = []  # torch's object: the declarations exist as long as it exists
_BACKWARDS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_OPERATORS = ("nms", "qnms", "qroi_align", *_BACKWARDS, *(f"_{name}_backward" for name in _BACKWARDS))


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """A finder that finds nothing. It only notices the import of torchvision, from any package."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()


def _declare_operators() -> None:
    import torch

    package = importlib.machinery.PathFinder.find_spec("torchvision")
    if package is None or hasattr(torch.ops.torchvision, "nms"):
        return
    extension = importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    with suppress(OSError):
        if extension is not None and extension.origin is not None:
            torch.ops.load_library(extension.origin)
            return
    _LIBRARY.append(library := torch.library.Library("torchvision", "FRAGMENT"))
    for name in _OPERATORS:
        library.define(f"{name}() -> ()")  # never called: torchvision checks for its extension first


sys.meta_path.insert(0, _BeforeTorchvision())
