"""Stages of torch's pipelines."""

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
