"""What rank 0 decides for all processes of a launcher: the frozen configuration with which they start, or an exit code."""

import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from framework.config.frozen_file import FrozenConfig
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, Interrupted
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    import torch.distributed as dist

PATIENCE = timedelta(minutes=10)  # without a sign of rank 0
SIGN_S = 60.0
_TO_READ = timedelta(seconds=10)


PRINTED: list[str] = []  # the problems that this process printed last


def store_of(environment: Environment, *, part: str = "start") -> "dist.Store":
    """Return the store through which the processes agree. Collective."""
    from framework.distributed.groups import launcher_store  # imports torch: a wrong command line does not need it

    return launcher_store(environment, timeout=PATIENCE, part=part)


def publish(decision: FrozenConfig | int, *, environment: Environment) -> None:
    """Send rank 0's decision to the other ranks. After an exit code, rank 0 ends, so first wait until they have read it."""
    if environment.world_size == 1:
        return
    from framework.distributed.groups import poll

    store = store_of(environment)
    if isinstance(decision, FrozenConfig):
        store.set("decision", json.dumps([str(decision.path.absolute()), decision.digest, decision.token]))
    else:
        store.set("decision", json.dumps(int(decision)))
        with suppress(Interrupted):
            poll(lambda: store.add("readers", 0) >= environment.world_size - 1, timeout=_TO_READ)


def received(*, environment: Environment) -> FrozenConfig | int:
    """Return rank 0's decision, on another rank. Raise Interrupted after a signal, or if rank 0 gives no sign."""
    from framework.distributed.groups import awaited

    store = store_of(environment)
    decision = json.loads(awaited(store, "decision", timeout=PATIENCE, sign="signs"))
    store.add("readers", 1)
    return decision if isinstance(decision, int) else FrozenConfig(Path(decision[0]), *decision[1:])


_TO_END_S = 5.0


def print_problems(problems: list[Problem], *, each_rank: bool = False) -> Exit:
    """Print the problems, one per line, and return the exit code. Under a launcher, only rank 0 prints, unless `each_rank`.

    A launcher ends all ranks when one of them ends: the others wait until rank 0 has printed.
    """
    code = next((problem.code for problem in problems if problem.code == Exit.CONFIGURATION), problems[0].code)
    environment = Environment.read()
    if environment.rank != 0 and not each_rank:
        received(environment=environment)
        return code
    if environment.rank != 0:  # the ranks cannot speak to each other; the launcher ends this one when rank 0 has printed
        time.sleep(_TO_END_S)
    PRINTED[:] = map(str, problems)
    for line in PRINTED:
        print(line, file=sys.stderr, flush=True)
    if environment.is_launched and not each_rank:
        publish(code, environment=environment)
    return code
