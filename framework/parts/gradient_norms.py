"""Gradient norms by module, in the training rows."""

import math

from framework.training.loop_view import Loop


class GradientNorms:
    """A part that adds `grad_norm:MODULE` to each training row: the L2 norm, before clipping, of the gradient of a module.

    `depth`: the number of components of a parameter's name that make the module's name.
    """

    def __init__(self, *, depth: int = 1) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} is out of range (at least 1)")
        self.depth = depth
        self._squares: dict[str, dict[str, float]] = {}  # of each turn (optimizer.turns), by module

    def step_begun(self, loop: Loop) -> None:
        self._squares = {}

    def gradients_ready(self, loop: Loop) -> None:
        if not loop.has_row:
            return
        squares = self._squares[loop.turn] = dict[str, float]()
        for name, norm in loop.gradient_norms().items():
            module = ".".join(name.split(".")[: self.depth])
            squares[module] = squares.get(module, 0.0) + norm**2

    def row(self, loop: Loop) -> dict[str, float]:
        modules = sorted({module for squares in self._squares.values() for module in squares})
        total = {module: sum(squares.get(module, 0.0) for squares in self._squares.values()) for module in modules}
        return {f"grad_norm:{module}": math.sqrt(square) for module, square in total.items()}
