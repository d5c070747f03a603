"""Command lines under one mpirun, whose interpreters are slow to start, one after the other. Run by test_mpi.py.

`python mpi_commands.py FILE [FAULT]`: FILE holds a JSON list of lists of overrides; FAULT befalls rank 1 in step 3.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from extras.mpi import mpi
from framework.cli.run import start
from framework.runtime.environment import Environment
from framework.training.loop import Trainer


def fail() -> None:
    raise ValueError("a fault of rank 1's own")


def stand_still() -> None:
    time.sleep(600)


FAULTS = {fault.__name__: fault for fault in (fail, stand_still)}


def plant(fault: Callable[[], None]) -> None:
    original = Trainer.train_step

    def train_step(self: Trainer, *args: object, **kwargs: object) -> object:
        if self.progress.step == 3 and Environment.read().rank == 1:
            fault()
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    Trainer.train_step = train_step  # type: ignore[method-assign,assignment]


def main(file: str, fault: str | None = None) -> int:
    if fault is not None:
        plant(FAULTS[fault])
    leave = mpi.leave
    mpi.leave = lambda: None  # MPI can be started once only in a process
    codes = [start(line) for line in json.loads(Path(file).read_text())]
    if all(code == 0 for code in codes):
        leave()
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
