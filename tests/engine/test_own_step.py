"""A task's own step, and its second phase, which reads the rows of all samples."""

from typing import Any

import pytest
import torch
from torch import nn

from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.optim.optimizers import Trainable
from framework.optim.update import AveragedWeights
from tests.engine.test_engine import gradients, linear, step


def engine_of(task: Any, module: nn.Module) -> Engine:
    return Engine(module=module, forward=Forward(task, seed=0, devices=[torch.device("cpu")], autocast=None))


def run(task: Any, *bounds: int) -> nn.Module:
    module = linear().float()
    engine_of(task, module).train(step(*bounds), index=0, loss_scale=1.0, measure=False)
    return module


@pytest.mark.parametrize(
    "given", [[torch.ones(1)] * 3, {"boxes": torch.ones(1)}, (torch.ones(1),)], ids=["list", "mapping", "tuple"]
)
def test_a_step_calls_the_model_with_what_it_gives(given: Any) -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.got = nn.Parameter(torch.ones(())), list[Any]()

        def forward(self, *values: Any, **named: Any) -> torch.Tensor:
            self.got.append((values, named))
            return self.weight * 1

        def method(self, *values: Any, **named: Any) -> torch.Tensor:
            return self(*values, **named)

    class Gives:
        def step(self, call: Any, batch: Any, context: Any) -> Any:
            return call(given) + call.method(given, named=given)

    module = Notes()
    engine_of(Gives(), module).train(step(0, 7), index=0, loss_scale=1.0, measure=False)
    assert module.got == [((given,), {}), ((given,), {"named": given})]


@pytest.mark.parametrize("read", [lambda call: call.weight, lambda call: call.parameters()], ids=["weight", "parameters"])
def test_a_step_does_not_read_weights_that_a_strategy_may_have_cut(read: Any) -> None:
    class Reads:
        def step(self, call: Any, batch: Any, context: Any) -> Any:
            assert call.in_features == 4  # a plain value
            return call(batch.inputs).sum() + read(call)

    with pytest.raises(AttributeError, match=r"call.(weight|parameters): .* .a method of the model can"):
        engine_of(Reads(), linear()).train(step(0, 7), index=0, loss_scale=1.0, measure=False)


class Rows:
    def step(self, call: Any, batch: Any, context: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return {"outputs": call(batch.inputs.float()), "noise": torch.rand(len(batch.inputs), 1)}

    def loss_of_rows(self, own: Any, everyone: Any, batch: Any, context: Any) -> Any:
        mine = everyone["outputs"][context.start : context.start + len(own["outputs"])]
        assert torch.equal(mine, own["outputs"][: len(mine)])  # padding has none
        return (own["outputs"] @ everyone["outputs"].T).sum(dtype=torch.float64) + own["noise"].sum() + torch.rand(())


def test_a_loss_of_the_rows_of_all_samples_is_the_same_in_one_micro_batch_and_in_several() -> None:
    torch.testing.assert_close(gradients(run(Rows(), 0, 3, 5, 7)), gradients(run(Rows(), 0, 7)))


def test_rows_of_padding_are_not_among_those_of_all() -> None:
    whole, padding = step(0, 4, 7).micro_batches
    padded = step(0, 4)._replace(micro_batches=[whole, padding._replace(is_padding=True)])
    module = linear().float()
    engine_of(Rows(), module).train(padded, index=0, loss_scale=1.0, measure=False)
    torch.testing.assert_close(gradients(module), gradients(run(Rows(), 0, 4)))


class Fails:
    """A step that calls the averaged weights with inputs that they do not take."""

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return context.averaged(batch.inputs.float()[:, :1].unsqueeze(0)).sum()


def test_an_error_of_the_averaged_weights_leaves_those_of_training() -> None:
    module = linear().float()
    engine, weights = engine_of(Fails(), module), module.weight.detach().clone()
    average = AveragedWeights([Trainable("weight", module.weight, False, True)], share=lambda step: 1.0)
    average.tensors["weight"].zero_()
    engine.average = average
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        engine.train(step(0, 7), index=0, loss_scale=1.0, measure=False)
    assert torch.equal(module.weight, weights)


def test_a_loss_of_16_bits_is_added_in_32() -> None:
    """256 and one more: a sum in bfloat16 would stay at 256."""

    class InHalf:
        def step(self, call: Any, batch: Any, context: Any) -> Any:
            return call(batch.inputs.float()).sum().bfloat16() * 0 + (256.0 if context.start == 0 else 1.0)

    engine = engine_of(InHalf(), linear().float())
    sums = engine.train(step(0, 3, 7), index=0, loss_scale=1.0, measure=False)
    assert float(sums["loss"]) == 257.0
