"""The configuration's nodes as objects: dataset, task, model."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from framework.config.compose import option_node, options
from framework.config.identity import content_of
from framework.config.renamed import current_target
from framework.config.signatures import arguments_of
from framework.data.source import Dataset
from framework.runtime.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from framework.engine.seam import Task


Config = dict[str, Any]


INIT = ("init_from", "init_digest")  # of the model's node, but no arguments of the model


def component(node: Config, **given: Any) -> Any:
    """Return the node's target, with the node's values bound; `given` overrides them. Call it with what is not data.

    ValueError if it cannot be imported. Not `hydra.utils.instantiate`: its partials look their target up anew at every
    call, 0.1 ms in every step.
    """
    target = current_target(node["_target_"])
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's own module: anything can come out of it
        text = " ".join(str(error).split())
        raise ValueError(f"_target_={target} cannot be imported ({type(error).__name__}: {text})") from error
    return functools.partial(found, **{key: value for key, value in (node | given).items() if key != "_target_"})


def dataset(config: Config) -> Dataset:
    """Build the dataset. It reads no file yet; torch is not imported. ValueError for bad arguments."""
    return component(config["dataset"])()


def complete_model(config: Config, info: dict[str, int]) -> tuple[Config, list[Problem]]:
    """Take what follows from the data (`num_classes`, ...) into the model's node, where the user gave no value."""
    node, problems = dict(config["model"]), []
    node |= {name: info[name] for name in arguments_of(str(node.get("_target_"))) or {}
             if node.get(name) is None and name in info}  # fmt: skip
    fitting = ", ".join(
        f"model={name}" for name in options("model") if not _unfilled(option_node("model", name) | dict(info))
    )
    if node.get("init_from"):
        node["init_digest"] = content_of(node["init_from"])
    for name in _unfilled(node):
        problems.append(Problem(f"model.{name}", "needs a value, and the dataset does not give one",
                                f"it gives {', '.join(info) or 'nothing'}, which fits {fitting or 'no model here'}"))  # fmt: skip
    return config | {"model": node}, problems


def _unfilled(node: Config) -> list[str]:
    """Return the arguments of a model's node that are null and cannot be."""
    arguments = arguments_of(str(node.get("_target_"))) or {}
    return [n for n, a in arguments.items() if node.get(n, "") is None and a.annotation in (int, float, str, bool)]


def complete_task(config: Config, dataset: Dataset) -> Config:
    """Take what only the dataset knows (`bytes_per_token`) into the task's node, where the user gave no value."""
    node = {name: getattr(dataset, name, None) if value is None else value for name, value in config["task"].items()}
    return config | {"task": node}


def task(config: Config) -> "Task":
    return component(config["task"])()


def derived(config: Config) -> "Callable[[dict[str, float]], dict[str, float]]":
    """Return the task's function from the means over samples to the metrics that follow from them."""
    return getattr(task(config), "derived", lambda means: {})


def model(config: Config) -> "nn.Module":
    """Build the model, its weights drawn from the run's seed: the same on every rank, under every strategy."""
    import torch

    from framework.randomness import key
    from framework.runtime.torchvision_fix import make_torchvision_importable

    make_torchvision_importable()
    torch.manual_seed(key(config["seed"], "weights"))
    return component({name: value for name, value in config["model"].items() if name not in INIT})()


def example(info: Mapping[str, int], *, dtype: "torch.dtype | None" = None) -> "Tensor | None":
    """Return two samples' inputs, without storage, as a dataset's `info` describes them; None for data of another kind."""
    import torch

    if {"in_channels", "image_size"} <= info.keys():
        return torch.empty(2, info["in_channels"], info["image_size"], info["image_size"], dtype=dtype, device="meta")
    if {"vocab_size", "seq_len"} <= info.keys():
        return torch.empty(2, info["seq_len"], dtype=torch.long, device="meta")
    return None
