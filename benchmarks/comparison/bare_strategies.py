"""The loops that one writes by hand with torch alone for each way of training on several processes, started by torchrun.

    torchrun --nproc_per_node=2 benchmarks/comparison/bare_strategies.py ddp

The model class, micro-batches, optimizer, rate and shapes are those of benchmarks/strategies.py; rank 0 prints the median
milliseconds of a step.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.gpt import GPT  # noqa: E402

BATCH, MICRO_BATCH, SEQ_LEN, VOCABULARY, STEPS = 16, 4, 64, 64, 40


def batches(samples: Tensor) -> Iterator[Tensor]:
    """Yield the global batches, in another order each epoch."""
    while True:
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        yield from (samples[order[start : start + BATCH]] for start in range(0, len(samples), BATCH))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the share of these tokens in the mean over the global batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * SEQ_LEN)


def stepping(name: str, model: nn.Module, *, rank: int, size: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return what holds the parameters, and a function that leaves the gradients of a global batch and returns its loss."""
    device = torch.device("cpu")
    if name == "pipeline":
        return pipeline(model, rank=rank, size=size)
    own = slice(None) if name in ("single", "tensor") else slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    factor = 1.0
    wrapper: Any = model
    if name == "ddp":
        wrapper, factor = nn.parallel.DistributedDataParallel(model), float(size)  # which takes the mean over ranks
    if name == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh, factor = init_device_mesh("cpu", (size,)), float(size)
        for block in [*model.layers, model]:  # type: ignore[operator,misc]
            fully_shard(block, mesh=mesh)
    if name == "tensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: dict[str, Any] = {f"layers.*.attention.{part}": ColwiseParallel() for part in ("query", "key", "value")}
        plan |= {"layers.*.attention.out": RowwiseParallel(), "layers.*.mlp.down": RowwiseParallel()}
        plan |= {"layers.*.mlp.up": ColwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)

    def take(batch: Tensor) -> Tensor:
        parts = batch[own].to(device).split(MICRO_BATCH)
        total = torch.zeros(())
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            if name == "fsdp":
                wrapper.set_requires_gradient_sync(is_last)
            with wrapper.no_sync() if name == "ddp" and not is_last else nullcontext():
                loss = loss_of(wrapper(part[:, :-1]), part[:, 1:])
                (loss * factor).backward()
            total += loss.detach()
        return total

    return model, take


def pipeline(model: Any, *, rank: int, size: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    links = list(model.chain())
    cuts = [round(len(links) * part / size) for part in range(size + 1)]
    stage = nn.Sequential(*links[cuts[rank] : cuts[rank + 1]])
    schedule = Schedule1F1B(PipelineStage(stage, rank, size, torch.device("cpu")), BATCH // MICRO_BATCH, loss_fn=loss_of,
                            scale_grads=False)  # fmt: skip

    def take(batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        given = (inputs,) if rank == 0 else ()
        named: dict[str, Any] = {"target": targets, "losses": losses} if rank == size - 1 else {}
        schedule.step(*given, **named)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())

    return stage, take


def main() -> None:
    name = sys.argv[1]
    rank, size = 0, 1
    if name != "single":
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCABULARY, seq_len=SEQ_LEN, dim=128, num_layers=4, num_heads=4)
    held, take = stepping(name, model, rank=rank, size=size)
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in held.parameters():  # a fused step takes shards or whole tensors
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    samples = torch.randint(0, VOCABULARY, (512, SEQ_LEN + 1))
    times = []
    for step, batch in enumerate(batches(samples), 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = take(batch)
        optimizer.step()
        schedule.step()
        if step % 5 == 0:
            loss.item()
        times.append(time.perf_counter() - start)
        if step == STEPS:
            break
    if rank == 0:
        print(1000 * statistics.median(times[len(times) // 2 :]))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
