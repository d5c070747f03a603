"""The precision of a device's computations: settings of torch for the whole process."""

import torch

from framework.runtime.environment import variables


def set_numerics(*, matmul: str, deterministic: bool) -> None:
    """Set the precision of float32 products, in matrix products and in convolutions, and whether bits repeat on CUDA.

    `matmul` is torch's name: `highest` computes in float32, `high` computes in TF32. By default torch uses TF32 in
    convolutions, whatever it uses elsewhere. With `deterministic`, an operation without a deterministic kernel raises an
    error.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would cost a pass
        variables().setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the first product
