"""Validation of a configuration against its types, with messages for users."""

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from framework.config.compose import Composed
from framework.config.described import bare, described, meant
from framework.config.draft import Draft
from framework.config.folders import config_name, groups, named_keys, options, value_names
from framework.config.period import counts_samples
from framework.config.schema import COMPONENTS, SEVERAL, STATIC_KEYS, RunConfig, Section, section_of
from framework.config.section import LARGEST
from framework.config.spelling import did_you_mean, done_here, nearest, option_meant
from framework.config.targets import HYDRAS, UNIONS, arguments_of, as_node, hides_keys, nodes_in
from framework.runtime.problem import Problem, shown

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def validate(composed: Composed) -> Draft:
    """Validate the framework's own sections without imports. (`component_problems` validates the components' nodes.)"""
    config, known = composed.config, composed.known
    if not config.keys() - {"sampler", *SEVERAL}:
        return Draft({}, composed.problems)
    valid, unknown = dict[str, Any](), config.keys() - RunConfig.model_fields.keys()
    problems = composed.problems + [problem for name in unknown for problem in unknown_key(name, config[name], known=known)]
    missing = [name for name, field in RunConfig.model_fields.items() if field.is_required() and name not in config]
    if {*missing} <= {*COMPONENTS}:
        lacks = "has no option, because a file overrides it with null, and no node of its own"
        problems += [Problem(name, lacks, f"one of {', '.join(options(name))}; or a _target_") for name in missing]
    else:
        what = f"{config_name()}.yaml is not complete: {', '.join(missing)} missing"
        problems.append(Problem("defaults", what, "- config as the first entry of its list, for the framework's own"))
    for name, annotation in _types_of(RunConfig).items():
        if name not in config:
            continue
        section = section_of(annotation)
        value = config[name]
        found = section_problems(section, value, name, known) if section else value_problems(annotation, value, name)
        problems += found
        if not found:
            valid[name] = section.model_validate(value) if section else value
    return Draft(valid, problems)


@functools.cache
def _types_of(section: type[Section]) -> dict[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.model_fields}


# --- components


def component_problems(
    key: str, node: Any, *, known: list[str], own: tuple[str, ...] = (), may_hide: bool = False, is_inner: bool = False
) -> list[Problem]:
    """Check a component's node, and the components in it, against the signatures of their targets. This imports the targets.

    `key` is the node's key, as in `model` or `logger.wandb`. `own` are the framework's keys in the node. `may_hide`: if the
    signature of an inner node's target is not all that the target takes, a key that is unknown and no typing error has no
    problem here. Then the node must be built, and `problems_of_build` explains an error.
    """
    try:
        signature = arguments_of(node, group=key)
    except ValueError as error:
        return [Problem(f"{key}._target_", str(error).removeprefix("_target_="), "the dotted path of a class or function")]
    problems: list[Problem] = []
    for name in filter(node.__contains__, _OF_HYDRA):
        problems += value_problems(_OF_HYDRA[name], node[name], f"{key}.{name}")
    if node.get("_partial_") and key in ("model", "dataset", "task"):
        problems.append(Problem(f"{key}._partial_", "true gives a function, but the run needs its result", "without it"))
    is_nested = node.get("_recursive_", True)
    node = {name: as_node(value, signature.arguments[name].annotation) if name in signature.arguments and is_nested else value
            for name, value in node.items()}  # fmt: skip
    values = {name: value for name, value in node.items() if name not in (*HYDRAS, *own)}
    apart = ("turns",) if "turns" in own else ()  # their nodes get the same arguments as the run's own optimizer and schedule
    inner = {name: list(nodes_in(value, f"{key}.{name}")) for name, value in node.items() if is_nested and name not in apart}
    hides = is_inner and may_hide and not node.get("_partial_") and hides_keys(node["_target_"])
    others = [other for other in known if not other.startswith(f"{key}.")]  # an option's keys may belong to another component
    names_of = {name: value_names(f"{key}.{name}", node) for name in (one.rpartition(".")[2] for one in named_keys())}
    known = [*others, *(f"{key}.{name}" for name in (*signature.arguments, *own, *filter(names_of.get, names_of)))]
    for name, value in values.items():
        argument, is_period = signature.arguments.get(name), key.endswith("scheduler") and counts_samples(value)
        # the data replace null in a model, and `${data:...}` everywhere; the run knows the steps of an epoch
        is_from_data = (value is None and key.split(".")[0] == "model") or str(value).startswith("${data:") or is_period
        if argument is None and hides and not difflib.get_close_matches(name, signature.arguments, cutoff=0.8):
            continue
        if argument is None and names_of.get(name):
            close, names = option_meant(str(value), f"{key}.{name}", names_of[name]), ", ".join(names_of[name])
            expected = f"one of {names}" + (f"; {close}" if close else "")
            problems.append(Problem(f"{key}.{name}", f"{shown(value)} is not valid", expected))
        elif argument is None and not signature.takes_any:
            problems += unknown_key(f"{key}.{name}", value, known=known)
        elif argument is not None and not is_from_data and not inner.get(name) and _is_plain(argument.annotation):
            is_default = type(value) is type(argument.default) and value == argument.default
            found = [] if is_default else value_problems(argument.annotation, value, f"{key}.{name}")
            more = "".join(f", {other}" for other in names_of.get(name, ()))
            problems += [dataclasses.replace(one, expected=one.expected + more) for one in found]
    for inner_key, inner_node in itertools.chain(*inner.values()):
        problems += component_problems(inner_key, inner_node, known=known, may_hide=may_hide, is_inner=True)
    entries = node.get("groups") if "groups" in own else None  # of optimizer.groups; a rate of 0 keeps parameters unchanged
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        given = {name: entry[name] for name in signature.arguments if isinstance(entry, dict) and entry.get(name, 0) != 0}
        part = {"_target_": node["_target_"], "_partial_": True, **given}
        problems += component_problems(f"{key}.groups[{number}]", part, known=known)
    missing = [name for name in signature.required if name not in values and not node.get("_partial_")]
    return problems + [Problem(f"{key}.{name}", "is missing", f"{node['_target_']} needs it") for name in missing]


def problems_of_build(key: str, node: Any, error: BaseException, *, own: tuple[str, ...] = ()) -> list[Problem]:
    """Return why a component's node cannot be built: an unknown key, if an inner target does not take it, else the error."""
    names = re.findall(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else []
    unknown = component_problems(key, node, known=[], own=own) if names else []
    return [problem for problem in unknown if problem.key.split(".")[-1] in names] or [Problem.of_error(key, error)]


_OF_HYDRA = {"_args_": list, "_partial_": bool, "_recursive_": bool, "_convert_": Literal["none", "partial", "all", "object"]}
_PLAIN = (int, float, bool, str, list, dict, type(None))


def _is_plain(annotation: Any) -> bool:
    kind = bare(annotation)
    if get_origin(kind) in (*UNIONS, list, dict):
        return all(map(_is_plain, get_args(kind)))
    return kind in _PLAIN or get_origin(kind) is Literal


# --- values


def value_problems(annotation: Any, value: Any, key: str) -> list[Problem]:
    """Return the problems of one value."""
    try:
        _adapter(annotation).validate_python(value)
    except ValidationError as error:
        return [_said(error.errors()[0], annotation, value, key)]  # a union reports each of its members: the first is enough
    except PydanticSchemaGenerationError:  # a class of the user
        pass
    return []


_adapter = functools.lru_cache(maxsize=1000)(functools.partial(TypeAdapter[Any], config=_STRICT))


def section_problems(section: type[Section], values: Any, key: str, known: list[str]) -> list[Problem]:
    """Return the problems of a section: unknown keys, wrong types, values out of range. `key` is the section's key."""
    for name, value in values.items() if isinstance(values, dict) else ():
        annotation = _types_of(section).get(name)
        is_optional = type(None) in get_args(annotation) and section_of(annotation) is not None  # only some options have it
        if is_optional and isinstance(value, dict) and not any(other.startswith(f"{key}.{name}.") for other in known):
            return unknown_key(f"{key}.{name}", value, known=known)
    try:
        section.model_validate(values)
    except ValidationError as error:
        problems: dict[str, Problem] = {}  # a union reports each of its members: the first is enough
        for item in error.errors():
            for problem in _section_problem(item, section, values, key, known):
                problems.setdefault(problem.key, problem)
        return list(problems.values())
    return []


def _section_problem(item: Any, section: type[Section], values: Any, key: str, known: list[str]) -> Iterator[Problem]:
    if item["type"] == "extra_forbidden":
        yield from unknown_key(".".join([key, *map(str, item["loc"])]), item["input"], known=known)
        return
    annotation, value = section, values
    for part in item["loc"]:
        inner = section_of(annotation)
        if inner is None:
            break  # below a key, pydantic names list positions and union members
        annotation = _types_of(inner)[part]
        value = value.get(part)
        key = f"{key}.{part}"
    if item["type"] == "rules":
        for problem in item["ctx"]["problems"]:
            yield Problem(f"{key}.{problem.key}", problem.what, problem.expected)
    elif item["type"] == "missing":
        yield Problem(key, "is missing", described(annotation, key=key))
    else:
        yield _said(item, annotation, value, key)


_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _said(item: Any, annotation: Any, value: Any, key: str) -> Problem:
    for bound, words in _BOUNDS.items():
        if bound in item.get("ctx", {}):
            limit = item["ctx"][bound]
            text = f"at most {LARGEST}, the limit of 64 bits" if limit == LARGEST else f"{words} {limit:g}"
            return Problem(key, f"{shown(value)} is out of range", text)
    if item["type"] == "finite_number":
        return Problem(key, f"{shown(value)} is out of range", "a finite number")
    close = meant(value, annotation, key=key)
    expected = described(annotation, key=key) + (f"; did you mean {close}?" if close else "")
    return Problem(key, f"{shown(value)} is not valid", expected)


def unknown_key(key: str, value: Any, *, known: list[str]) -> list[Problem]:
    """Return a problem for each key that does not exist. `value` may contain several keys."""
    if key == "experiment":
        return [Problem(key, "its file writes its keys below `experiment`", "`# @package _global_` as its first line")]
    if isinstance(value, dict) and value and "_target_" not in value:
        return [problem for name, item in value.items() for problem in unknown_key(f"{key}.{name}", item, known=known)]
    section, _, name = key.rpartition(".")
    of = [group for group in groups() if not section and value in options(group) and nearest(name, [group])]
    if of:
        return [Problem(key, "unknown key", f"did you mean {of[0]}={value}?")]
    if section in COMPONENTS and name in ("name", "type", "kind") and isinstance(value, str):
        return [Problem(key, "unknown key", f"did you mean {section}={value}?")]
    if key.startswith("launch.slurm") and "launch.slurm.partition" not in known:
        return [Problem(key, "unknown key", "only with launch=slurm")]
    siblings = dict.fromkeys(other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section)
    listing = "--help lists the keys" + ("" if section else f"; +{key}, or extra.{key} in a file, adds your own")
    if section in (*COMPONENTS, *(other.split(".")[0] for other in known)):
        names = [name for name in siblings if name not in HYDRAS]
        listing = f"{section} has {', '.join(names)}" if names else f"this {section} has no keys"
    of_options = [other for other in known if other.split(".")[0] in (*COMPONENTS, *SEVERAL, "hydra") and other != key]
    meant = did_you_mean(key, [*of_options, *STATIC_KEYS, *groups()])
    return [Problem(key, "unknown key", done_here(key) or meant or listing)]
