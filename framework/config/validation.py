"""Compares a configuration with the schema, without importing torch, and says what is wrong in words of its own."""

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from framework.config.ranges import range_problems
from framework.config.schema import COMPONENTS, Config, Section, SlurmConfig, keys_of
from framework.config.signatures import arguments_of
from framework.config.spelling import did_you_mean, nearest
from framework.runtime.problem import Problem, shown


def schema_problems(config: dict[str, Any]) -> list[Problem]:
    """Return every unknown key, wrong type and value out of its range in the composed, resolved `config`."""
    components = {group: config[group] for group in COMPONENTS if isinstance(config.get(group), dict)}
    launch = config.get("launch")
    root = SlurmConfig if isinstance(launch, dict) and launch.get("kind") == "slurm" else Config
    known = keys_of(root)
    for group, node in components.items():
        known += [f"{group}.{name}" for name in arguments_of(str(node.get("_target_"))) or {}]
    known.append("model.init_from")
    problems = _problems(root, config, prefix="", known=known)
    for group, node in components.items():
        problems += _component_problems(group, node, known=known)
    logger = config.get("logger")
    for name, node in (logger if isinstance(logger, dict) else {}).items():
        problems += _logger_problems(name, node)
    wrong = {problem.key for problem in problems}
    return problems + [problem for problem in range_problems(config) if problem.key not in wrong]


def settings_problems(section: type[Section], values: dict[str, Any], *, prefix: str) -> list[Problem]:
    """Return every unknown key, wrong type and value out of its range in a sweep's settings."""
    known = [prefix + name for name in section.model_fields]
    return _problems(section, values, prefix=prefix, known=known) or range_problems(values, prefix)


def _logger_problems(name: str, node: Any) -> list[Problem]:
    if not isinstance(node, dict):
        return [Problem(f"logger.{name}", f"{shown(node)} is not valid", f"keys, as logger={name} has them")]
    if "_target_" not in node:
        return [Problem(f"logger.{name}.{key}", "unknown key", f"only with logger={name}") for key in node]
    known = [f"logger.{name}.{key}" for key in arguments_of(str(node["_target_"])) or {}]
    return _component_problems(f"logger.{name}", node, known=known)


def _component_problems(group: str, node: dict[str, Any], *, known: list[str]) -> list[Problem]:
    """Check one component's node against the signature of its `_target_`."""
    target = node.get("_target_")
    arguments = arguments_of(target) if isinstance(target, str) else None
    if arguments is None:
        return [Problem(f"{group}._target_", f"{shown(target)} is not valid",
                        "the dotted path of a class or function, in the module that defines it")]  # fmt: skip
    fields: dict[str, Any] = {n: (a.annotation, ... if a.required else None) for n, a in arguments.items()}
    values = {key: value for key, value in node.items() if key != "_target_"}
    if group == "model":  # null means "from the data", which `build.complete_model` judges
        fields = {name: (annotation, None) for name, (annotation, _) in fields.items()} | {
            "init_from": (str | None, None)
        }
        values = {key: value for key, value in values.items() if value is not None or key not in fields}
    model = create_model(group, __config__=ConfigDict(extra="forbid", strict=True, protected_namespaces=()), **fields)
    return _problems(model, values, prefix=f"{group}.", known=known)


def _problems(model: type[BaseModel], values: dict[str, Any], *, prefix: str, known: list[str]) -> list[Problem]:
    """Return what pydantic finds wrong in `values`, in our words."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        problems: dict[str, Problem] = {}  # a union reports each of its members: the first will do
        for item in error.errors():
            for problem in _in_our_words(item, model, values, prefix=prefix, known=known):
                problems.setdefault(problem.key, problem)
        return list(problems.values())
    return []


def _in_our_words(item: Any, model: type[BaseModel], values: Any, *, prefix: str, known: list[str]) -> list[Problem]:
    if item["type"] == "extra_forbidden":
        key = prefix + ".".join(map(str, item["loc"]))
        return [_unknown(leaf, value, known=known) for leaf, value in _leaves(key, item["input"])]
    path: list[str] = []
    annotation: Any = model
    value = values
    for part in item["loc"]:
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break  # below a key, pydantic names list positions and union members
        annotation = annotation.model_fields[part].annotation
        value = value.get(part)
        path.append(part)
    key = prefix + ".".join(path)
    if item["type"] == "missing":
        return [Problem(key, "is missing", _described(annotation, key=key))]
    expected = _described(annotation, key=key)
    meant = _meant(value, annotation, key=key)
    return [Problem(key, f"{shown(value)} is not valid", expected + (f"; did you mean {meant}?" if meant else ""))]


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for name, item in value.items() for leaf in _leaves(f"{key}.{name}", item)]
    return [(key, value)]


def _unknown(key: str, value: Any, *, known: list[str]) -> Problem:
    section, _, name = key.rpartition(".")
    if section in COMPONENTS and name in ("name", "type", "kind") and isinstance(value, str):
        return Problem(key, "unknown key", f"did you mean {section}={value}?")
    if section == "launch.slurm" and section not in {other.rpartition(".")[0] for other in known}:
        return Problem(key, "unknown key", "only with launch=slurm")
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    listing = "python train.py --help lists the keys"
    if section in known:
        listing = f"{section} has {', '.join(siblings)}" if siblings else f"this {section} has no keys"
    return Problem(key, "unknown key", did_you_mean(key, known) or listing)


_UNIONS = (UnionType, Union)  # the second where a Literal is a member

_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    list[int]: "a list of integers, as in [1, 2]",
    list[float]: "a list of numbers, as in [0.9, 0.99]",
    list[str]: "a list of texts, as in [a, b]",
}


def _described(annotation: Any, *, key: str) -> str:
    """Say what a key of this type holds."""
    if get_origin(annotation) in _UNIONS:
        return ", or ".join(_described(member, key=key) for member in get_args(annotation))
    if get_origin(annotation) is Literal:
        choices = [str(shown(choice)).strip("'") for choice in get_args(annotation)]
        return "one of " + ", ".join(choices) if len(choices) > 1 else choices[0]
    if get_origin(annotation) is list and get_origin(get_args(annotation)[0]) is Literal:
        names = get_args(get_args(annotation)[0])
        return f"a list of {', '.join(names)}, as in [{names[0]}]"
    return _NAMES.get(annotation, f"a section, whose keys are set as in {key}.KEY=VALUE")


_YES, _NO = (1, "yes", "on", "True"), (0, "no", "off", "False")


def _meant(value: Any, annotation: Any, *, key: str) -> str | None:
    """Return the value of the right type that was probably meant."""
    types = get_args(annotation) if get_origin(annotation) in _UNIONS else (annotation,)
    choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices and value not in (None, False):
        return nearest(str(value), [choice for choice in choices if isinstance(choice, str)])
    if type(None) in types and (value is False or str(value).lower() in ("none", "off", "")):
        return "null"
    if bool in types and (value in _YES or value in _NO):
        return "true" if value in _YES else "false"
    if str in types and isinstance(value, (bool, int, float)):
        return f"\"{key}='{shown(value)}'\""  # quoted for the shell, and for Hydra
    number = _number(value)
    if number is not None and (int in types and number == int(number) or float in types):
        return shown(int(number) if int in types else number)
    return None


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, (str, float)) else None
    except ValueError:
        return None
    return number if number is not None and abs(number) < 1e18 else None
