"""Torch's tensors and reductions in MPI's terms: MPI has no 16-bit floats, no mean and no sum of booleans."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from extras.mpi import mpi

# MPI does not read the elements that it moves, so an MPI type of the same size carries them. Bytes cannot: MPI counts to 2^31.
_CARRIERS = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
_NUMBERS = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
# torch's reductions, and MPI's names for them
_OPERATIONS = {name: name for name in ("SUM", "MIN", "MAX", "BAND", "BOR", "BXOR")} | {"AVG": "SUM", "PRODUCT": "PROD"}
# 16-bit floats are summed in 32 bits and rounded once, at the end
_REDUCED_AS = {torch.bool: torch.uint8, torch.bfloat16: torch.float32, torch.float16: torch.float32}
_OF_BOOLEANS = {"SUM": "LOR", "MAX": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BOR": "LOR", "BXOR": "LXOR"}


class Reduction:
    """One of torch's reductions, for tensors of one dtype, in MPI's terms."""

    def __init__(self, kind: Any, *, dtype: torch.dtype, size: int) -> None:
        name = next((name for torchs, name in _OPERATIONS.items() if kind == getattr(dist.ReduceOp, torchs)), None)
        self._divisor = size if kind == dist.ReduceOp.AVG else 1
        self._dtype = _REDUCED_AS.get(dtype, dtype)
        is_bitwise = name in ("BAND", "BOR", "BXOR")
        if name is None or self._dtype not in _NUMBERS or (dtype.is_floating_point and is_bitwise):
            raise ValueError(f"{kind} of {dtype}: MPI does not support it")
        if self._divisor > 1 and not dtype.is_floating_point:
            raise ValueError(f"{kind} of {dtype}: there is no mean of integers; take the sum")
        self.operation = getattr(mpi.library(), _OF_BOOLEANS[name] if dtype == torch.bool else name)

    def staged(self, tensor: Tensor) -> Tensor:
        """Return the tensor, contiguous and in a dtype that MPI can reduce. If it is both already, return the tensor itself."""
        return tensor.to(self._dtype).contiguous()

    def buffer(self, staged: Tensor) -> list[Any]:
        return [_memory(staged), staged.numel(), getattr(mpi.library(), _NUMBERS[self._dtype])]

    def put(self, staged: Tensor, *, into: Tensor) -> None:
        """Write MPI's result in `staged` into the caller's tensor."""
        if self._divisor > 1:
            staged.div_(self._divisor)
        if staged.data_ptr() != into.data_ptr():
            into.copy_(staged.view(into.shape))


def carried(tensor: Tensor, counts: Sequence[int] | None = None) -> list[Any]:
    """Return a contiguous tensor as a buffer that MPI can move. `counts`: elements from or for each rank."""
    carrier = getattr(mpi.library(), _CARRIERS[tensor.element_size()])
    return [_memory(tensor), tensor.numel() if counts is None else list(counts), carrier]


def _memory(tensor: Tensor) -> Any:
    return mpi.library().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the elements of all parts, one part after the other."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def sizes(parts: Sequence[Tensor]) -> list[int]:
    return [part.numel() for part in parts]


def check_count(tensor: Tensor, count: int) -> None:
    if tensor.numel() != count:
        raise ValueError(f"a tensor of {tensor.numel()} elements, but the ranks' parts have {count}: they must agree")


def counts_of(tensor: Tensor, splits: Sequence[int], *, size: int) -> list[int]:
    """Return how many elements of a tensor belong to each rank. `splits` divides its first dim; without it, parts are equal."""
    if not splits and len(tensor) % size:
        raise ValueError(f"{len(tensor)} rows do not divide among {size} ranks; give the splits")
    rows = list(splits) or [len(tensor) // size] * size
    row = tensor[:1].numel()
    check_count(tensor, sum(rows) * row)
    return [count * row for count in rows]
