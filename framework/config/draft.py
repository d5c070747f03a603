"""A configuration that is not yet a `RunConfig`: its valid fields so far, and every problem."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from framework.config.schema import RunConfig, Section
from framework.runtime.problem import Problem


class Draft:
    """The valid fields of the root, and the problems of the other fields.

    A function names the fields that it needs by its parameters without a default, and gets them with the schema's types. A
    function is not called if one of its fields has a problem.
    """

    def __init__(self, fields: dict[str, Any], problems: Iterable[Problem]) -> None:
        self.fields = fields
        self.problems: list[Problem] = []
        self._faulty: set[str] = set()
        self.add(problems)

    def add(self, problems: Iterable[Problem]) -> None:
        """Add problems."""
        for problem in problems:
            self.problems.append(problem)
            self._faulty.add(problem.key.partition(".")[0])

    def call(self, function: Callable[..., Any], *, otherwise: Any = None) -> Any:
        """Call a function with the fields that it needs. Return `otherwise` if one of the fields is not valid."""
        parameters = inspect.signature(function).parameters.values()
        names = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        if not names <= self.fields.keys() - self._faulty:
            return otherwise
        return function(**{name: self.fields[name] for name in names})

    def check(self, *rules: Callable[..., Iterable[Problem]]) -> None:
        """Add the problems that rules find."""
        self.add([problem for rule in rules for problem in self.call(rule, otherwise=())])

    def change(self, field: str, function: Callable[..., tuple[Any, list[Problem]]]) -> list[Problem]:
        """Replace a field by the value that a function returns. Return the problems that the function found."""
        changed = self.call(function)
        if changed is None:
            return []
        self.fields[field], problems = changed
        return problems

    @property
    def config(self) -> RunConfig | None:
        """The complete configuration, or None if there is a problem."""
        plain = {name: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
                 for name, value in self.fields.items()}  # fmt: skip
        return None if self.problems else RunConfig.model_validate(plain)
