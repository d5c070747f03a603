"""The components that a configuration names, as objects: dataset, task, model; and what follows from the data."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from framework.config.components import arguments_of, component, locate
from framework.config.folders import option_node, options
from framework.config.identity import content_of
from framework.config.schema import Node
from framework.data.source import Dataset
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from framework.engine.seam import Task
    from framework.optim.groups import BuildOptimizer

INIT = ("init_from", "init_digest")  # of the model's node, but no arguments of the model

# What other projects call the facts of a dataset.
ALIASES = {
    "num_classes": ("num_labels", "n_classes", "num_class", "nb_classes", "n_class"),
    "in_channels": ("in_chans", "num_channels", "input_channels", "in_channel", "n_channels"),
    "image_size": ("img_size", "input_size"),
    "vocab_size": ("n_vocab", "num_tokens", "vocabulary_size"),
    "seq_len": ("max_seq_len", "block_size", "context_length", "n_positions", "max_position_embeddings"),
}
_DATA = re.compile(r"\$\{data:(\w+)\}")


def dataset(node: Node) -> Dataset:
    """Build the dataset. It reads no file yet; torch is not imported. ValueError for bad arguments."""
    return component(node)()


def task(node: Node) -> "Task":
    """Build the task. ValueError for bad arguments."""
    return component(node)()


def derived(task: "Task") -> Callable[[dict[str, float]], dict[str, float]]:
    """Return the task's function from the means over samples to the metrics that follow from them."""
    return getattr(task, "derived", lambda means: {})


def model(node: Node, *, seed: int) -> "nn.Module":
    """Build the model, its weights drawn from the run's seed: the same on every rank, under every strategy."""
    import torch

    from framework.randomness import key

    torch.manual_seed(key(seed, "weights"))
    return component({name: value for name, value in node.items() if name not in INIT})()


def optimizer_builder(node: Node) -> "BuildOptimizer":
    """Return what builds the node's optimizer of parameters with their names.

    It is called with torch's parameter groups; one whose first argument is called `trained` gets a list of `Trainable`
    instead. Of `groups`, the options by patterns of names, the first takes care itself. ValueError as from `locate`.
    """
    from framework.optim.groups import param_groups, rules_of

    if next(iter(inspect.signature(locate(node["_target_"])).parameters), "") == "trained":
        return component(node)
    rules = rules_of(node.get("groups") or [])
    build = component({name: value for name, value in node.items() if name != "groups"})
    return lambda trained: build(param_groups(trained, rules))


def share_of_peak(node: Node, *, total_steps: int, lr: float) -> Callable[[int], float]:
    """Return the share of the peak learning rate `lr` by the step, counted from 0: a schedule of ours, or of torch's."""
    from torch.optim.lr_scheduler import LRScheduler

    from framework.optim.schedules import tabulated

    target = locate(node["_target_"])
    if not (isinstance(target, type) and issubclass(target, LRScheduler)):
        schedule = component(node)
        return lambda step: schedule(step, total_steps)
    takes_total = "total_steps" in inspect.signature(target).parameters and "total_steps" not in node
    return tabulated(component(node, **({"total_steps": total_steps} if takes_total else {})), lr=lr)


def example(info: Mapping[str, int], *, dtype: "torch.dtype | None" = None) -> "Tensor | None":
    """Return two samples' inputs, without storage, as a dataset's `info` describes them; None for data of another kind."""
    import torch

    if {"in_channels", "image_size"} <= info.keys():
        return torch.empty(2, info["in_channels"], info["image_size"], info["image_size"], dtype=dtype, device="meta")
    if {"vocab_size", "seq_len"} <= info.keys():
        return torch.empty(2, info["seq_len"], dtype=torch.long, device="meta")
    return None


# --- what follows from the data


def fact(name: str, info: Mapping[str, int]) -> int | None:
    """Return what the data say of an argument of this name, or of one that it is an alias of; None if nothing."""
    known = name if name in info else next((key for key, names in ALIASES.items() if name in names), name)
    return info.get(known)


def with_facts(node: Node, info: Mapping[str, int], *, key: str) -> tuple[Node, list[Problem]]:
    """Return a component's node with every `${data:FACT}` in it replaced."""
    problems: list[Problem] = []

    def replaced(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: replaced(item, f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, key) for item in value]
        asked = _DATA.fullmatch(value) if isinstance(value, str) else None
        if asked is None:
            return value
        if asked[1] not in info:
            what = f"the dataset does not give {asked[1]!r}"
            problems.append(Problem(key, what, f"it gives {', '.join(info) or 'nothing'}"))
        return info.get(asked[1])

    return replaced(node, key), problems


def complete_model(node: Node, info: Mapping[str, int]) -> tuple[Node, list[Problem]]:
    """Take what follows from the data (`num_classes`, ...) into the model's node, where the user gave no value.

    In a node within it, only where the value is null. ValueError if the model cannot be imported.
    """
    node = dict(node)
    arguments = arguments_of(node, group="model").arguments
    for name in (*arguments, *node):
        if node.get(name) is None and (value := fact(name, info)) is not None:
            node[name] = value
    node = {name: _filled(value, info) for name, value in node.items()}
    missing = [name for name, argument in arguments.items() if node.get(name) is None and _needs_value(argument, name, node)]
    return node, [
        Problem(f"model.{name}", "needs a value, and the dataset does not give one", _offer(info)) for name in missing
    ]


def with_init_digest(node: Node) -> Node:
    """Return a model's node with the checksum of the file that it begins with: workers begin with no other."""
    return {**node, "init_digest": content_of(str(node["init_from"]))} if node.get("init_from") else node


def _filled(value: Any, info: Mapping[str, int]) -> Any:
    if not isinstance(value, dict) or "_target_" not in value:
        return value
    return {name: fact(name, info) if item is None else _filled(item, info) for name, item in value.items()}


def _needs_value(argument: Any, name: str, node: Node) -> bool:
    """Return whether an argument that is null, or not given, must have a value."""
    if name not in node:
        return argument.default is argument.empty and fact(name, dict.fromkeys(ALIASES, 1)) is not None
    return argument.annotation in (int, float, str, bool)


def _offer(info: Mapping[str, int]) -> str:
    """Say what the data give, and which models that is enough for: those whose open arguments it has."""
    fitting = []
    for name in options("model"):
        values = option_node("model", name)
        facts = [key for key, value in values.items() if value is None and fact(key, dict.fromkeys(ALIASES, 1)) is not None]
        if all(fact(key, info) is not None for key in facts):
            fitting.append(f"model={name}")
    return f"it gives {', '.join(info) or 'nothing'}, which fits {', '.join(fitting) or 'no model here'}"


def complete_task(node: Node, dataset: Dataset) -> Node:
    """Take what only the dataset knows (`bytes_per_token`) into the task's node, where the user gave no value."""
    return {name: getattr(dataset, name, None) if value is None else value for name, value in node.items()}
