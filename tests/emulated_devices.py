"""Several devices in one process on a machine that has none: their memory is the CPU's, their rules are CUDA's.

`emu:0`, `emu:1`, ... are torch's PrivateUse1 device, renamed. To be imported in a process of its own: torch cannot take the
name back.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from framework.distributed.groups import Groups
from framework.distributed.world import World
from tests.emulated_tensors import GlooForEmulated, emulate


class _Streams(_DummyBackendModule):
    """The device's module, with the one stream that the checkpoint writer asks for."""

    def current_stream(self) -> "_Streams":
        return self

    def synchronize(self) -> None:
        pass

    def stream(self, _: Any) -> Any:
        return nullcontext()


_setup_privateuseone_for_python_backend("emu", backend_module=_Streams())
torch._C._set_multithreading_enabled(False)  # autograd would want a thread of its own for each device
emulate("PrivateUse1")


def plant(num_devices: int) -> None:
    """Make every World of this process one with so many emulated devices."""
    dist.Backend.register_backend("emu", GlooForEmulated, devices=["emu"])
    start: Callable[..., World] = World.start
    join = Groups.join

    def emulated_join(self: Groups, store: dist.Store) -> None:
        self.backend = "cpu:gloo,emu:emu"
        join(self, store)

    def emulated_start(*args: Any, **kwargs: Any) -> World:
        torch._C._set_multithreading_enabled(False)  # it belongs to a thread, and a process is forked by another one
        world = start(*args, **kwargs)
        first = world.local_rank * num_devices
        return dataclasses.replace(world, devices=[torch.device("emu", first + index) for index in range(num_devices)])

    Groups.join = emulated_join
    World.start = emulated_start
