"""Apple's GPU in a process on a machine that has none: `mps:0`, with the CPU's numbers, and without float64.

    python -m tests.fake_mps LIBRARY module function ARGUMENTS RESULT     (as tests/fake_cuda.py)

Neither Metal's kernels and their rounding nor its speed are emulated.
"""

import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def _refuse_wide(taken: list[Any], given: list[Any]) -> None:
    import torch

    if any(tensor.dtype in (torch.float64, torch.complex128) for tensor in (*taken, *given)):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def _attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **scale: Any
) -> Any:
    import torch

    scale.pop("enable_gqa", None)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, **scale)[0]


def plant() -> None:
    """Give this process the device. Before anything has made a tensor."""
    import torch

    from tests import emulated_tensors

    torch._C._set_multithreading_enabled(False)  # autograd would want a thread of its own for each device
    emulated_tensors.TYPES.add("mps")
    emulated_tensors.emulate("MPS")
    emulated_tensors.AFTER.append(_refuse_wide)
    attention = torch.library.Library("aten", "IMPL")
    for key in ("AutogradMPS", "MPS"):  # by plain products: the choice of a kernel knows only devices that torch was built for
        attention.impl("scaled_dot_product_attention", _attention, key)
    emulated_tensors.LIBRARIES.append(attention)
    plain_tensor, draws = torch.tensor, torch.Generator()
    torch.tensor = lambda *args, device=None, **kwargs: plain_tensor(*args, **kwargs).to(device or "cpu")
    torch.backends.mps.is_available = lambda: True
    for name in ("manual_seed", "get_state", "set_state"):
        setattr(torch.mps, name.replace("_state", "_rng_state"), getattr(draws, name))


def main(library: str, module: str, function: str, arguments: str, result: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # before torch, which looks once
    plant()
    found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
