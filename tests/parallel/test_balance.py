"""Stages balanced by measured times: decided once, by rank 0, and nothing that is computed depends on them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands
from framework.modules.trace import give_example
from framework.parallel import pipeline
from framework.parallel.pipelining import times
from framework.parallel.pipelining.own_forward import OwnForward, chain_for
from framework.parallel.pipelining.times import agreed_spans, measured_costs
from tests.harness import Ended, assert_close, checked, command, finished, together
from tests.ranks import on_ranks
from tests.test_conformance import MODELS, RUN
from tests.test_resume import after_step, crash

NOTHING = Demands(None, None, False, None, None, False, None, False)
LINE = [*RUN, *MODELS["gpt, tied"], "checkpoint.every=2"]
CUT = ["parallel=pipeline", "parallel.balance=time", "launch.nproc_per_node=2"]


class OwnWay(nn.Module):
    """Three blocks, the second of which costs much more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 64)
        self.layers = nn.ModuleList(Widening(width) for width in (1, 4096, 1))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Widening(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(64, width), nn.Linear(width, 64), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(x)))


def forward_for(example: torch.Tensor, autocast: torch.dtype | None = None) -> Forward:
    cpu = [torch.device("cpu")]
    return Forward(object(), seed=0, devices=cpu, autocast=autocast, example=example)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_takes_longer_costs_more_and_nothing_changes(is_listed: bool, autocast: torch.dtype | None) -> None:
    torch.manual_seed(0)
    own, example = OwnWay(), torch.empty(2, 4, device="meta")
    model = nn.Sequential(own.stem, *own.layers, own.norm, own.head) if is_listed else own
    give_example(model, example)
    chain = chain_for(model)
    assert isinstance(chain, OwnForward) is not is_listed
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    costs = measured_costs(chain, forward=forward_for(example, autocast))
    assert len(costs) == (6 if is_listed else 5)
    assert costs[2] == max(costs) and min(costs) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_every_rank_takes_rank_0_s_times(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        forward = forward_for(torch.empty(2, 4, device="meta"))
        times.measured_costs = lambda *_, **__: [9, 1, 1, 1] if world.rank == 0 else [1, 1, 1, 9]
        mine = agreed_spans(chain_for(model), owners=[0, 1], balance="time", forward=forward, world=world)

        def fail(*_: Any, **__: Any) -> list[int]:
            raise IndexError("no such token")

        times.measured_costs = fail if world.rank == 0 else times.measured_costs
        return mine, agreed_spans(chain_for(model), owners=[0, 1], balance="time", forward=forward, world=world)

    for measured, counted in on_ranks(2, act, scratch=tmp_path):
        assert measured == [range(1), range(1, 4)]
        assert counted == [range(2), range(2, 4)]


def plant(costs: list[int]) -> Callable[[], None]:
    def act() -> None:
        times.measured_costs = lambda *_, **__: costs

    return act


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return finished(*LINE, root=tmp_path_factory.mktemp("one") / "runs")


@pytest.mark.slow
def test_a_run_goes_on_with_another_cut(one: Ended, tmp_path: Path) -> None:
    """Killed with nearly all layers on the second process, it goes on with nearly all on the first, and then by operations."""
    late, early = [100, *[1] * 7], [*[1] * 7, 100]
    line = [*LINE, *CUT, "hydra.verbose=true"]
    for costs, step, stages in ((late, 4, ("0.000101 ms", "6e-06 ms")), (early, 8, ("7e-06 ms", "0.0001 ms"))):
        ended = command(*line, root=tmp_path / "runs", before=together(plant(costs), after_step(step, crash)))
        assert ended.code < 0
        assert "0 (process 0) {}, 1 (process 1) {}".format(*stages) in ended.output
    run = finished(*line, "parallel.balance=operations", root=tmp_path / "runs")
    assert_close(run, one)


def test_the_cut_is_no_part_of_the_identity() -> None:
    ids = {checked(*LINE, *CUT, f"parallel.balance={balance}").run.id for balance in ("time", "operations")}
    assert len(ids) == 1


def test_it_is_refused_where_nothing_is_known_of_the_data() -> None:
    def found(balance: str) -> list[str]:
        return pipeline.problems(model, demands=NOTHING, pipeline=2, schedule="1f1b", balance=balance)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert found("operations") == []
    assert found("time")[0].startswith("balance=time: ")
    give_example(model, torch.empty(2, 2, device="meta"))
    assert found("time") == []


def test_measured_times_are_printed(one: Ended, tmp_path: Path) -> None:
    run = finished(*LINE, *CUT, "hydra.verbose=true", root=tmp_path / "runs")
    assert "pipeline: time of each stage for 8 samples, forward and backward: 0 (process 0) " in run.output
    assert_close(run, one)
