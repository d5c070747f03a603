"""How exactly a device computes: settings of torch that hold for the whole process."""

import torch

from framework.runtime.environment import variables


def set_numerics(*, matmul: str, deterministic: bool) -> None:
    """Set the precision of products in float32, of matrices and in convolutions alike, and whether bits repeat on CUDA.

    `matmul` is torch's name: highest, in float32 itself, or high, in TF32. By itself torch takes TF32 in convolutions, whatever
    it takes elsewhere. `deterministic`: an operation without a deterministic kernel is an error then, where it is called.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would cost a pass
        variables().setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
