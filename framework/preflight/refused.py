"""The exception that ends a dry build or a rehearsal with a problem, and the exceptions of the user's code that become one."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from framework.engine.of_samples import WrongRows
from framework.runtime.exits import DiskFailed, Unfit, error_text, lacks_memory, place_of
from framework.runtime.problem import Problem


class Refused(Exception):
    """The exception that ends a dry build or a rehearsal with a problem. A component's node may have several."""

    def __init__(self, key: str, what: str, cure: str = "", *, is_certain: bool = True) -> None:
        super().__init__(what)
        self.problems = [Problem(key, what, cure, is_warning=not is_certain)]

    @classmethod
    def of(cls, problems: list[Problem]) -> "Refused":
        refused = cls("", "")
        refused.problems = problems
        return refused

    @property
    def problem(self) -> Problem:
        return self.problems[0]


@contextmanager
def refusing(*kinds: type[BaseException], to: Callable[[Any], Problem | list[Problem]]) -> Iterator[None]:
    """Refuse what raises an exception of these kinds inside, with the problems `to` which the exception is turned."""
    try:
        yield
    except Refused:
        raise
    except kinds as error:
        found = to(error)
        raise Refused.of(found if isinstance(found, list) else [found]) from error


@contextmanager
def blamed(key: str, what: str, cure: str) -> Iterator[None]:
    """Turn exceptions of the user's code inside into a problem. If the model will run on a GPU, the CPU may be the cause."""
    try:
        yield
    except (Refused, DiskFailed):
        raise
    except (Unfit, WrongRows) as error:  # its message already says what is wrong
        own_key, _, own = str(error).partition(": ")
        said = re.fullmatch(r"(.+?) \((.+)\)", own)
        own, remedy = said.groups() if said else (own, cure)
        raise Refused(own_key, own, remedy) from error
    except Exception as error:
        if lacks_memory(error):  # for so many samples on this machine: the rehearsal is then not finished
            raise
        is_certain = key != "model" or not torch.cuda.is_available()
        what = f"{what}: {error_text(error)}, at {place_of(error)}"
        raise Refused(key, what, cure, is_certain=is_certain) from error
