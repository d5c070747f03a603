"""Two parts of the loop: filters that whiten the patches of the training images, and test images seen in several ways."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from extras.airbench.images import views
from extras.airbench.model import PATCH, Whiten, two_signs
from framework.engine.sums import Sums, add, weight_of
from framework.training.loop_view import Loop

_AT_ONCE = 500  # images: their patches take 50 MB


class Whitening:
    """A part that makes the filters of a `Whiten` layer from the first `samples` training images, before the first step.

    After it, the outputs over all patches have unit variance and are not correlated, but where a variance is not far above
    `eps`. The filters are in the checkpoints, as every buffer is. Source: the paper, section 3.2.
    """

    def __init__(self, *, layer: str = "whiten", samples: int = 5000, eps: float = 5e-4) -> None:
        self.layer, self.samples, self.eps = layer, samples, eps

    @torch.no_grad()
    def begun(self, loop: Loop) -> None:
        layer, source = dict(loop.module.named_modules()).get(self.layer), loop.splits.loader("train").source
        if not loop.any(isinstance(layer, Whiten)):  # not each process has each layer
            raise ValueError(f"layer={self.layer}: is no whitening layer of the model (extras.airbench.model.Whiten)")
        numbers, moments = np.arange(min(self.samples, len(source))), []
        for some in np.array_split(numbers, -(-len(numbers) // _AT_ONCE)):
            inputs, targets = map(torch.as_tensor, source.gather(some))
            images, _ = loop.dataset.transform(inputs, targets, keys=None)
            moments.append(second_moments(images.double()))
        mean = torch.stack(moments).sum(0) / len(numbers)
        if isinstance(layer, Whiten):
            layer.weight.copy_(whitening_filters(mean, eps=self.eps, in_channels=layer.weight.shape[1]))
        loop.engine.sync_buffers()  # another kind of CPU may round differently


def second_moments(images: Tensor) -> Tensor:
    """Return the sum over the images (B, C, H, W) of the mean of p p^T over their patches p, shape (D, D)."""
    patches_BDN = torch.nn.functional.unfold(images, PATCH)
    return torch.einsum("bin,bjn->ij", patches_BDN, patches_BDN) / patches_BDN.shape[-1]


def whitening_filters(moments: Tensor, *, eps: float, in_channels: int) -> Tensor:
    """Return the filters: the eigenvectors of the second moments (D, D), each divided by the root of its eigenvalue + eps.

    An eigenvector has the sign that makes its largest number positive, as a library may return either sign.
    """
    values, vectors = torch.linalg.eigh(moments)
    rows = vectors.T.flip(0) / (values.flip(0)[:, None] + eps).sqrt()
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return two_signs(rows * largest.sign(), in_channels=in_channels)


class TestTimeAveraging:
    """A part that adds `tta_METRIC` to each evaluation: the task's metrics of the mean of the outputs over views of an image.

    The outputs must be a tensor. The views are the image, and two shifts by `shift` pixels, also mirrored. Source: the paper,
    section 3.5.
    """

    __test__ = False  # for pytest

    def __init__(self, *, shift: int = 1) -> None:
        self.shift = shift

    def evaluated(self, loop: Loop, split: str, row: dict[str, Any]) -> dict[str, float]:
        sums: Sums = {}
        for step in loop.splits.loader(split).evaluate():
            for batch in step.micro_batches:
                seen = [share * loop.outputs(view) for share, view in views(batch.inputs, shift=self.shift)]
                for name, value in loop.task.metrics(sum(seen), batch.targets).items():
                    both = value if isinstance(value, tuple) else (value, batch.num_samples)
                    total, weight = (torch.as_tensor(part) * (not batch.is_padding) for part in both)
                    add(sums, {name: total, weight_of(name): weight})
        # ranks with the same samples count as often in a sum as in its weight
        totals = {name: loop.sum(value).item() for name, value in sorted(sums.items())}
        return {f"tta_{name}": totals[name] / totals[weight_of(name)] for name in totals if weight_of(name) in totals}
