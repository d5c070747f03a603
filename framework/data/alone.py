"""The world as a dataset sees it: one process. The run divides the samples; a dataset that did so too would do it twice."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from framework.runtime.environment import outside_of_groups


@contextmanager
def alone() -> Iterator[None]:
    """Let code that asks torch.distributed, or the environment, for the number of processes find one."""
    answers: dict[str, Any] = {"is_initialized": lambda: False, "get_rank": lambda group=None: 0}
    answers["get_world_size"] = lambda group=None: 1
    functions = vars(sys.modules.get("torch.distributed", SimpleNamespace()))  # without torch, this process is in no group
    asked = {name: functions.get(name) for name in answers}
    with outside_of_groups():
        functions.update(answers)  # what torch itself asks is in another module
        try:
            yield
        finally:
            functions.update(asked)
