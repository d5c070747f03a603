"""The components that a configuration names, as objects: dataset, task, model; and the facts of the data."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from framework.config.folders import option_node, options
from framework.config.identity import content_of
from framework.config.schema import INIT, Node
from framework.config.targets import arguments_of, component, locate
from framework.data.source import Dataset
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from framework.engine.seam import Task
    from framework.optim.optimizers import BuildOptimizer

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
    """Return a function that builds the node's optimizer of a list of `Trainable`.

    A target whose first argument is called `trained` gets this list, and applies the node's `groups` (options by patterns of
    names) itself; any other gets torch's parameter groups. ValueError as from `locate`.
    """
    from framework.optim.optimizers import param_groups, rules_of

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
    """Return the inputs of two samples, without storage, as a dataset's `info` describes them; None for other data."""
    import torch

    if {"in_channels", "image_size"} <= info.keys():
        return torch.empty(2, info["in_channels"], info["image_size"], info["image_size"], dtype=dtype, device="meta")
    if {"vocab_size", "seq_len"} <= info.keys():
        return torch.empty(2, info["seq_len"], dtype=torch.long, device="meta")
    return None


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
        if isinstance(value, dict):
            return {name: replaced(item, f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, key) for item in value]
        named = _DATA.fullmatch(value) if isinstance(value, str) else None
        if named is None and "${data:" in str(value):
            problems.append(Problem(key, f"{value} is not valid", "a fact is the whole of a value, as in ${data:num_classes}"))
        if named is not None and named[1] not in info:
            problems.append(Problem(key, f"the dataset does not give {named[1]!r}", f"it gives {', '.join(info) or 'nothing'}"))
        return value if named is None else info.get(named[1])

    return replaced(node, key), problems


def complete_model(model: Node, info: Mapping[str, int]) -> tuple[Node, list[Problem]]:
    """Fill the facts of the data (`num_classes`, ...) into the model's node, for null and where a value is missing.

    An argument with a default gets a fact of its own name, not by an alias. In a node within the model's, only null is
    filled. ValueError if the model cannot be imported.
    """
    signature = arguments_of(model, group="model")
    node = {name: _filled(value, info) for name, value in model.items()}
    wanted = [*node, *(name for name in signature.arguments if name in signature.required or name in info)]
    node |= {name: value for name in wanted if node.get(name) is None and (value := fact(name, info)) is not None}

    def is_missing(name: str, argument: inspect.Parameter) -> bool:
        if name in node:
            return argument.annotation in (int, float, str, bool)  # null is no value of these types
        return argument.default is argument.empty and _is_fact(name)

    missing = [name for name, argument in signature.arguments.items() if node.get(name) is None and is_missing(name, argument)]
    what = "needs a value, and the dataset does not give one"
    return node, [Problem(f"model.{name}", what, _offer(info)) for name in missing]


def _filled(value: Any, info: Mapping[str, int]) -> Any:
    """Return a value of the model's node with the facts for the null values of the nodes in it."""
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
    """Return a model's node with the checksum of the file that it starts from: workers accept no other file."""
    return {**model, "init_digest": content_of(str(model["init_from"]))} if model.get("init_from") else model, []


def complete_task(task: Node, *, dataset: Dataset) -> tuple[Node, list[Problem]]:
    """Fill what only the dataset knows (`bytes_per_token`) into the task's node, where the user gave no value."""
    return {name: getattr(dataset, name, None) if value is None else value for name, value in task.items()}, []
