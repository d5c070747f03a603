"""The components that a configuration names, as objects: dataset, task, model; and the facts of the data."""

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.build.splits import validations
from framework.build.stored_data import with_copy
from framework.build.user_code import noting_files
from framework.config.folders import option_node, options
from framework.config.identity import mapped
from framework.config.init_from import init_contents
from framework.config.schema import INIT, OF_DATA, Node
from framework.config.targets import arguments_of, component, locate
from framework.data.source import Dataset
from framework.runtime.exits import error_text, place_of
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torchmetrics import Metric

    from framework.engine.seam import Task
    from framework.loggers.sink import Sink
    from framework.optim.optimizers import BuildOptimizer

# The names that other projects use for the facts of a dataset.
ALIASES = {
    "num_classes": ("num_labels", "n_classes", "num_class", "nb_classes", "n_class"),
    "in_channels": ("in_chans", "num_channels", "input_channels", "in_channel", "n_channels"),
    "image_size": ("img_size", "input_size"),
    "vocab_size": ("n_vocab", "num_tokens", "vocabulary_size"),
    "seq_len": ("max_seq_len", "block_size", "context_length", "n_positions", "max_position_embeddings"),
}
_DATA = re.compile(r"\$\{data:(\w+)\}")


def dataset(node: Node) -> Dataset:
    """Build the dataset. It reads no file yet, and torch is not imported. ValueError for bad arguments.

    Files in an object store are fetched first, so that a dataset only needs paths. It has the first of several validation sets.
    """
    node = validations(node)["val"]
    return component(mapped({name: value for name, value in node.items() if name not in OF_DATA}, with_copy))()


def kept_on_cpu(node: Node) -> list[str]:
    """Return the names of the inputs and targets that stay on the CPU. ValueError if they are not names."""
    names = node.get("keep_on_cpu") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"dataset.keep_on_cpu={names!r}: is not valid (a list of names of inputs or targets, as in [lengths])")
    return names


def fold_of(node: Node) -> tuple[int, int] | None:
    """Return which fold of the training samples is held out, and of how many; None without folds. ValueError if it is wrong."""
    fold, folds = node.get("fold"), node.get("folds")
    if fold is None and folds is None:
        return None
    if type(folds) is not int or folds < 2:
        raise ValueError(f"dataset.folds={folds!r}: is not valid (a number of folds, at least 2)")
    if type(fold) is not int or not 0 <= fold < folds:
        raise ValueError(f"dataset.fold={fold!r}: is not valid (from 0 to {folds - 1})")
    return fold, folds


def loop_parts(nodes: Mapping[str, Node]) -> dict[str, Any]:
    """Build new parts of the loop, by name, at each call. ValueError that names the key, for bad arguments."""
    return _built("part", nodes)


def task(node: Node, *, seed: int) -> "Task":
    """Build the task; its random draws come from the run's seed. ValueError for bad arguments."""
    from framework.randomness import key, seeded

    with seeded(key(seed, "task")), noting_files():
        return component(node)()


def metrics(nodes: Mapping[str, Node]) -> "dict[str, Metric]":
    """Build the metrics by name. ValueError that names the key, for an object that is not a metric."""
    built = _built("metric", nodes)
    for name, metric in built.items():
        if not all(hasattr(metric, method) for method in ("update", "compute", "reset", "metric_state")):
            target = nodes[name]["_target_"]
            raise ValueError(f"metric.{name}: {target} gives a {type(metric).__name__} (a torchmetrics.Metric)")
    return built


def _built(group: str, nodes: Mapping[str, Node]) -> dict[str, Any]:
    built = {}
    for name, node in nodes.items():
        try:
            with noting_files():
                built[name] = component(node)()
        except (Exception, SystemExit) as error:
            said = str(error) if isinstance(error, ValueError) else f"{error_text(error)}, at {place_of(error)}"
            raise ValueError(said if said.startswith(f"{group}.{name}.") else f"{group}.{name}: {said}") from error
    return built


def model(node: Node, *, seed: int, on_meta: bool = False) -> "nn.Module":
    """Build the model, with the weights that torch.manual_seed(seed) and the constructor give in any script.

    With `on_meta`, its parameters have no numbers (framework.parallel.first_weights.py).
    """
    import torch

    from framework.modules.parts import give_parts
    from framework.parallel.first_weights import build
    from framework.randomness import seed_generators

    torch.manual_seed(seed)  # on every device
    seed_generators(seed)
    own = {name: value for name, value in node.items() if name not in (*INIT, "parts")}
    with noting_files():
        built = build(lambda: component(own)(), on_meta=on_meta)  # at each call with new objects in it
    if isinstance(built, torch.nn.Module) and node.get("parts"):
        give_parts(built, node["parts"])
    return built


def shapes_of(node: Node, *, seed: int) -> "nn.Module":
    """Return the model without storage; if its constructor reads numbers, the numbers that it reads and computes exist."""
    import torch

    try:
        with torch.device("meta"):
            return model(node, seed=seed)
    except Exception:  # whatever is wrong, a constructor on the CPU gives a better message
        return model(node, seed=seed, on_meta=True)


def optimizer_builder(node: Node) -> "BuildOptimizer":
    """Return a function that builds the node's optimizer from a list of `Trainable`.

    A target with the first argument `trained` gets this list, and applies the node's `groups` (options by patterns of names)
    itself. Any other target gets torch's parameter groups. With `turns`, the function builds one optimizer for each turn.
    ValueError as from `locate`, and for turns that are not valid.
    """
    from framework.optim.optimizers import param_groups, rules_of
    from framework.optim.turns import in_turns, turns_of

    if turns := turns_of(node):
        return in_turns(turns, optimizer_builder)
    node = {name: value for name, value in node.items() if name != "turns"}
    if next(iter(inspect.signature(locate(node["_target_"])).parameters), "") == "trained":
        return component(node)
    rules = rules_of(node.get("groups") or [])
    build = component({name: value for name, value in node.items() if name != "groups"})
    return lambda trained: build(param_groups(trained, rules))


def example(info: Mapping[str, int], *, dtype: "torch.dtype | None" = None) -> "Tensor | None":
    """Return the inputs of two samples, without storage, for a dataset's `info`; None for other kinds of data."""
    import torch

    if {"in_channels", "image_size"} <= info.keys():
        return torch.empty(2, info["in_channels"], info["image_size"], info["image_size"], dtype=dtype, device="meta")
    if {"vocab_size", "seq_len"} <= info.keys():
        return torch.empty(2, info["seq_len"], dtype=torch.long, device="meta")
    return None


def sinks(nodes: Mapping[str, Node]) -> "dict[str, Sink]":
    """Return the run's sinks by name; each logger runs in its own process, which is forked here."""
    from framework.loggers.background import Background
    from framework.loggers.console import Console

    loggers = {name: Background(component(node), timeout_s=node.get("timeout_s")) for name, node in nodes.items()}
    return {"console": Console(), **loggers}


# --- facts of the data


def fact(name: str, info: Mapping[str, int]) -> int | None:
    """Return the data's value for an argument of this name or of an alias; None if there is none."""
    known = name if name in info else next((key for key, names in ALIASES.items() if name in names), name)
    return info.get(known)


def _is_fact(name: str) -> bool:
    return fact(name, dict.fromkeys(ALIASES, 1)) is not None


def with_facts(node: Node, info: Mapping[str, int], *, key: str) -> tuple[Node, list[Problem]]:
    """Return a component's node with every `${data:FACT}` in it replaced."""
    problems: list[Problem] = []

    def replaced(value: Any, key: str) -> Any:
        named = _DATA.fullmatch(value) if isinstance(value, str) else None
        if named is None and "${data:" in str(value):
            problems.append(Problem(key, f"{value} is not valid", "a fact must be the whole value, as in ${data:num_classes}"))
        if named is not None and named[1] not in info:
            problems.append(Problem(key, f"the dataset does not give {named[1]!r}", f"it gives {', '.join(info) or 'nothing'}"))
        return value if named is None else info.get(named[1])

    return mapped(node, replaced, key=key), problems


def complete_model(model: Node, info: Mapping[str, int]) -> tuple[Node, list[Problem]]:
    """Fill the facts of the data (`num_classes`, ...) into the model's node, where a value is null or missing.

    An argument with a default gets only a fact of the same name, not of an alias. In a node inside the model's node, only null
    values are filled. ValueError if the model cannot be imported.
    """
    signature = arguments_of(model, group="model")
    node = {name: _filled(value, info) for name, value in model.items()}
    wanted = [*node, *(name for name in signature.arguments if name in signature.required or name in info)]
    node |= {name: value for name in wanted if node.get(name) is None and (value := fact(name, info)) is not None}

    def is_missing(name: str, argument: inspect.Parameter) -> bool:
        if name in node:
            return argument.annotation in (int, float, str, bool)  # null is not a value of these types
        return argument.default is argument.empty and _is_fact(name)

    missing = [name for name, argument in signature.arguments.items() if node.get(name) is None and is_missing(name, argument)]
    what = "needs a value, and the dataset does not give one"
    return node, [Problem(f"model.{name}", what, _offer(info)) for name in missing]


def _filled(value: Any, info: Mapping[str, int]) -> Any:
    """Return a value of the model's node, with facts for the null values of the nodes in it."""
    if isinstance(value, dict):
        is_node = "_target_" in value
        return {name: fact(name, info) if item is None and is_node else _filled(item, info) for name, item in value.items()}
    return [_filled(item, info) for item in value] if isinstance(value, list) else value


def _offer(info: Mapping[str, int]) -> str:
    fitting = []
    for name in options("model"):
        node = option_node("model", name)
        needed = [key for key, value in node.items() if value is None and _is_fact(key)]
        if "_target_" in node and all(fact(key, info) is not None for key in needed):
            fitting.append(f"model={name}")
    return f"it gives {', '.join(info) or 'nothing'}, which fits {', '.join(fitting) or 'no model here'}"


def with_init_digest(model: Node) -> tuple[Node, list[Problem]]:
    """Return a model's node with the checksums of the files that it starts from: workers accept no other files."""
    return model | {"init_digest": init_contents(model["init_from"])} if model.get("init_from") else model, []


def completed(node: Node) -> Node:
    """Return a node as its target completes it, with a function `completed(node, **arguments)` of its own, if it has one."""
    if (complete := getattr(locate(node["_target_"]), "completed", None)) is None:
        return node
    bound: Any = component({name: value for name, value in node.items() if name not in ("turns", "groups")})
    return complete(node, **bound.keywords)  # type: ignore[no-any-return]


def complete_task(task: Node, *, dataset: Dataset) -> tuple[Node, list[Problem]]:
    """Fill values that only the dataset knows (`bytes_per_token`) into the task's node, where the user gave no value."""
    return {name: getattr(dataset, name, None) if value is None else value for name, value in task.items()}, []
