"""Forward: what the model draws is keyed, what it computes is cast, what comes out are sums."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.engine.forward import Forward
from framework.engine.seam import MicroBatch, Step
from framework.modules.tensors import map_tensors
from framework.tasks.language_modeling import LanguageModeling
from framework.tasks.regression import Regression

CPU = torch.device("cpu")


def forward(*, seed: int = 3, autocast: torch.dtype | None = None) -> Forward:
    return Forward(Regression(), seed=seed, devices=[CPU], autocast=autocast)


def batch(inputs: Any, *, number: int = 0, is_padding: bool = False) -> MicroBatch:
    return MicroBatch(number, inputs, torch.zeros(2, 3), len(inputs), 0, is_padding)


def drawn(made: Forward, *, step: int | None, micro_batch: int) -> float:
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


def test_a_unit_s_draws_cost_one_seed_of_each_common_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: calls. torch.manual_seed, which asks for every kind of device, takes fifteen times as long as all three."""
    counts = Counter[str]()
    for place, name in ((random, "seed"), (np.random, "seed"), (torch, "manual_seed")):
        monkeypatch.setattr(place, name, lambda _, name=f"{place.__name__}.{name}": counts.update([name]))
    made, unit = forward(), Drawing()
    made.key_draws([unit])
    unit(torch.zeros(()))
    assert not counts  # somebody calls it between passes
    made.at = ("forward", 0, 0)
    unit(torch.zeros(()))
    assert counts == {"random.seed": 2, "numpy.random.seed": 2}  # before the unit, and after the last one


def test_units_that_draw_nothing_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    made, dropout, seeded = forward(), nn.Dropout(0.0), list[int]()
    layers = [
        nn.Sequential(nn.Linear(2, 2), nn.GELU()),
        nn.Sequential(nn.Linear(2, 2), dropout),
        nn.Sequential(nn.Linear(2, 2)),
    ]
    made.key_draws(layers, are_all=True)
    made.seed_draws(step=0, micro_batch=0)
    monkeypatch.setattr(Forward, "reseed", lambda _, *parts: seeded.append(parts[-1]))
    run = nn.Sequential(*layers)
    run(torch.zeros(1, 2))
    assert seeded == []
    dropout.p = 0.5  # as a schedule may set it
    run(torch.zeros(1, 2))
    assert seeded == [1, 3]  # the unit with dropout, and what follows the last unit


def test_what_follows_the_last_unit_does_not_depend_on_it() -> None:
    made, unit = forward(), Drawing()
    made.key_draws([unit])
    made.seed_draws(step=1, micro_batch=2)
    unit(torch.zeros(()))
    after = torch.rand(()).item()
    made.seed_draws(step=1, micro_batch=2)
    torch.rand(5)
    unit(torch.zeros(()))
    assert torch.rand(()).item() == after


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random, lambda: float(np.random.rand())])
def test_every_common_generator_is_keyed(draw: Callable[[], float]) -> None:
    made, numbers = forward(), []
    for step, micro_batch in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        made.seed_draws(step=step, micro_batch=micro_batch)
        numbers.append(draw())
        draw()
    assert numbers[0] == numbers[3] and len(set(numbers)) == 3


class Pair(NamedTuple):
    logits: Tensor
    count: int


@dataclass
class Record:
    logits: Tensor
    name: str = "a"


class Output(OrderedDict[str, Tensor]):
    """As the outputs of a model of Hugging Face: a dictionary whose entries are attributes too."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


TREES = [
    Pair(torch.ones(2), 3), Record(torch.ones(2)), Output(logits=torch.ones(2)), [torch.ones(2), 5], (torch.ones(2),),
    {"a": torch.ones(2)},
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_outputs_keep_their_types(tree: Any) -> None:
    doubled = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(doubled) is type(tree)
    found: list[Tensor] = []
    map_tensors(lambda tensor: (found.append(tensor), tensor)[1], doubled)
    assert [tensor.tolist() for tensor in found] == [[2.0, 2.0]]
    if hasattr(tree, "logits"):
        assert doubled.logits.tolist() == [2.0, 2.0] and tree.logits.tolist() == [1.0, 1.0]


def test_an_evaluation_draws_by_micro_batch_and_not_what_training_does() -> None:
    made, units = forward(), [Drawing(), Drawing()]
    made.key_draws(units)
    numbers = []
    for step, micro_batch in [(None, 0), (None, 1), (0, 0), (None, 0)]:
        made.seed_draws(step=step, micro_batch=micro_batch)
        numbers.append(units[1](torch.zeros(())).item())
    assert numbers[0] == numbers[3] and len(set(numbers)) == 3


def test_autocast_computes_in_its_type_and_gives_out_float32() -> None:
    seen: list[torch.dtype] = []
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    made = forward(autocast=torch.bfloat16)
    outputs = made.outputs(model, batch(torch.ones(2, 3)))
    loss, _ = made.measured(outputs, batch(torch.ones(2, 3)), measure=False)
    assert (seen, outputs.dtype, loss.dtype) == ([torch.bfloat16], torch.float32, torch.float32)


@pytest.mark.parametrize(
    "inputs", [torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2, 3)), {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}]
)
def test_a_model_is_called_with_a_tensor_a_tuple_or_names(inputs: Any) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else x + y

    made = forward()
    outputs = made.outputs(model, batch(inputs))
    loss, _ = made.measured(outputs, batch(inputs), measure=False)
    value = 1.0 if isinstance(inputs, Tensor) else 2.0
    assert torch.equal(outputs, torch.full((2, 3), value))
    assert loss.item() == 2 * value**2  # a sum over the two samples, each the mean over its outputs


@pytest.mark.parametrize(("weights", "num_messages"), [([1, 0, 1, 1], 0), ([0.1, 0.7, 0.3, 0.2], 1)])
def test_only_the_weight_that_no_cut_rounds_is_known_without_a_message(
    weights: list[float], num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of float32 numbers of a whole step is rounded otherwise than the sums of its micro-batches."""

    class Weighing(Regression):
        def loss_weight(self, targets: Tensor) -> Tensor:
            return torch.tensor(weights)[targets].sum()

    sent = list[Tensor]()
    monkeypatch.setattr(dist, "all_reduce", lambda weight, async_op: sent.append(weight.clone()) or SimpleNamespace(wait=list))
    made, numbers = Forward(Weighing(), seed=0, devices=[CPU], autocast=None), torch.arange(4)
    halves = [MicroBatch(number, numbers, half, 2, 2 * number, False) for number, half in enumerate(numbers.split(2))]
    for own in (halves[:1], halves):
        step, factor = made.weighed(
            Step(0, 4, own, targets=numbers), scale=1.0, num_samples=4, is_counted=True, among_ranks=True
        )
        assert [micro_batch.weight.dtype for micro_batch in step.micro_batches] == [torch.float64] * len(own)
        total = sum(weights) if not num_messages or len(own) == 2 else sum(weights[:2])
        assert factor() == pytest.approx(1 / total, rel=1e-7)
    assert len(sent) == 2 * num_messages


def test_layers_can_ask_whether_the_micro_batch_is_padding() -> None:
    made, seen = forward(), list[bool]()

    def model(x: Tensor) -> Tensor:
        seen.append(made.is_padding)
        return x

    made.outputs(model, batch(torch.ones(2, 3), is_padding=True))
    made.outputs(model, batch(torch.ones(2, 3)))
    assert seen == [True, False]


class OwnLanguageModeling(LanguageModeling):
    """Which may compute its loss in the type of the logits."""


@pytest.mark.parametrize(
    ("task", "expected"),
    [(LanguageModeling, torch.bfloat16), (OwnLanguageModeling, torch.float32), (Regression, torch.float32)],
)
def test_a_loss_is_given_32_bits_unless_its_class_takes_16(task: Any, expected: torch.dtype) -> None:
    given = {"bytes_per_token": None} if issubclass(task, LanguageModeling) else {}
    made = Forward(task(**given), seed=3, devices=[CPU], autocast=torch.bfloat16)
    layer = nn.Linear(3, 3)
    assert made.for_loss(lambda: layer(torch.ones(2, 3))).dtype == expected
    assert made.outputs(layer, batch(torch.ones(2, 3))).dtype == torch.float32  # of evaluations, of metrics and of predictions


def test_a_loss_of_16_bits_is_given_what_the_model_computed() -> None:
    seen = list[torch.dtype]()

    class Seeing(LanguageModeling):
        takes_16_bits = True

        def loss(self, outputs: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(outputs.dtype)
            return super().loss(outputs, targets_BT)

    made = Forward(Seeing(bytes_per_token=None), seed=3, devices=[CPU], autocast=torch.bfloat16)
    targets = torch.zeros(2, 4, dtype=torch.long)
    loss, _ = made(nn.Linear(3, 5), MicroBatch(0, torch.ones(2, 4, 3), targets, 2, 0, False), measure=False)
    assert (seen, loss.dtype) == ([torch.bfloat16], torch.float32)
