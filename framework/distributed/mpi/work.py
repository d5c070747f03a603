"""Operations of MPI that are under way, as torch.distributed waits for them."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from framework.distributed.mpi import start as mpi


class Started(dist.Work):
    """Operations that MPI has begun. They go on whenever this process is inside MPI, and end in `wait` at the latest."""

    _unfinished: set["Started"] = set()  # MPI uses their memory, also if nobody waits for them

    def __init__(self, what: str, *, timeout: timedelta, result: list[Tensor]) -> None:
        super().__init__()
        self._what = what
        self._timeout = timeout
        self._result = result
        self._requests: list[Any] = []
        self._used: list[Tensor] = []
        self._last: list[Callable[[], object]] = []
        self._unfinished.add(self)

    def add(self, request: Any, *used: Tensor) -> None:
        """Take in an operation that uses the memory of these tensors."""
        self._requests.append(request)
        self._used.extend(used)

    def at_end(self, act: Callable[[], object]) -> None:
        self._last.append(act)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self in self._unfinished:
            mpi.complete(self._requests, what=f"MPI: {self._what}", timeout=timeout or self._timeout)
            self._finish()
        return True

    def is_completed(self) -> bool:
        if self in self._unfinished and mpi.library().Request.Testall(self._requests):
            self._finish()
        return self not in self._unfinished

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future that is there already: no thread of ours would complete it while the caller computes."""
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(self._result)
        return future

    def _finish(self) -> None:
        self._unfinished.discard(self)
        with torch.no_grad():
            for act in self._last:
                act()
        self._requests, self._used, self._last = [], [], []
