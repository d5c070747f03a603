"""Stages of torch's pipelines."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def greet_others_only(stage: Any, *, rank: int) -> None:
    """Let a stage open its connections to other ranks only: before torch 2.12, neighbours on one rank send to themselves.

    `rank` is this rank in the stage's group. gloo has no connection of a rank to itself.
    """
    if torch.__version__ >= "2.12":
        return
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [one for one in greetings() if one.group_peer != rank]


def around_last_backward(stage: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Run a stage's last backward pass (if a micro-batch has two, the pass of the weights) within a context from `around`."""
    plain = stage.backward_maybe_with_nosync

    def backward(kind: str, options: dict[str, Any], last_backward: bool = False) -> Any:
        with around() if last_backward else nullcontext():
            return plain(kind, options, last_backward=last_backward)

    stage.backward_maybe_with_nosync = backward
