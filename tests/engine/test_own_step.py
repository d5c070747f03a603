"""A task's own step: its micro-batches wait for each other in gather(), and none sees what another has switched on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.optim.optimizers import Trainable
from framework.optim.update import AveragedWeights
from tests.engine.test_data_parallel import gradients, linear, step


class Within:
    """A step that gathers within a context, and notes `probe` before, within and after it."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]], probe: Callable[[], Any]) -> None:
        self.context, self.probe, self.noted = context, probe, list[tuple[Any, Any, Any]]()

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        before = self.probe()
        outputs = call(batch.inputs.float())
        with self.context():
            everyone = context.gather(outputs.detach())
            within = self.probe()
            loss = (outputs @ everyone.T).sum(dtype=torch.float64)
        self.noted.append((before, within, self.probe()))
        return loss


def engine_of(task: Any, module: nn.Module) -> DataParallelEngine:
    return DataParallelEngine(module, forward=Forward(task, seed=0, devices=[torch.device("cpu")], autocast=None))


def run(task: Any, *bounds: int) -> nn.Module:
    module = linear().float()
    engine_of(task, module).forward_backward(step(*bounds), index=0, loss_scale=1.0, measure=False)
    return module


@contextmanager
def with_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def autocast_cpu() -> Any:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(
    ("context", "probe", "plain", "own"),
    [
        (lambda: torch.autocast("cpu", torch.float16, cache_enabled=False), autocast_cpu, (False, torch.bfloat16, True),
         (True, torch.float16, False)),
        (torch.no_grad, torch.is_grad_enabled, True, False),
        (lambda: torch.device("meta"), lambda: torch.empty(0).device.type, "cpu", "meta"),
        (lambda: with_default(torch.float64), torch.get_default_dtype, torch.float32, torch.float64),
    ],
    ids=["autocast", "no grad", "device", "dtype"],
)  # fmt: skip
def test_what_a_step_switches_on_around_gather_is_on_for_its_micro_batch_alone(
    context: Any, probe: Any, plain: Any, own: Any
) -> None:
    task = Within(context, probe)
    next(engine_of(task, linear().float())._own_steps().run(step(0, 3, 5, 7), index=0))
    assert task.noted == [(plain, own, plain)] * 3


def test_autocast_around_gather_gives_the_gradients_of_one_micro_batch() -> None:
    def task() -> Within:
        return Within(lambda: torch.autocast("cpu", torch.bfloat16), lambda: None)

    torch.testing.assert_close(gradients(run(task(), 0, 3, 5, 7)), gradients(run(task(), 0, 7)))


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
    engine_of(Gives(), module).forward_backward(step(0, 7), index=0, loss_scale=1.0, measure=False)
    assert module.got == [((given,), {}), ((given,), {"named": given})]


@pytest.mark.parametrize("read", [lambda call: call.weight, lambda call: call.parameters()], ids=["weight", "parameters"])
def test_a_step_does_not_read_weights_that_a_strategy_may_have_cut(read: Any) -> None:
    class Reads:
        def step(self, call: Any, batch: Any, context: Any) -> Any:
            assert call.in_features == 4  # a plain value
            return call(batch.inputs).sum() + read(call)

    with pytest.raises(AttributeError, match=r"call.(weight|parameters): .* .a method of the model can"):
        engine_of(Reads(), linear()).forward_backward(step(0, 7), index=0, loss_scale=1.0, measure=False)


def test_inference_mode_around_gather_is_refused() -> None:
    with pytest.raises(TypeError, match="inference_mode"):
        run(Within(torch.inference_mode, lambda: None), 0, 3, 7)


class Fails:
    """A step that calls the averaged weights with inputs that they do not take."""

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return context.averaged(batch.inputs.float()[:, :1].unsqueeze(0)).sum()


def test_an_error_of_the_averaged_weights_leaves_those_of_training() -> None:
    module = linear().float()
    engine, weights = engine_of(Fails(), module), module.weight.detach().clone()
    average = AveragedWeights([Trainable("weight", module.weight, False, True)], share=lambda step: 1.0)
    average.tensors["weight"].zero_()
    engine.use_average(average)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        engine.forward_backward(step(0, 7), index=0, loss_scale=1.0, measure=False)
    assert torch.equal(module.weight, weights)


def test_a_loss_of_16_bits_is_added_in_32() -> None:
    """256 and one more: a sum in bfloat16 would stay at 256."""

    class InHalf:
        def step(self, call: Any, batch: Any, context: Any) -> Any:
            return call(batch.inputs.float()).sum().bfloat16() * 0 + (256.0 if context.start == 0 else 1.0)

    engine = engine_of(InHalf(), linear().float())
    sums = engine.forward_backward(step(0, 3, 7), index=0, loss_scale=1.0, measure=False)
    assert float(sums["loss"]) == 257.0
