"""A neural ODE of torchdiffeq, as in its ode_demo.py."""

import torch
from torch import Tensor, nn
from torchdiffeq import odeint_adjoint


class Speed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, time: Tensor, point: Tensor) -> Tensor:
        return self.net(point**3)


class NeuralODE(nn.Module):
    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.speed = Speed(width)
        self.register_buffer("times", torch.linspace(0, 1, 10))

    def forward(self, start: Tensor) -> Tensor:
        return odeint_adjoint(self.speed, start, self.times, method="rk4").transpose(0, 1)
