"""A model that computes its own loss: Hugging Face's models with `labels`, nanoGPT, autoencoders, detectors."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from framework.tasks.cross_entropy import IGNORED

Weight = Literal["samples", "tokens", "shifted_tokens"]


class OwnLoss:
    """The model gets the inputs and the targets, and returns a mean loss, alone or among its outputs, or several by name.

    `weight` says what the loss is a mean over: the samples; the targets that are not -100 (`tokens`); or these without the
    first of each sequence, for a model that shifts them itself (`shifted_tokens`). `labels` is the name of the targets for a
    model with named inputs. `evaluates_in_training_mode`: a model that returns predictions in eval mode (a detector) stays in
    training mode.
    """

    def __init__(self, *, weight: Weight, labels: str, evaluates_in_training_mode: bool) -> None:
        self._weight, self._labels = weight, labels
        self.evaluates_in_training_mode = evaluates_in_training_mode

    def step(self, call: Callable[..., Any], batch: Any, context: Any) -> dict[str, Any]:
        outputs = self._call(call, batch.inputs, batch.targets)
        losses = losses_in(outputs)
        if not losses:
            kind = f"a mapping of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
            kind = f"a tensor of shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else kind
            what = f"the model returns {kind}, and no loss, in {'training' if context.is_training else 'an evaluation'}"
            raise TypeError(f"{what} ({'another task' if context.is_training else 'task.evaluates_in_training_mode=true'})")
        weight = self._weight_of(batch) if self._weight != "samples" else context.size
        columns = {name: (loss.detach() * weight, weight) for name, loss in losses.items() if len(losses) > 1}
        return columns | {"loss": (sum(losses.values()) * weight, weight)}

    def _call(self, call: Callable[..., Any], inputs: Any, targets: Any) -> Any:
        if isinstance(inputs, Mapping):
            return call(**inputs, **({} if targets is None else {self._labels: targets}))
        given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return call(*given, *(() if targets is None else (targets,)))

    def _weight_of(self, batch: Any) -> Tensor:
        targets = batch.inputs.get(self._labels) if batch.targets is None else batch.targets
        if not isinstance(targets, Tensor):
            raise TypeError(f"task.weight is {self._weight}, but the targets are a {type(targets).__name__} (samples)")
        return ((targets if self._weight == "tokens" else targets[:, 1:]) != IGNORED).sum()


def losses_in(outputs: Any) -> dict[str, Tensor]:
    """Return the losses, of shape (), among a model's outputs.

    `loss`, or all with this word in their names, or all with names, or the only one. TypeError for several without names.
    """
    if isinstance(outputs, Mapping):
        named = {str(name): value for name, value in outputs.items() if isinstance(value, Tensor) and value.ndim == 0}
        losses = {name: value for name, value in named.items() if "loss" in name} or named  # beside an accuracy, for example
        return {"loss": named["loss"]} if "loss" in named else losses
    found = [one for one in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if isinstance(one, Tensor)]
    single = [one for one in found if one.ndim == 0]
    if len(single) > 1:
        raise TypeError(f"the model returns {len(single)} numbers without names: which is its loss? (a dictionary with `loss`)")
    return {"loss": single[0]} if single else {}
