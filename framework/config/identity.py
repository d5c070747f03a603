"""The identity of a run: a hash of all parts of its configuration that decide what is computed."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from framework.config.code import find_module
from framework.config.folders import enter_project
from framework.config.frozen_file import digest_of
from framework.config.init_from import init_identity
from framework.config.schema import COMPONENTS, OWN, RunConfig, Section, section_of
from framework.config.targets import HYDRAS


def _marked(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the keys and subsections that the schema marks as execution: they decide how a run is executed."""
    for name, field in section.model_fields.items():
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["execution"]:
            yield prefix + name
        elif (inner := section_of(field.annotation)) is not None:
            yield from _marked(inner, f"{prefix}{name}.")


# Keys that are not part of the identity. Of components' nodes, these are keys that the framework reads.
EXECUTION = (*_marked(RunConfig), "hydra", "model.parts.blocks", "model.parts.tensor_plan", "model.parts.experts",
             "dataset.num_workers", "dataset.keep_on_cpu")  # fmt: skip

# Options of the framework's strategies that round sums or change them.
INEXACT = ("hook", "param_dtype", "reduce_dtype", "send_dtype")


def identity(config: Mapping[str, Any]) -> str:
    """Return the run's id: 12 hexadecimal digits, a hash of all keys that decide what is computed.

    Of the framework's own sections, what is not the default counts, as their types read it: a key that a later version adds
    changes no id. In a component's node, {}, null and a missing key differ, and 1
    differs from 1.0, except for an argument that the target's source annotates as `float`. The order of a mapping counts, and
    that of what a target takes as `**kwargs`; that of its other arguments does not. The files of `model.init_from` count by
    their content, not by their paths.
    """
    read = {name: _as_read(name, value) for name, value in config.items() if name not in EXECUTION}
    kept = _without({name: value for name, value in read.items() if value != _DEFAULTS.get(name, ...)}, execution_keys(config))
    for name, value in kept.items():
        kept[name] = _canonical(value, is_ordered=name in _ORDERED, own=OWN.get(name, ()))
    return digest_of(kept)[:12]


def execution_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that are not part of the identity of a run with this configuration.

    The framework's strategies compute the same, so they are not part of it. A user's strategy is, and one of the extras.
    """
    found = list(EXECUTION)
    for section, node in config.items():
        if isinstance(node, Mapping) and section in _OF_SECTIONS:
            found += (f"{section}.{key}" for key in _OF_SECTIONS[section](node))
    if any(name == "part" and node for name, node in config.items()) and "trainer.log_every" in found:
        found.remove("trainer.log_every")  # a part knows which steps have rows
    divergence = (config.get("trainer") or {}).get("divergence") or {}
    if divergence.get("action") == "rollback":
        found.remove("checkpoint.every")  # a rollback goes back to one that was saved by it
    return tuple(found)


def _of_strategy(node: Mapping[str, Any]) -> Iterable[str]:
    return (key for key, value in node.items() if _is_own(node) and (key not in INEXACT or value is None))


def _of_trainer(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that nothing reads with these settings."""
    stopping, divergence = (node.get(name) or {} for name in ("early_stopping", "divergence"))
    if stopping.get("patience") is None:
        yield "early_stopping"
    if stopping.get("patience") is None or not str(stopping.get("monitor")).startswith("train/"):
        yield "log_every"  # nothing that decides reads the rows
    if not node.get("compile") or node.get("compile_dynamic") is False:
        yield "compile_dynamic"
    if divergence.get("action") != "rollback":
        yield "divergence.back"
    if divergence.get("action") == "raise":
        yield "divergence.limit"


def _is_own(node: Mapping[str, Any]) -> bool:
    return str(node.get("_target_")).startswith("framework.")


# What acts in the order that is given: parts, turns, and whatever a component gets as a mapping.
_ORDERED = (*COMPONENTS, "part")
_OF_SECTIONS = {"dataset": lambda node: ("source",) if _is_own(node) else (), "parallel": _of_strategy, "trainer": _of_trainer}
_DEFAULTS = {name: {} if section_of(field.annotation) else field.get_default()
             for name, field in RunConfig.model_fields.items() if not field.is_required()}  # fmt: skip


def _as_read(name: str, value: Any) -> Any:
    """Return a section as its types read it: without defaults, and with numbers of the annotated types."""
    if isinstance(value, dict) and name in OWN:  # the framework's keys: null is none
        value = {key: item for key, item in value.items() if item is not None or key not in OWN[name]}
    if name == "optimizer" and isinstance(value, dict) and "groups" in value:  # of its arguments that are numbers
        value["groups"] = mapped(value["groups"], _whole)
    if name == "micro_batch_size" and value == "auto":  # like null, it decides nothing
        return None
    if name == "model" and isinstance(value, dict) and "init_from" in value:
        value["init_from"] = init_identity(value["init_from"])
    section = section_of(RunConfig.model_fields[name].annotation) if name in RunConfig.model_fields else None
    try:
        return value if section is None else section.model_validate(value).model_dump(exclude_defaults=True)
    except ValidationError:  # the preflight refuses it
        return value


def _whole(value: Any, _: str) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without(value: Any, keys: Iterable[str], prefix: str = "") -> Any:
    """Return nested data without some keys, and without a mapping that holds only such keys."""
    if not isinstance(value, dict):
        return value
    kept = {name: _without(item, keys, f"{prefix}{name}.") for name, item in value.items() if f"{prefix}{name}" not in keys}
    return {name: item for name, item in kept.items() if item != {} or value[name] == {}}


def _canonical(value: Any, *, is_ordered: bool, own: Iterable[str] = (), as_configs: bool = False) -> Any:
    """Return plain data as their targets take them.

    1.0 becomes 1 in an argument that the source of a node's target annotates as `float`. `_convert_` is left out where it
    changes nothing: only `none` differs from the default, and only inside it do the others. If `is_ordered`, each mapping,
    except a node and one in `own`, also holds the order of its keys; a node, that of what its target takes as `**kwargs`.
    """
    if isinstance(value, list):
        return [_canonical(item, is_ordered=is_ordered, as_configs=as_configs) for item in value]
    if not isinstance(value, dict):
        return value
    arguments, was = _arguments(str(value["_target_"])) if "_target_" in value else _Arguments(named=frozenset()), as_configs
    if "_target_" in value and "_convert_" in value:
        as_configs = value["_convert_"] == "none"
        value = {key: item for key, item in value.items() if key != "_convert_" or as_configs != was}
    found = {key: mapped(item, _whole) if key in arguments.numbers else item for key, item in value.items()}
    for key, item in found.items():
        found[key] = _canonical(item, is_ordered=is_ordered and key not in own, as_configs=as_configs)
    if not is_ordered:
        return found
    if "turns" in own and isinstance(turns := found.get("turns"), dict):
        found["turns"] = turns | {"_order_": [*turns]}
    named = arguments.named
    order = [key for key in value if named is not None and key not in (*named, *own, *HYDRAS)]
    return found | {"_order_": order} if len(order) > 1 else found


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `sections`, or is inside one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by their dotted keys. A list counts as one value, and an empty section has none."""
    return {key: value for key, value in leaves(config) if value != {}}


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a configuration with their values. A list counts as one value, and so does an empty section."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def mapped(value: Any, act: Callable[[Any, str], Any], *, key: str = "") -> Any:
    """Return nested data with `act(value, key)` for each value in its mappings and lists. An item has the key of its list."""
    if isinstance(value, dict):
        return {name: mapped(item, act, key=f"{key}.{name}" if key else name) for name, item in value.items()}
    return [mapped(item, act, key=key) for item in value] if isinstance(value, list) else act(value, key)


# --- the arguments of a target, by its source


class _Arguments(NamedTuple):
    """What the source of a function or class says about its arguments; nothing, if the source is not found."""

    numbers: frozenset[str] = frozenset()  # annotated as `float`, or as lists of it
    named: frozenset[str] | None = None  # those before `**kwargs`; None: it takes no other


def _arguments(target: str) -> _Arguments:
    """Return the arguments of a target. Import nothing."""
    enter_project()
    module, _, name = target.rpartition(".")
    spec = find_module(module, ()) if module else None
    source = Path(spec.origin or "") if spec is not None else Path()
    return _in_source(source.read_bytes(), name) if source.suffix == ".py" else _Arguments()


_IN_NUMBERS = {"float", "None", "Optional", "Union", "list", "tuple", "List", "Tuple", "Sequence",
               "Mapping", "dict", "str", "Annotated", "Field", "ge", "gt", "le", "lt", "Ge", "Gt", "Le", "Lt"}  # fmt: skip


@functools.cache
def _in_source(source: bytes, name: str) -> _Arguments:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return _Arguments()
    found = _last(body, name)
    found = _last(found.body, "__init__") if isinstance(found, ast.ClassDef) else found
    if not isinstance(found, ast.FunctionDef):
        return _Arguments()
    arguments = [*found.args.args, *found.args.kwonlyargs]
    aliases = {target.id: _words(node.value) for node in body if isinstance(node, ast.Assign)
               for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip

    def is_number(annotation: ast.expr) -> bool:
        words = set().union(*(aliases.get(word, {word}) for word in _words(annotation)))
        return "float" in words and words <= _IN_NUMBERS

    numbers = frozenset(one.arg for one in arguments if one.annotation is not None and is_number(one.annotation))
    return _Arguments(numbers, frozenset(one.arg for one in arguments) if found.args.kwarg else None)


def _words(node: ast.expr) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", ast.unparse(node)))


def _last(body: list[ast.stmt], name: str) -> ast.stmt | None:
    return next((node for node in reversed(body) if getattr(node, "name", "") == name), None)
