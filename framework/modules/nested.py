"""Batches that are more than one tensor: tuples and dictionaries of them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Tree = Any  # a tensor, or a tuple or dictionary of trees


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each tensor; what is no tensor stays as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map_tensors(function, value) for value in tree)
    return tree


def call(model: Callable[..., Any], inputs: Tree) -> Any:
    """Call a model: with a tensor as its argument, a tuple as its arguments, a dictionary as its named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
