"""Types in messages: their names, and the value of a type that the user probably meant."""

import functools
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from framework.config.period import WITH_UNIT
from framework.config.section import OTHER_VALIDATION
from framework.config.spelling import nearest
from framework.config.targets import UNIONS
from framework.runtime.problem import shown
from framework.runtime.program import typed_override

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    WITH_UNIT: "a number with a unit, as in 1ep, 5000samples, 80000tokens or 10min",
    OTHER_VALIDATION: "val.NAME",
    type(None): "null",
    list: "a list",
    list[int]: "a list of integers, as in [1, 2]",
    list[float]: "a list of numbers, as in [0.9, 0.99]",
    list[str]: "a list of texts, as in [a, b]",
}


def bare(annotation: Any) -> Any:
    """Return an annotation without `Annotated` around it or around its members."""
    if annotation in (WITH_UNIT, OTHER_VALIDATION):
        return annotation
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    if get_origin(annotation) in UNIONS:
        return functools.reduce(lambda one, other: Union[one, other], map(bare, get_args(annotation)))  # noqa: UP007
    if get_origin(annotation) is list:
        return list[bare(get_args(annotation)[0])]  # type: ignore[misc]  # a type made at run time
    return annotation


def described(annotation: Any, *, key: str) -> str:
    """Return the description of a type's values, for messages about `key`."""
    annotation = bare(annotation)
    if get_origin(annotation) in UNIONS:
        return ", or ".join(described(member, key=key) for member in get_args(annotation))
    if get_origin(annotation) is Literal:
        choices = [str(shown(choice)).strip("'") for choice in get_args(annotation)]
        return "one of " + ", ".join(choices) if len(choices) > 1 else choices[0]
    if get_origin(annotation) is list and get_origin(get_args(annotation)[0]) is Literal:
        names = get_args(get_args(annotation)[0])
        return f"a list of {', '.join(names)}, as in [{names[0]}]"
    return _NAMES.get(annotation, f"a section, whose keys are set as in {key}.KEY=VALUE")


def meant(value: Any, annotation: Any, *, key: str) -> str | None:
    """Return the value of the right type that the user probably meant, or None."""
    annotation = bare(annotation)
    types = get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)
    choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices and value not in (None, False):
        return nearest(str(value), [choice for choice in choices if isinstance(choice, str)])
    if type(None) in types and (value is False or str(value).lower() in ("none", "off", "")):
        return "null"
    if str in types and isinstance(value, (bool, int, float)):
        return typed_override(key, shown(value))
    if isinstance(value, bool) and bool not in types:
        return None
    try:
        return shown(TypeAdapter(annotation, config=_LAX).validate_python(value))
    except (ValidationError, PydanticUserError):  # a class of the user; a section
        return None


_LAX = ConfigDict(allow_inf_nan=False)  # pydantic then reads yes as true, and "3" or 3.0 as 3
