"""Components: any importable callable that a node names by `_target_`, and the arguments in its signature."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints, is_typeddict

from framework.config.folders import EXTRAS, ROOT, enter_project
from framework.runtime.problem import extra_with, install_command

if TYPE_CHECKING:
    from framework.config.schema import Node

TOTALS = {"total_steps", "num_training_steps"}  # arguments of schedulers for the number of calls in a run
HYDRAS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")  # a node's keys that are not arguments of its target

# The arguments that the framework passes to a group's component: the number of positional arguments, and the other names.
GIVEN = {"parallel": (1, ["world", "forward", "bitwise"]), "optimizer": (1, []), "scheduler": (2, [])}


def locate(target: str) -> Callable[..., Any]:
    """Import the object at a dotted path: a class, a function, or a method of a class. Re-exported names also work.

    Raise ValueError if the target cannot be imported or is not callable.
    """
    enter_project()
    parts = target.split(".")
    if len(parts) < 2 or not all(parts):
        raise ValueError(f"_target_={target} is not a dotted path, as in package.module.Name")
    if parts[0] in ("models", EXTRAS.name):
        _join(parts[0], parts[1])
    found: Any = None
    try:
        found = importlib.import_module(parts[0])
        for depth, name in enumerate(parts[1:], start=2):
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(".".join(parts[:depth]))
    except (Exception, SystemExit) as error:  # the import of the user's module may raise any exception
        close = difflib.get_close_matches(parts[-1], dir(found), n=1)
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""  # of a package that imports its parts late
        text = " ".join(f"{error}{cause}".split()) + (f"; did you mean {close[0]}?" if [parts[-1]] != close != [] else "")
        extra = extra_with(str(error.name)) if isinstance(error, ModuleNotFoundError) else None
        text += f"; {install_command(extra)}" if extra is not None else ""
        raise ValueError(f"_target_={target} cannot be imported ({type(error).__name__}: {text})") from error
    if not callable(found):
        raise ValueError(f"_target_={target} is a {type(found).__name__}, which cannot be called")
    return found


def _join(package: str, name: str) -> None:
    """Join a package and ours of this name. Raise ValueError if both have a module `name`, with different content."""
    found = importlib.import_module(package)
    ours = str(ROOT / package)
    if ours not in found.__path__:
        found.__path__.append(ours)
    files = [path for folder in dict.fromkeys(found.__path__) if (path := Path(folder, f"{name}.py")).exists()]
    if len(files) > 1 and len({path.read_bytes() for path in files}) > 1:
        raise ValueError(f"_target_={package}.{name} names two files: give {files[0]} another name")


def component(node: "Node", **given: Any) -> Callable[..., Any]:
    """Return the node's target with the node's values bound. `given` overrides values.

    The caller adds arguments that are not data. Nested nodes with a `_target_` are built first; an argument of type
    `Callable[[], ...]` gets a function that builds it. A list is a tuple for an argument of this type, or with such a default:
    YAML has none. Mappings and lists are a DictConfig and a ListConfig of OmegaConf with `_convert_: none`, or for an argument
    of this type. Raise ValueError if a target cannot be imported.
    `hydra.utils.instantiate` is not used: its partials look up their target at every call, which costs 0.1 ms in every step.
    """
    return _bound(node | given, as_configs=False)


def _bound(node: "Node", *, as_configs: bool) -> Callable[..., Any]:
    as_configs = node["_convert_"] == "none" if "_convert_" in node else as_configs
    is_nested = node.get("_recursive_", True)
    arguments = signature_of(node["_target_"]).arguments

    def build(value: Any, argument: inspect.Parameter | None = None) -> Any:
        kind = argument.annotation if argument is not None else None
        value = as_node(value, kind) if is_nested else value
        if isinstance(value, dict) and "_target_" in value and any(map(_makes, (kind, *get_args(kind)))):
            return _bound(value, as_configs=as_configs)
        from omegaconf import DictConfig, ListConfig, OmegaConf  # imported late: many components have no arguments

        built = instantiated(value, as_configs=as_configs) if is_nested else value
        is_config = as_configs or any(one in (DictConfig, ListConfig) for one in (kind, *get_args(kind)))
        if is_config and isinstance(built, (dict, list)):
            return OmegaConf.create(built, flags=_ANY_OBJECT)
        return tuple(built) if isinstance(built, list) and argument is not None and _takes_tuple(argument) else built

    values = {name: build(value, arguments.get(name)) for name, value in node.items() if name not in HYDRAS}
    return functools.partial(locate(node["_target_"]), *map(build, node.get("_args_", ())), **values)


_ANY_OBJECT = {"allow_objects": True}


def _takes_tuple(argument: inspect.Parameter) -> bool:
    kinds = [get_origin(one) or one for one in (argument.annotation, *get_args(argument.annotation))]
    return list not in kinds and (tuple in kinds or isinstance(argument.default, tuple))


def _makes(kind: Any) -> bool:
    """Return whether this is the type of a function without arguments."""
    return get_origin(kind) is Callable and get_args(kind)[:1] == ([],)


def as_node(value: Any, kind: Any) -> Any:
    """Return a mapping for an argument of the type `kind` as a node, if this is a dataclass, or a dataclass or None."""
    found = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and is_dataclass(one)]
    if not found or get_origin(kind) not in (None, *UNIONS) or not isinstance(value, dict) or "_target_" in value:
        return value
    return {"_target_": f"{found[0].__module__}.{found[0].__qualname__}", **value}


UNIONS = (UnionType, Union)  # typing.Union, if a member is a Literal or Annotated


def instantiated(value: Any, *, as_configs: bool = False) -> Any:
    """Return plain data in which every node with a `_target_` is built (or only bound, with `_partial_: true`)."""
    if isinstance(value, dict):
        if "_target_" in value:
            bound = _bound(value, as_configs=as_configs)
            return bound if value.get("_partial_") else bound()
        return {key: instantiated(item, as_configs=as_configs) for key, item in value.items()}
    return [instantiated(item, as_configs=as_configs) for item in value] if isinstance(value, list) else value


def asked(node: "Node", question: str, *given: Any, otherwise: Any, **more: Any) -> Any:
    """Ask a strategy's module its function of this name about the node's options. Return `otherwise` if it has none."""
    function = getattr(inspect.getmodule(locate(node["_target_"])), question, None)
    options = {name: value for name, value in node.items() if name != "_target_"} | more
    return otherwise if function is None else function(*given, **options)


def nodes_in(value: Any, key: str) -> "Iterator[tuple[str, Node]]":
    """Yield the nodes with a `_target_` in plain data, each with its key. `key` is the data's key. Skip nodes inside nodes."""
    if isinstance(value, dict) and "_target_" in value:
        yield key, value
    elif isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes_in(item, f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]")


@dataclass(frozen=True)
class Signature:
    """The arguments that a node may set, in the order of the target."""

    arguments: dict[str, inspect.Parameter]
    takes_any: bool  # the target has **kwargs
    by_place: tuple[str, ...] = ()  # the arguments that `_args_` sets, in this order

    @property
    def required(self) -> list[str]:
        return [name for name, argument in self.arguments.items() if argument.default is inspect.Parameter.empty]


def signature_of(target: str, *, group: str = "") -> Signature:
    """Return the arguments that a component of this group takes from its node. Raise ValueError as `locate` does.

    Arguments that the framework passes are left out. A callable without a signature (some compiled callables) takes any
    argument.
    """
    found = locate(target)
    try:
        parameters = _parameters(found)
    except (TypeError, ValueError):
        return Signature({}, takes_any=True)
    num_given, named = GIVEN.get(group, (0, []))
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if group.split(".")[0] == "scheduler" and by_place and by_place[0].name == "optimizer":
        num_given, named = 0, ["optimizer"]  # a scheduler of torch takes only the optimizer
        if group == "scheduler":  # the run gives the number of calls
            parameters = [p.replace(annotation=int | None, default=None) if p.name in TOTALS else p for p in parameters]
    hidden = {*named, *(p.name for p in by_place[:num_given])}
    settable = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in hidden]
    takes_any, names = any(p.kind == p.VAR_KEYWORD for p in parameters), tuple(p.name for p in by_place[num_given:])
    return Signature({p.name: p for p in settable}, takes_any=takes_any, by_place=names)


def _parameters(found: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a callable's parameters. `**options: Unpack[Options]` becomes the keys of the TypedDict `Options`."""
    try:
        parameters = [*inspect.signature(found, eval_str=True).parameters.values()]
    except (NameError, AttributeError, SyntaxError):  # only a type checker can resolve an annotation
        parameters = [*inspect.signature(found).parameters.values()]
    has_options = bool(parameters) and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD
    unpacked = get_args(parameters[-1].annotation) if has_options else ()
    if not unpacked or not is_typeddict(unpacked[0]):
        return parameters
    kind = inspect.Parameter.KEYWORD_ONLY
    options = {name: get_args(a)[0] if get_origin(a) is NotRequired else a
               for name, a in get_type_hints(unpacked[0], include_extras=True).items()}  # fmt: skip
    defaults = {name: None if name in unpacked[0].__optional_keys__ else inspect.Parameter.empty for name in options}
    return parameters[:-1] + [inspect.Parameter(n, kind, annotation=a, default=defaults[n]) for n, a in options.items()]


def hides_keys(target: str) -> bool:
    """Return whether a target may take keys that are not in its signature: a decorator or a library has replaced it."""
    found = locate(target)
    called = [getattr(found, name) for name in ("__init__", "__new__")] if isinstance(found, type) else [found]
    codes = [one.__code__ for one in called if hasattr(one, "__code__")]
    return any(code.co_flags & inspect.CO_VARKEYWORDS for code in codes)


def arguments_of(node: "Node", *, group: str) -> Signature:
    """Return the arguments that remain for the node's keys after its positional `_args_`."""
    signature = signature_of(str(node.get("_target_")), group=group)
    given = node.get("_args_", [])
    taken = signature.by_place[: len(given) if isinstance(given, list) else 0]
    return Signature({name: p for name, p in signature.arguments.items() if name not in taken}, signature.takes_any)
