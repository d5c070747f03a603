"""A back end of another package, as a user would register it: gloo's group, in front of which calls are counted."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

NAME = "counting"


class CountingGroup(dist.ProcessGroup):
    """Passes on to gloo; at each call the counts go into the file that COUNTING_BACKEND names, if it is set."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # the stub lacks this form
        self._name = options.group_id
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        gloo._timeout = options.timeout
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, gloo)
        self.counts = Counter[str]()

    @property
    def group_name(self) -> str:
        return str(self._name)

    def getBackendName(self) -> str:  # torch's own name
        return NAME

    def pass_on(self, name: str, *arguments: Any) -> Any:
        self.counts[name] += 1
        if folder := os.environ.get("COUNTING_BACKEND"):
            with open(os.path.join(folder, name), "a") as file:
                file.write(".")
        return getattr(self._gloo, name)(*arguments)


def _passing_on(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self.pass_on(name, *arguments)


for _name in ("allreduce", "allgather", "broadcast", "barrier", "send", "recv", "gather", "scatter", "reduce_scatter"):
    setattr(CountingGroup, _name, _passing_on(_name))

if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, lambda options, _: CountingGroup(options), extended_api=True, devices=["cpu"])
