"""PowerSGD: each matrix of gradients is sent as the product of two thin ones (Vogels et al. 2019); torch's own."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

RANK = 4  # of the approximation
START_STEP = 10  # before it, gradients are sent whole: the first ones are far from low rank


def State(group: dist.ProcessGroup) -> PowerSGDState:  # noqa: N802  # it stands for the class that other hooks have
    return PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=START_STEP)


hook = powerSGD_hook
