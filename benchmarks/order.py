"""The cost of a data set's order: the first batch of an epoch, and each later batch, compared with numpy's permutation.

    python benchmarks/order.py

The figures are medians of five seeds. Memory is the peak that numpy and Python allocate.
"""

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from framework.data.order import Order

BATCH = 256


def order_of(num_samples: int, seed: int) -> Order:
    return Order(num_samples=num_samples, global_batch_size=BATCH, seed=seed, drop_last=False)


def median_ms(work: Callable[[int], object]) -> float:
    seconds = []
    for seed in range(5):
        begun = time.perf_counter()
        work(seed)
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


def peak_mib(work: Callable[[int], object]) -> float:
    tracemalloc.start()
    work(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


def first_batch(num_samples: int, seed: int) -> object:
    return order_of(num_samples, seed).batch(0)


def of_numpy(num_samples: int, seed: int) -> object:
    return np.random.RandomState(seed).permutation(num_samples)[:BATCH]


def batches(order: Order, _: int) -> None:
    for number in range(300):
        order.batch(BATCH * number)


def main() -> None:
    print(f"{'samples':>12} {'first batch, ms':>16} {'MiB':>7} {'each batch, us':>15}   {'numpy, ms':>10} {'MiB':>7}")
    for num_samples in (10**5, 10**6, 10**7, 10**8, 10**9):
        first, permuted = partial(first_batch, num_samples), partial(of_numpy, num_samples)
        each_us = 1e3 * median_ms(partial(batches, order_of(num_samples, 0))) / 300
        text = f"{num_samples:12,} {median_ms(first):16.2f} {peak_mib(first):7.2f} {each_us:15.1f}"
        if num_samples <= 10**7:  # for more samples it takes minutes
            text += f"   {median_ms(permuted):10.1f} {peak_mib(permuted):7.0f}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
