"""A section of the configuration: the types of its keys, and its rules."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from framework.runtime.problem import Problem

LARGEST = 2**63 - 1  # 64 bits

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
OTHER_VALIDATION = Annotated[str, StringConstraints(pattern=r"^val\.\w+$")]  # a split: a further validation set
AboveZero = Annotated[float, Field(gt=0)]


def setting(default: Any, description: str, *, execution: bool = False, written: str = "") -> Any:
    """Declare a key of a section: its default and its meaning, from which conf/, the help and the docs are generated.

    `execution`: the key, or all keys of the section, decide how a run is executed, not what it computes. `written` is the text
    in conf/ of a key without a default (...), for example an interpolation.
    """
    return Field(default, description=description, json_schema_extra={"execution": execution, "written": written})


class Section(BaseModel):
    """A section of the configuration. `rules` yields problems that types cannot express, under the section's keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def rules(self) -> Iterator[Problem]:
        yield from ()

    @model_validator(mode="after")
    def _follow_rules(self) -> "Section":
        if problems := list(self.rules()):
            raise PydanticCustomError("rules", "{count} rules are broken", {"count": len(problems), "problems": problems})
        return self


def texts_in(value: Any) -> Iterator[str]:
    """Yield each text in a node."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(item)
