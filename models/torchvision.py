"""Any classification architecture of torchvision, untrained, selected by name.

Shapes: B samples, C channels, H height, W width, K classes.
"""

import difflib

from torch import Tensor, nn

# In training, these two also return the logits of auxiliary heads, which no ordinary loss accepts. Their initialisation
# is set explicitly, because otherwise torchvision warns that its default will change.
OPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


class TorchvisionClassifier(nn.Module):
    """An image classifier: torchvision's model `name`; images with one channel are repeated to three channels.

    Most of these architectures are made for 224 x 224 pixels, and most have BatchNorm or dropout.
    """

    def __init__(self, *, num_classes: int, in_channels: int, name: str = "resnet18") -> None:
        super().__init__()
        # Its import takes as long as torch's own import, so import it only where it is needed.
        import torchvision  # type: ignore[import-untyped]  # it has no type information

        if in_channels not in (1, 3):
            raise ValueError(f"in_channels={in_channels}: torchvision's models take 3 channels, or 1 that is repeated")
        names = torchvision.models.list_models(module=torchvision.models)
        if name not in names:
            close = difflib.get_close_matches(name, names, n=5) or names
            raise ValueError(f"name={name!r} is not a torchvision classification model; choose e.g. {', '.join(close)}")
        self.model = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **OPTIONS.get(name, {}))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        if x_BCHW.shape[1] == 1:
            x_BCHW = x_BCHW.expand(-1, 3, -1, -1)
        return self.model(x_BCHW)
