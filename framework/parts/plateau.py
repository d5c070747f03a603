"""A learning rate that falls when a measured value no longer improves: torch's ReduceLROnPlateau, as a part of the loop."""

import re
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import nn

from framework.runtime.exits import Unfit
from framework.training.loop_view import Loop


class Plateau:
    """After `patience` evaluations without an improvement of `monitor` (SPLIT/METRIC), the rates are multiplied by `factor`.

    It multiplies what the schedule gives, and `min_share` is the least factor of all. Its state is in every checkpoint.
    """

    def __init__(
        self, *, monitor: str, mode: Literal["min", "max"], factor: Annotated[float, Gt(0), Lt(1)],
        patience: Annotated[int, Ge(0)], threshold: Annotated[float, Ge(0)], cooldown: Annotated[int, Ge(0)],
        min_share: Annotated[float, Ge(0)],
    ) -> None:  # fmt: skip
        self.split, _, self.metric = monitor.partition("/")
        if not re.fullmatch(r"(val(\.\w+)?|test)/.+", monitor):
            raise ValueError(f"monitor={monitor}: is not valid (val/METRIC, val.NAME/METRIC or test/METRIC)")
        self._shared = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self._shared, mode=mode, factor=factor, patience=patience, threshold=threshold, cooldown=cooldown, min_lr=min_share
        )

    def step_begun(self, loop: Loop) -> None:
        loop.lr_share = self._shared.param_groups[0]["lr"]

    def evaluated(self, loop: Loop, split: str, row: dict[str, Any]) -> None:
        if split == self.split:
            if self.metric not in row:
                raise Unfit(f"part.plateau.monitor: {split}/{self.metric} is not measured (one of {', '.join(row)})")
            self._scheduler.step(row[self.metric])

    def state_dict(self) -> dict[str, Any]:
        return {"share": self._shared.param_groups[0]["lr"], "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shared.param_groups[0]["lr"] = state["share"]
        self._scheduler.load_state_dict(state["scheduler"])
