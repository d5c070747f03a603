"""The cost of a step if the C library keeps freed memory (launch.keep_freed_memory), compared with glibc's defaults.

    python benchmarks/allocator.py          a GPT, a CNN and a ResNet; two processes of the GPT

A bare PyTorch loop runs in separate processes: in each round, one process with each setting. The figures are medians with
quartiles over the rounds. System time is the time of the kernel, which clears pages. Page faults are counted.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_ROUNDS, NUM_STEPS, WARM_UP = 5, 6, 2


class Measured(NamedTuple):
    step_ms: float  # the median step
    system_ms: float  # per step
    faults: float  # per step
    peak_mb: float


def gpt() -> tuple[Any, Any, Any]:
    import torch

    from models.gpt import GPT

    tokens = torch.randint(0, 8000, (8, 257))
    return GPT(vocab_size=8000, seq_len=256, dim=256, num_layers=4, num_heads=4), tokens[:, :-1], tokens[:, 1:]


def cnn() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return (
        nn.Sequential(block(3, 32), block(32, 64), block(64, 128), *head),
        torch.randn(128, 3, 32, 32),
        torch.arange(128) % 10,
    )


def resnet() -> tuple[Any, Any, Any]:
    import torch

    from models.resnet import ResNet

    return ResNet(num_classes=10, in_channels=3, norm="batch"), torch.randn(16, 3, 32, 32), torch.arange(16) % 10


def train(build: Callable[[], tuple[Any, Any, Any]], *, keeps: bool, num_threads: int, send: Any) -> None:
    import torch
    import torch.nn.functional as F

    from framework.runtime.memory import keep_freed_memory

    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    if keeps:
        assert keep_freed_memory(), "another allocator, or settings of its own"
    model, inputs, targets = build()
    optimizer, seconds, before = torch.optim.AdamW(model.parameters(), fused=True), [], resource.getrusage(resource.RUSAGE_SELF)
    for number in range(WARM_UP + NUM_STEPS):
        if number == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF)
        begun = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF)
    send(Measured(
        1e3 * statistics.median(seconds[WARM_UP:]),
        1e3 * (after.ru_stime - before.ru_stime) / NUM_STEPS,
        (after.ru_minflt - before.ru_minflt) / NUM_STEPS,
        after.ru_maxrss / 1024,
    ))  # fmt: skip


def in_processes(build: Callable[[], tuple[Any, Any, Any]], *, keeps: bool, count: int) -> Measured:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    options = {"keeps": keeps, "num_threads": 2 // count, "send": sender.send}
    processes = [context.Process(target=train, args=(build,), kwargs=options) for _ in range(count)]
    for process in processes:
        process.start()
    found = [receiver.recv() for _ in processes]
    for process in processes:
        process.join()
    return Measured(*(statistics.mean(values) for values in zip(*found)))


def main() -> None:
    print(
        f"{'model':16} {'':6} {'step ms':>8} {'system ms':>10} {'page faults':>12} {'peak MB':>8}   step, kept against given back"
    )
    for name, build, count in (("GPT", gpt, 1), ("CNN", cnn, 1), ("ResNet-18", resnet, 1), ("GPT, 2 processes", gpt, 2)):
        rounds: dict[bool, list[Measured]] = {False: [], True: []}
        for _ in range(NUM_ROUNDS):
            for keeps, found in rounds.items():
                found.append(in_processes(build, keeps=keeps, count=count))
        ratios = [kept.step_ms / given.step_ms for given, kept in zip(rounds[False], rounds[True])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        for keeps, found in rounds.items():
            step, system, faults, peak = (statistics.median(values) for values in zip(*found))
            ratio = f"{middle:.2f} [{low:.2f}..{high:.2f}]" if keeps else ""
            print(f"{name if not keeps else '':16} {'kept' if keeps else 'given':6} {step:8.1f} {system:10.1f} {faults:12.0f} {peak:8.0f}"
                  f"   {ratio}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
