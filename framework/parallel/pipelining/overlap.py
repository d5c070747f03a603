"""The gradients of parallel pipelines are summed while the backward pass runs."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from framework.distributed.buckets import UNDER_WAY, Message, begin_sum, buckets_of
from framework.optim.update import gradient_or_zeros
from framework.runtime.exits import Unfit


class OverlappedSums:
    """A sum of gradients over the processes of a group, in buckets; a bucket starts when all its gradients are final.

    `stages` has the parameters of this process's stages, by number. A gradient is final after the backward pass of the last
    micro-batch through its stage; if several stages have it, after the last of these. The buckets are laid out once, in the
    order of a backward pass, and start in this order, even if a later bucket is final first. So every process sends the same
    messages, and the order of the sums depends on no timing. Source: Li et al. 2020, "PyTorch Distributed", section 3.2.
    """

    def __init__(self, stages: Mapping[int, Sequence[nn.Parameter]], *, group: dist.ProcessGroup) -> None:
        self._group = group
        self._holders: dict[nn.Parameter, set[int]] = {}
        for number, parameters in stages.items():
            for parameter in parameters:
                self._holders.setdefault(parameter, set()).add(number)
        last_first = [p for number in sorted(stages, reverse=True) for p in reversed(stages[number])]
        self._buckets = list(buckets_of(p for p in reversed(dict.fromkeys(reversed(last_first)))))
        self._bucket_of = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[set[nn.Parameter]] = []  # of each bucket
        self._begun: deque[Message] = deque()
        self._num_begun = 0
        self._ended: set[int] = set()
        self._open: int | None = None  # the stage with a last backward pass in progress
        self._is_on = False
        for parameter in self._holders:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self, *, early: bool) -> None:
        """Prepare for a step's last pass. `early`: gradients are final after the last backward passes, not only in `finish`."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._begun.clear()
        self._num_begun, self._ended, self._open, self._is_on = 0, set(), None, early

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """Surround the backward pass of a stage's last micro-batch: the whole pass, or only the pass for the weights."""
        self._open = stage
        try:
            yield
        finally:
            self._open = None
        self._ended.add(stage)
        if self._is_on:
            for parameter, holders in self._holders.items():
                if stage in holders and holders <= self._ended:
                    self._missing[self._bucket_of[parameter]].discard(parameter)
            self._send()

    def finish(self) -> None:
        """Sum the gradients that are not summed yet, and wait for all sums. Collective."""
        for bucket in self._missing:
            bucket.clear()
        self._send(at_most=UNDER_WAY)
        while self._begun:
            self._begun.popleft().finish()
        self._is_on = False

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if not self._is_on or self._open is None or self._holders[parameter] != {self._open}:
            return
        missing = self._missing[self._bucket_of[parameter]]
        if parameter not in missing:
            raise Unfit("parallel: the backward pass adds to a gradient twice, and ddp+pp sums it the first time (recompute "
                        "with use_reentrant=False, or take zero or fsdp)")  # fmt: skip
        missing.remove(parameter)
        self._send()

    @torch.no_grad()
    def _send(self, *, at_most: int | None = None) -> None:
        while self._num_begun < len(self._buckets) and not self._missing[self._num_begun]:
            bucket = self._buckets[self._num_begun]
            self._num_begun += 1
            self._begun.append(begin_sum([gradient_or_zeros(p) for p in bucket], group=self._group))
            while self._begun and (self._begun[0].is_there or (at_most is not None and len(self._begun) > at_most)):
                self._begun.popleft().finish()
