"""The outputs of a model that a task uses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def main_output(outputs: "Tensor | Mapping[str, Tensor]") -> Tensor:
    """Return the outputs. For a dictionary, as many libraries' models return, return `logits`, or else the only entry."""
    if not isinstance(outputs, Mapping):
        return outputs
    if "logits" in outputs:
        return outputs["logits"]
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    raise ValueError(f"the model returns {', '.join(outputs)}: this task needs a tensor, or `logits` among them")


def written_outputs(task: Any, outputs: Any, *, num_samples: int) -> dict[str, Tensor]:
    """Return the predictions of a batch: the tensors of the task's `written(outputs)`, or the main output.

    Raise ValueError or TypeError if the result is not a dictionary of tensors with the samples as their first dim.
    """
    found = dict(task.written(outputs) if hasattr(task, "written") else {"output": main_output(outputs)})
    for name, value in found.items():
        if name in ("sample", "file"):
            raise ValueError(f"{name} is the name of another column of the table")
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
        if value.shape[:1] != (num_samples,):
            raise ValueError(f"{name} of shape {list(value.shape)} does not begin with the {num_samples} samples")
    return found


def with_auxiliary_loss(
    total: Tensor, outputs: "Tensor | Mapping[str, Tensor]", *, weights_B: "Callable[[], Tensor] | None" = None
) -> Tensor:
    """Return a loss with the model's own addition, `aux_loss` (B,), as a sum over samples, with weights if given.

    Raise TypeError for any other shape, because a statistic of a micro-batch depends on how the batch is cut.
    """
    losses = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
    if losses is None:
        return total
    shape, num_samples = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__, len(main_output(outputs))
    if shape != [num_samples]:
        raise TypeError(f"the model's aux_loss is {shape}, but only a loss for each sample, [{num_samples}], does not depend "
                        "on how a batch is cut (for transformers: output_router_logits=false)")  # fmt: skip
    return total + (losses.sum() if weights_B is None else torch.dot(losses, weights_B().to(losses)))
