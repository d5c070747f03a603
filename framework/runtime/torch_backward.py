"""A backward pass of torch that shows its operations to modes."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def run_backward(outputs: Sequence[Tensor]) -> None:
    """Run the backward pass from outputs, with ones as gradients. Function modes see its operations, unlike in torch's own."""
    ones = tuple(map(torch.ones_like, outputs))
    _engine_run_backward(tuple(outputs), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch" or module == "framework.modules.trace"  # this module only observes


def is_of_backward() -> bool:
    """Return whether `run_backward` runs and only torch's code is in between: the caller is a kernel in Python, not a hook."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code is is_of_backward.__code__ or _is_torchs(frame.f_globals["__name__"])):
        frame = frame.f_back
    return frame is not None and frame.f_code is run_backward.__code__
