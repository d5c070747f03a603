"""Which of a model's outputs a task uses."""

from collections.abc import Mapping

from torch import Tensor


def main_output(outputs: "Tensor | Mapping[str, Tensor]") -> Tensor:
    """Return the outputs; of a dictionary (which many libraries' models return) the `logits`, or else its only entry."""
    if not isinstance(outputs, Mapping):
        return outputs
    if "logits" in outputs:
        return outputs["logits"]
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    raise ValueError(f"the model returns {', '.join(outputs)}: this task needs a tensor, or `logits` among them")
