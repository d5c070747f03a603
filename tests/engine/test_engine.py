"""The Engine: gradients of the global mean, sums of this rank's samples, buffers that follow micro-batch 0."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.engine import forward as forwards
from framework.engine.buffers import Buffers
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import MicroBatch, Step
from framework.runtime.exits import Unfit
from framework.tasks.regression import Regression

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 2).double()


def engine(module: nn.Module, **options: Any) -> Engine:
    forward = Forward(Regression(), seed=0, devices=[torch.device("cpu")], autocast=None)
    return Engine(module=module, model=options.pop("wrapper", module), forward=forward, **options)


def step(*bounds: int, first: int = 0, padding: Sequence[int] = (), num_samples: int = 7) -> Step:
    """Return a step whose micro-batches, numbered from `first`, lie between the bounds."""
    spans = enumerate(zip(bounds, bounds[1:]))
    parts = [MicroBatch(first + i, INPUTS[a:b], TARGETS[a:b], b - a, a, i in padding) for i, (a, b) in spans]
    return Step(epoch=0, num_samples=num_samples, micro_batches=parts)


def run(made: Engine, of: Step, *, loss_scale: float = 1.0, measure: bool = True) -> dict[str, float]:
    sums = made.train(of, index=0, loss_scale=loss_scale, measure=measure)
    return {name: value.item() for name, value in sums.items()}


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def expected_gradients(module: nn.Module, *, scale: float = 1.0) -> list[Tensor]:
    loss = (module(INPUTS) - TARGETS).square().mean() * scale
    return list(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("bounds", [(0, 7), (0, 3, 6, 7), (0, 1, 2, 7)])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_however_a_step_is_cut_the_gradient_is_that_of_the_mean_over_all_samples(
    bounds: tuple[int, ...], loss_scale: float
) -> None:
    module = linear()
    sums = run(engine(module), step(*bounds), loss_scale=loss_scale)
    torch.testing.assert_close(gradients(module), expected_gradients(linear(), scale=loss_scale))
    losses = (linear()(INPUTS) - TARGETS).square().mean(dim=1)
    assert sums["loss"] == pytest.approx(losses.sum().item())
    assert sums["mae"] == pytest.approx((linear()(INPUTS) - TARGETS).abs().mean(dim=1).sum().item())


@pytest.mark.parametrize("averaged_over", [1, 2])
def test_the_gradients_of_the_ranks_add_up_and_a_mean_over_them_is_undone(averaged_over: int) -> None:
    halves = [linear(), linear()]
    for rank, (module, bounds) in enumerate(zip(halves, [(0, 4), (4, 7)])):
        run(engine(module, dp_rank=rank, dp_size=2, averaged_over=averaged_over), step(*bounds))
    together = [(one + other) / averaged_over for one, other in zip(*map(gradients, halves))]
    torch.testing.assert_close(together, expected_gradients(linear()))


def test_metrics_are_measured_only_where_they_are_asked_for() -> None:
    assert run(engine(linear()), step(0, 7), measure=False).keys() == {"loss"}


def test_padding_runs_with_weight_zero() -> None:
    module, alone = linear(), linear()
    sums = run(engine(module), step(0, 4, 7, padding=[1]))
    assert sums == run(engine(alone), step(0, 4))
    torch.testing.assert_close(gradients(module), gradients(alone))
    only = linear()
    assert run(engine(only), step(0, 4, padding=[0])) == {"loss": 0.0, "mae": 0.0}
    assert len(gradients(only)) == 2 and not any(gradient.any() for gradient in gradients(only))


def test_of_ranks_with_the_same_samples_one_is_counted_and_all_have_gradients() -> None:
    module = linear()
    assert run(engine(module, is_counted=False), step(0, 7)) == {"loss": 0.0, "mae": 0.0}
    torch.testing.assert_close(gradients(module), expected_gradients(linear()))


def test_gradients_are_synchronised_with_the_last_micro_batch_alone() -> None:
    calls: list[bool] = []
    run(engine(linear(), set_sync=calls.append), step(0, 2, 4, 7))
    assert calls == [False, False, True]


def test_micro_batch_0_alone_moves_the_buffers() -> None:
    module, first = model(), model()
    first(INPUTS[:3])
    run(engine(module), step(0, 3, 5, 7))
    for mine, expected in zip(Buffers(module).tensors, Buffers(first).tensors):
        assert torch.equal(mine, expected)


def test_the_norm_is_over_all_gradients_and_clipping_scales_to_the_limit() -> None:
    module = linear()
    made = engine(module)
    run(made, step(0, 7))
    norm = torch.cat([gradient.flatten() for gradient in gradients(module)]).norm()
    before = gradients(module)
    assert made.clip_grad_norm(None).item() == pytest.approx(norm.item())
    assert all(map(torch.equal, gradients(module), before))
    assert made.clip_grad_norm(norm.item() / 2).item() == pytest.approx(norm.item())
    assert torch.cat([gradient.flatten() for gradient in gradients(module)]).norm().item() == pytest.approx(
        norm.item() / 2, rel=1e-5
    )


def test_an_evaluation_gives_the_same_sums_without_gradients() -> None:
    module = linear()
    made = engine(module)
    assert {name: value.item() for name, value in made.evaluate(step(0, 7)).items()} == run(engine(linear()), step(0, 7))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(value.item() == 0.0 for value in made.evaluate(step(0, 7, padding=[0])).values())


def test_a_strategy_may_build_the_optimizer_in_its_own_way() -> None:
    made = engine(linear(), make_optimizer=lambda build, trained: ("its own", build, trained))
    assert made.optimizer("build", ["trained"]) == ("its own", "build", ["trained"])


def test_a_process_with_some_tokens_of_each_sample_has_no_whole_outputs() -> None:
    sliced = engine(linear(), slice=lambda micro_batch: micro_batch)
    with pytest.raises(Unfit, match="no process has the outputs of the whole model"):
        sliced.outputs(INPUTS)


def test_gradients_are_weighed_by_a_number_of_their_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of another type CUDA multiplies them one by one: 123 launches in a step of GPT-2."""
    calls = list[tuple[set[torch.dtype], torch.dtype]]()
    plain = forwards.multiply_all

    def note(gradients: list[Tensor], factor: Tensor) -> None:
        calls.append(({gradient.dtype for gradient in gradients}, factor.dtype))
        plain(gradients, factor)

    monkeypatch.setattr(forwards, "multiply_all", note)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3).double(), nn.Linear(3, 2).bfloat16())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    weight = torch.tensor(8.0, dtype=torch.float64)
    forwards.weigh_gradients(module, {forwards.weight_of("loss"): weight}, num_samples=4, among_ranks=False)
    assert {value.item() for gradient in gradients(module) for value in gradient.flatten()} == {0.5}
    assert sorted(calls, key=str) == sorted(
        [({kind}, kind) for kind in (torch.float32, torch.float64, torch.bfloat16)], key=str
    )
