"""Changes of a model: recomputation that reads and draws what the first forward did, and modes that an evaluation gives back."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from framework.modules.parts import give_parts
from framework.modules.structure import in_eval_mode, recompute_activations


class Moving(nn.Module):
    """Reads and moves a buffer, and draws from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        y = torch.tanh(self.linear(x)) * self.scale.clone() * noise
        with torch.no_grad():
            self.scale.mul_(1.5)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Moving() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: Model) -> tuple[list[Tensor], list[Tensor], float]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    for _ in range(2):  # two graphs at once, as with several micro-batches under way
        model(torch.ones(2, 3)).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return gradients, [buffer.clone() for buffer in model.buffers()], random.random()


def test_recomputed_blocks_read_and_draw_the_same_and_leave_no_trace() -> None:
    plain, recomputed = Model(), Model()
    give_parts(recomputed, {"blocks": "layers"})
    recompute_activations(recomputed)
    for one, other in zip(step(plain), step(recomputed)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Stubborn(nn.Module):
    """One part stays in evaluation, by its author's train()."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.other = nn.Dropout(), nn.Dropout()
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> "Stubborn":
        super().train(mode)
        self.kept.eval()
        self.calls.append(mode)
        return self


def test_an_evaluation_gives_each_module_its_mode_back() -> None:
    model = Stubborn()
    model.train()
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model.kept.training, model.other.training) == (True, False, True)
    assert model.calls == [True, False, True], "its own train() has been called"
    model.other.eval()
    with in_eval_mode(model):
        pass
    assert (model.kept.training, model.other.training) == (False, False), "what was put into evaluation by hand stays there"
