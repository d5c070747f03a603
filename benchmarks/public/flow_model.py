"""A flow of normflows, as in its README."""

from typing import Any

import normflows as nf
import torch
from torch import nn


def real_nvp(*, num_layers: int, width: int) -> nn.Module:
    layers: list[Any] = []
    for number in range(num_layers):
        mask = torch.tensor([1.0, 0.0] if number % 2 else [0.0, 1.0])
        scale, shift = (nf.nets.MLP([2, width, width, 2], init_zeros=True) for _ in range(2))
        layers += [nf.flows.MaskedAffineFlow(mask, shift, scale)]
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers)
