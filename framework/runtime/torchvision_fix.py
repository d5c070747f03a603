"""A fix that makes `import torchvision` work with another build of torch."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

_LIBRARY: list[Any] = []  # torch's object: the declarations exist as long as it exists
# torchvision's own operators, including those for which it registers fake kernels during its import.
OPERATORS = (
    *("nms", "qnms", "roi_align", "qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"),
    *(f"_{name}_backward" for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")),
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """A finder that finds nothing. It only notices the import of torchvision, from any package."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            make_torchvision_importable()


def watch_for_torchvision() -> None:
    """Make every later `import torchvision` in this process work, in any package. Until an import it costs nothing."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def make_torchvision_importable() -> None:
    """Declare torchvision's operators if its compiled extension cannot load, so that the package can be imported.

    The torchvision of the package index is built for CUDA. With a CPU build of torch its extension does not load. Then `import
    torchvision` fails with "operator torchvision::nms does not exist", although datasets, transforms and models need no
    operator (pytorch/vision#8985). After the names are declared, all three work. The box operators and
    `torchvision.io.decode_image` still raise torchvision's own explanation. Call it in each process, before the first `import
    torchvision`. It does nothing if torchvision is missing, if the extension loads, or if it was called before. It never
    imports torchvision, which takes seconds.
    """
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or hasattr(torch.ops.torchvision, "nms"):
        return
    extension = importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    with suppress(OSError):
        if extension is not None and extension.origin is not None:
            torch.ops.load_library(extension.origin)
            return
    _LIBRARY.append(library := torch.library.Library("torchvision", "FRAGMENT"))
    for name in OPERATORS:
        library.define(f"{name}() -> ()")  # never called: torchvision checks for its extension first
