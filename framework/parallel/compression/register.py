"""Which hook a name means."""

import importlib

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def register(wrapper: DistributedDataParallel, name: str, *, group: dist.ProcessGroup) -> None:
    """Have the wrapper sum its gradients through the hook of the module `name` in this package. Collective."""
    module = importlib.import_module(f"framework.parallel.compression.{name}")
    wrapper.register_comm_hook(module.State(group), module.hook)
