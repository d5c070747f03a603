"""The cores of a machine, which the processes of a run share."""

import os

import torch

from framework.runtime.environment import node_name
from framework.runtime.log import LOGGER


def share_cores(num_processes: int) -> None:
    """Give this process its share of the cores as threads. Log a message if this machine has more processes than cores."""
    num_cores = len(os.sched_getaffinity(0))
    if num_processes > 1:
        torch.set_num_threads(max(1, num_cores // num_processes))
    if num_processes > num_cores:
        LOGGER.info("%d processes share %d core%s of %s: on CPUs, fewer processes are faster (launch.nproc_per_node)",
                    num_processes, num_cores, "s" * (num_cores != 1), node_name())  # fmt: skip
