"""Make `import torchvision` work beside a torch of another build."""

import functools
import importlib.machinery
import importlib.util

import torch

# torchvision's own operators, and with them those that it gives fake kernels to while it is being imported.
OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "qroi_align",
    "roi_pool",
    "ps_roi_align",
    "ps_roi_pool",
    "deform_conv2d",
    "_roi_align_backward",
    "_roi_pool_backward",
    "_ps_roi_align_backward",
    "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
)


def make_torchvision_importable() -> None:
    """Declare torchvision's operators where its compiled extension cannot load, so that the package can be imported.

    The torchvision of the package index is built for CUDA. Beside a CPU build of torch its extension does not load, and
    then `import torchvision` dies with "operator torchvision::nms does not exist", although datasets, transforms and
    models need no operator (pytorch/vision#8985). With the names declared, all three work; the box operators and
    `torchvision.io.decode_image` still raise torchvision's own explanation.

    Call it in each process, before the first `import torchvision`. It does nothing where torchvision is missing, where
    the extension loads, and when called again; it never imports torchvision, which takes seconds.
    """
    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return
    if not _extension_loads():
        _declare_operators()


def _extension_loads() -> bool:
    package = importlib.util.find_spec("torchvision")
    assert package is not None
    extension = importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)
    except OSError:
        return False
    return True


@functools.cache  # the declarations live as long as the library object: the cache keeps it
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}() -> ()")  # never called: torchvision checks for its extension first
    return library
