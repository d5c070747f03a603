"""Settings of torch for the whole process: the precision of its computations, and its threads."""

import torch

from framework.runtime.environment import node_name, variables
from framework.runtime.log import LOGGER
from framework.runtime.memory import cpus


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


def share_cores(num_processes: int) -> None:
    """Give this process its share of the cores as threads. Log a message if this machine has more processes than cores."""
    num_cores = len(cpus())
    if num_processes > 1:
        torch.set_num_threads(max(1, num_cores // num_processes))
    if num_processes > num_cores:
        LOGGER.info("%d processes share %d core%s of %s: on CPUs, fewer processes are faster (launch.nproc_per_node)",
                    num_processes, num_cores, "s" * (num_cores != 1), node_name())  # fmt: skip
