"""The buckets of DistributedDataParallel: their layout, and the measurement that finds the fastest bucket size."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import EngineAround, Step
from framework.randomness import generator_states, set_generator_states
from framework.runtime.log import LOGGER
from framework.runtime.torch_internals import set_gradient_sync, without_buffer_sync

Hook = Callable[..., Any]  # from a process group and a bucket of this rank's gradients to their mean, or to a future of it

DEFAULT_MB = 25  # torch's default
_SIZES_MB = (DEFAULT_MB, 1, 5, 100)  # the first size is used unless another size is clearly faster
_CLEARLY = 0.95
_REPEATS = 3


class Replica:
    """A model in a DistributedDataParallel, which can be wrapped again with another bucket size.

    Without a hook, gradients are summed. The constructor is collective.
    """

    def __init__(self, model: nn.Module, *, hook: Hook | None, bucket_cap_mb: int, options: Mapping[str, Any]) -> None:
        self._model, self._hook = model, hook
        # buffers follow micro-batch 0; without device_ids, the inputs stay on the devices where the loader has put them
        self._options = {**without_buffer_sync(), **options}
        self._wrapper: DistributedDataParallel | None = None
        self.wrap(bucket_cap_mb)

    def wrap(self, bucket_cap_mb: int) -> None:
        """Wrap the model with buckets of this size. Collective."""
        self.bucket_cap_mb = bucket_cap_mb
        if self._wrapper is not None:
            self._wrapper = None
            gc.collect()  # the old reducer must not see another backward pass
        wrapper = DistributedDataParallel(self._model, bucket_cap_mb=bucket_cap_mb, **self._options)
        wrapper.register_comm_hook(wrapper.process_group, summed if self._hook is None else _with_future(self._hook))
        self._wrapper = wrapper

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        assert self._wrapper is not None
        return self._wrapper(*arguments, **named)

    def set_sync(self, does_sync: bool) -> None:
        """Set whether the next backward pass sums the gradients over the ranks."""
        assert self._wrapper is not None
        set_gradient_sync(self._wrapper, does_sync)

    def settle(self) -> None:
        """Let DistributedDataParallel lay out its buckets. Collective."""
        assert self._wrapper is not None
        settle_buckets(self._wrapper)


class MeasuredBuckets(EngineAround):
    """An Engine that measures, at the start of a run, with which bucket size a step is the fastest, and uses this size.

    It runs the forward and backward passes of the first step with each size. These passes leave no gradient, no buffer and no
    random draw behind. The time of the slowest rank counts, so all ranks choose the same size. The size changes the rounding of
    sums over three or more ranks; so a checkpoint holds the size, and a resumed run does not measure again.
    """

    def __init__(self, engine: DataParallelEngine, replica: Replica, *, world: World, forward: Forward) -> None:
        super().__init__(engine)
        self._plain, self._replica = engine, replica
        self._world, self._forward = world, forward
        self._size: int | None = None if world.world_size > 1 else replica.bucket_cap_mb

    def warm_up(self, step: Step) -> None:
        if self._size is None:
            self._size = self._measure(step)
        if self._replica.bucket_cap_mb != self._size:
            self._replica.wrap(self._size)
        self._engine.warm_up(step)

    @property
    def measured(self) -> dict[str, int]:
        return self._engine.measured | ({} if self._size is None else {"bucket_cap_mb": self._size})

    def take_up(self, measured: Mapping[str, int]) -> None:
        self._engine.take_up(measured)
        if "bucket_cap_mb" in measured:
            self._size = measured["bucket_cap_mb"]

    def _measure(self, step: Step) -> int:
        states = generator_states(devices=self._forward.devices)
        buffers = self._plain.buffers
        tensors, values = buffers.tensors, buffers.values()
        times: dict[int, float] = {}
        for size in _SIZES_MB:
            self._replica.wrap(size)
            self._replica.settle()
            taken = []
            for _ in range(1 + _REPEATS):  # the first repeat warms up
                self._world.agreement.barrier()
                start = time.perf_counter()
                self._engine.forward_backward(step, index=0, loss_scale=1.0, measure=False)
                for device in self._forward.devices:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                taken.append(time.perf_counter() - start)
                self.module.zero_grad()
                buffers.set(values, onto=tensors)
            times[size] = self._world.agreement.largest(min(taken[1:]))
        set_generator_states(states, devices=self._forward.devices)
        size = fastest(times)
        if self._world.rank == 0:
            listed = ", ".join(f"{size} MB {1000 * time_s:.3g} ms" for size, time_s in sorted(times.items()))
            LOGGER.info("parallel.bucket_cap_mb: times of a step: %s; %d is chosen", listed, size)
        return size


def fastest(times: Mapping[int, float]) -> int:
    """Return the size with the least time if that time is clearly below the time of the first size; else the first size."""
    first, best = next(iter(times)), min(times, key=lambda size: times[size])
    return best if times[best] < _CLEARLY * times[first] else first


def summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket over the ranks. (DDP itself would average it.)"""
    gradient = bucket.buffer()
    work = dist.all_reduce(gradient, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # value() raises the error of a failed collective


def _with_future(hook: Hook) -> Callable[..., Any]:
    """Return the hook in the form that DDP takes: it reads the annotations, and needs a future."""

    def run(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        mean = hook(group, bucket)
        if isinstance(mean, Tensor):
            there: Future[Tensor] = Future()
            there.set_result(mean)
            return there
        return mean  # type: ignore[no-any-return]

    return run


class _Zero(nn.Module):
    """A zero that gives every parameter a gradient of zeros; the last parameter gets its gradient first, as in most models."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._given = parameters

    def forward(self, zero: Tensor) -> Tensor:
        for parameter in self._given:
            zero = zero + (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum().to(zero) * 0.0
        return zero


def settle_buckets(wrapper: DistributedDataParallel) -> None:
    """Let the reducer lay out its buckets without a forward pass of the model. Collective.

    The reducer does so once, after the first backward pass, and the layout decides in which order a ring sums. Without this
    call, the first step after a resume would be summed in another order.
    """
    model = wrapper.module
    parameters = [p for p in nn.Module.parameters(model) if p.requires_grad]
    wrapper.module = _Zero(parameters)
    try:
        for _ in range(2):  # the second pass uses the new layout
            wrapper(torch.zeros((), dtype=parameters[0].dtype.to_real(), device=parameters[0].device)).backward()
    finally:
        wrapper.module = model
    model.zero_grad(set_to_none=True)
