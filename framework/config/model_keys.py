"""The framework's own keys in the model's node: answers that the model itself does not give, and its initial weights."""

from typing import Any, Literal

from framework.config.init_from import InitFile
from framework.config.schema import keys_of
from framework.config.section import Section
from framework.config.validation import section_problems
from framework.runtime.problem import Problem, shown


class ModelParts(Section):
    """`model.parts`: answers for a model that does not answer itself (framework/modules/parts.py)."""

    blocks: str | int | list[str] | None = None  # paths of modules or module lists, a class, or a block's size; [] = none
    experts: str | list[str] | None = None
    chain: list[str] | None = None
    tensor_plan: dict[str, Literal["colwise", "rowwise", "gather", "vocabulary"]] | None = None


def parts_problems(parts: Any) -> list[Problem]:
    """Check the types of `model.parts`. (The dry build checks that its names are modules.)"""
    return [] if parts is None else section_problems(ModelParts, parts, "model.parts", keys_of(ModelParts, "model.parts."))


_INIT_KEYS = "{" + ", ".join(InitFile.model_fields) + "}"


def init_problems(init_from: Any) -> list[Problem]:
    """Check the types of `model.init_from`. The files are not read."""
    if isinstance(init_from, str):
        return []
    if not isinstance(init_from, list) or not init_from:
        return [Problem("model.init_from", f"{shown(init_from)} is not valid", f"text, a list of {_INIT_KEYS}, or null")]
    problems: list[Problem] = []
    for number, entry in enumerate(init_from):
        key = f"model.init_from[{number}]"
        if not isinstance(entry, (str, dict)):
            problems.append(Problem(key, f"{shown(entry)} is not valid", f"text, or {_INIT_KEYS}"))
        elif isinstance(entry, dict):
            problems += section_problems(InitFile, entry, key, keys_of(InitFile, f"{key}."))
    return problems
