"""Floating-point operations: how many a model needs for a sample, and a device's peak per second."""

import torch
from torch import Tensor, nn

from framework.tasks.outputs import main_output

# Dense (without sparsity) tera-operations a second by precision, from NVIDIA's data sheets; the first name that fits counts.
PEAKS_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250, "fp16": 2250, "tf32": 1100, "fp32": 75},
    "H200": {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "H100 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "H100": {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},  # SXM: "NVIDIA H100 80GB HBM3"
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "V100-SXM": {"fp16": 125, "fp32": 15.7},
}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(device: torch.device, *, precision: str) -> float | None:
    """Return a device's peak in operations per second; None if it is not known, as for a CPU."""
    return peak_of(device_name(device), precision=precision) if device.type == "cuda" else None


def peak_of(device_name: str, *, precision: str) -> float | None:
    for name, peaks in PEAKS_TFLOPS.items():
        if name in device_name:
            return peaks[precision] * 1e12 if precision in peaks else None
    return None


def flops_per_sample(model: nn.Module, batch: Tensor) -> float | None:
    """Count the operations of one forward and backward pass from shapes: `model` and `batch` must be on the meta device.

    Matrix products, convolutions and attention count; a multiply-add counts as two. The recomputation of a strategy and the
    optimizer do not count. Return None for a model that cannot run on shapes only.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        try:
            main_output(model(batch)).sum().backward()
        except Exception:  # a user's model may read numbers, not only shapes
            return None
    return counter.get_total_flops() / len(batch)
