"""Forward: what the model draws is keyed, what it computes is cast, what comes out are sums."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.engine.forward import Forward
from framework.engine.seam import MicroBatch
from framework.tasks.regression import Regression

CPU = torch.device("cpu")


def forward(*, seed: int = 3, autocast: torch.dtype | None = None) -> Forward:
    return Forward(Regression(), seed=seed, devices=[CPU], autocast=autocast)


def batch(inputs: Any, *, number: int = 0, is_padding: bool = False) -> MicroBatch:
    return MicroBatch(number, inputs, torch.zeros(2, 3), is_padding)


def drawn(made: Forward, *, step: int, micro_batch: int) -> float:
    made.seed_draws(step=step, micro_batch=micro_batch)
    return torch.rand(()).item()


def test_draws_follow_from_seed_step_and_micro_batch_alone() -> None:
    made = forward()
    expected = {(step, number): drawn(made, step=step, micro_batch=number) for step in range(3) for number in range(3)}
    assert len(set(expected.values())) == 9
    torch.rand(17)  # what was drawn before does not matter, nor does the order
    assert {at: drawn(forward(), step=at[0], micro_batch=at[1]) for at in reversed(expected)} == expected
    assert drawn(forward(seed=4), step=0, micro_batch=0) != expected[0, 0]


class Drawing(nn.Module):
    """Adds to its input a number that it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) if self.training else x


def test_a_units_draws_do_not_depend_on_the_units_before_it() -> None:
    made, units = forward(), [Drawing(), Drawing()]
    made.key_draws(units)
    made.seed_draws(step=1, micro_batch=2)
    both = [unit(torch.zeros(())).item() for unit in units]
    assert both[0] != both[1]
    made.seed_draws(step=1, micro_batch=2)
    assert units[1](torch.zeros(())).item() == both[1]  # alone, as on a later stage of a pipeline
    made.seed_draws(step=1, micro_batch=3)
    assert units[1](torch.zeros(())).item() != both[1]


def test_evaluating_a_keyed_unit_leaves_the_generator_alone() -> None:
    made, unit = forward(), Drawing().eval()
    made.key_draws([unit])
    before = torch.get_rng_state()
    unit(torch.zeros(()))
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_computes_in_its_type_and_gives_out_float32() -> None:
    seen: list[torch.dtype] = []
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    outputs, loss = forward(autocast=torch.bfloat16)(model, batch(torch.ones(2, 3)))
    assert (seen, outputs.dtype, loss.dtype) == ([torch.bfloat16], torch.float32, torch.float32)


@pytest.mark.parametrize(
    "inputs", [torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2, 3)), {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}]
)
def test_a_model_is_called_with_a_tensor_a_tuple_or_names(inputs: Any) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else x + y

    outputs, loss = forward()(model, batch(inputs))
    value = 1.0 if isinstance(inputs, Tensor) else 2.0
    assert torch.equal(outputs, torch.full((2, 3), value))
    assert loss.item() == 2 * value**2  # a sum over the two samples, each the mean over its outputs


def test_layers_can_ask_whether_the_micro_batch_is_padding() -> None:
    made, seen = forward(), list[bool]()

    def model(x: Tensor) -> Tensor:
        seen.append(made.is_padding)
        return x

    made(model, batch(torch.ones(2, 3), is_padding=True))
    made(model, batch(torch.ones(2, 3)))
    assert seen == [True, False]
