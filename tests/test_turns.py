"""Turns: sets of parameters, each with its own optimizer, under every strategy what one process computes."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from extras.parts.loss_spikes import LossSpikes
from framework.build import components
from framework.data.order import Order
from framework.engine.sums import means, over_turns
from framework.randomness import key
from framework.runtime.exits import Diverged
from tests import test_any_training
from tests.harness import Says, assert_close, assert_computes_or_is_refused, checked, finished, once, refused
from tests.test_conformance import RUN, SMALL, name
from tests.test_evaluate import evaluated, measured
from tests.test_resume import assert_survives_a_kill, killed_and_continued
from tests.trainings import Gan

STRATEGIES = sorted(test_any_training.STRATEGIES, key=lambda strategy: strategy[0] != "fsdp")
IDS = [name(*strategy) for strategy in STRATEGIES]
TURNS = ("optimizer.turns={critic: {match: critic.*, lr: 0.02, clip_grad_norm: 0.5}, generator: {match: [generator.*], every: 2, "
         "optimizer: 1, _target_: torch.optim.RMSprop, lr: 0.01, scheduler: {_target_: framework.optim.schedules.constant, warmup_steps: 0}}}")  # fmt: skip
TURNS = TURNS.replace("optimizer: 1, ", "")
GAN = [*RUN, *SMALL, "model._target_=tests.trainings.Gan", "task._target_=tests.trainings.Adversarial", TURNS, "trainer.max_steps=6",
       "trainer.clip_grad_norm=null", "checkpoint.every=2"]  # fmt: skip
REFUSED = {
    **dict.fromkeys(("pipeline", "ddp+pp", "pp+fsdp+tp", "context", "fsdp+context"), "the task has its own step"),
    "parameter-server": "several optimizers",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "ranks", "mesh"), STRATEGIES, ids=IDS)
def test_it_computes_what_one_process_does_or_is_refused(
    strategy: str, ranks: int, mesh: list[str], tmp_path: Path
) -> None:  # fmt: skip
    words = [f"parallel={strategy}", *mesh, f"launch.nproc_per_node={ranks}"]
    assert_computes_or_is_refused(GAN, words, REFUSED.get(strategy), root=tmp_path / "runs")


@pytest.mark.slow
def test_killed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    line = [*GAN, "parallel=fsdp", "launch.nproc_per_node=2", "rehearse=true"]
    assert_survives_a_kill(*line, at=5, root=tmp_path)


def test_the_rate_of_a_row_is_that_of_the_first_turn(tmp_path: Path) -> None:
    schedule = "scheduler: {_target_: framework.optim.schedules.constant, warmup_steps: 0}"
    turns = TURNS.replace("critic: {match: critic.*,", f"critic: {{match: critic.*, {schedule},")
    ended = finished(*(turns if word == TURNS else word for word in GAN), "trainer.log_every=1", root=tmp_path / "runs")
    assert [row["lr"] for row in ended.rows if row["split"] == "train"] == [0.02] * 6


def test_it_is_the_loop_that_one_would_write(tmp_path: Path) -> None:
    line = [*GAN, "micro_batch_size=null", "scheduler=constant", "scheduler.warmup_steps=0", "optimizer=adam"]
    ended = finished(*line, root=tmp_path / "runs")
    config = checked(*line)
    dataset, model = components.dataset(config.dataset), components.model(config.model, seed=0).double()
    assert isinstance(model, Gan)
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=14, seed=0, drop_last=False)
    critic = torch.optim.Adam(
        model.critic.parameters(), lr=0.02, betas=tuple(config.optimizer["betas"]), eps=config.optimizer["eps"]
    )
    generator = torch.optim.RMSprop(model.generator.parameters(), lr=0.01)
    seen, losses = 0, []
    for step in range(6):
        inputs, targets = (torch.from_numpy(array) for array in source.gather(order.batch(seen)[1]))
        inputs = dataset.transform(inputs, targets, keys=None)[0].double()
        seen += len(inputs)

        def noise(turn: str, step: int = step, size: int = len(inputs)) -> torch.Tensor:
            drawn = torch.Generator().manual_seed(key(0, "step", step, 0, "turn", turn))
            return torch.randn(size, 8, generator=drawn, dtype=torch.float64)

        model.zero_grad()
        fake = model(noise("critic"), "generate").detach()
        loss = (F.softplus(-model(inputs, "judge")) + F.softplus(model(fake, "judge"))).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.critic.parameters(), 0.5)
        critic.step()
        losses.append({"critic_loss": loss.item()})
        if step % 2:
            model.zero_grad()
            loss = F.softplus(-model(model(noise("generator"), "generate"), "judge")).mean()
            loss.backward()
            generator.step()
            losses[-1]["generator_loss"] = loss.item()
    rows = [row for row in ended.rows if row["split"] == "train"]
    for row, expected in zip(rows, losses, strict=True):
        assert {name: row[name] for name in ("critic_loss", "generator_loss") if name in row} == pytest.approx(
            expected, rel=1e-10
        )
        assert row["loss"] == pytest.approx(sum(expected.values()), rel=1e-10)
    with safe_open(ended.directory / "model.safetensors", framework="pt") as final:
        for own, parameter in model.named_parameters():
            assert (final.get_tensor(own) - parameter).abs().max() < 1e-12, own


@pytest.mark.slow
def test_gradients_computed_again_are_those_of_the_turn_alone(tmp_path: Path) -> None:
    at_the_same_point = ["part=sharpness", "part.sharpness.radius=1e-12"]
    again = finished(*GAN, *at_the_same_point, root=tmp_path / "again")
    assert_close(again, finished(*GAN, root=tmp_path / "once"), tolerance=1e-9)


@pytest.mark.slow
def test_the_turns_of_a_step_can_draw_the_same_noise(tmp_path: Path) -> None:
    line = [word.replace("Adversarial", "Adversaries").replace("every: 2", "every: 1") for word in GAN]
    alone = once(*line)
    pairs = [[row[f"seen_by_{turn}"] for turn in ("critic", "generator")] for row in alone.rows if row["split"] == "train"]
    assert all(critic == generator for critic, generator in pairs) and len({critic for critic, _ in pairs}) == len(pairs) == 6
    many = [*line, "parallel=ddp", "launch.nproc_per_node=2"]
    assert_close(killed_and_continued(*many, at=5, root=tmp_path / "runs"), alone)


def test_a_row_has_the_gradients_of_every_turn(tmp_path: Path) -> None:
    line = [*GAN, "part=[gradient_norms,histograms]", "part.histograms.every=1", "part.histograms.parameters=['*']"]
    ended = finished(*line, root=tmp_path / "runs")
    row = next(row for row in ended.rows if row["step"] == 2)  # the generator's turn comes every second step
    norms = [row["grad_norm:critic"], row["grad_norm:generator"]]
    assert math.hypot(*norms) == pytest.approx(row["grad_norm"], rel=1e-12) and min(norms) > 0
    kinds = {
        kind: {key.split(":")[1] for key in row if key.startswith(f"{kind}_histogram:")} for kind in ("weight", "gradient")
    }
    assert kinds["weight"] == kinds["gradient"] == set(ended.weights)


def test_a_spike_is_one_among_the_losses_of_its_own_turn() -> None:
    def step(part: LossSpikes, number: int, **losses: float) -> None:
        for turn, loss in losses.items():
            loop: Any = SimpleNamespace(step=number, turn=turn, loss=lambda loss=loss: loss)
            part.gradients_ready(loop)
        part.step_taken(loop)

    part = LossSpikes(factor=2, window=2)
    for number in range(4):
        step(part, number, small=1.0, large=10.0)
    again = LossSpikes(factor=2, window=2)
    again.load_state_dict(part.state_dict())
    with pytest.raises(Diverged, match="is 2.5, the median of 2 is 1"):
        step(again, 5, small=2.5, large=10.0)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["optimizer.turns.critic.match=critique.*"], "optimizer.turns.critic.match: critique.* matches no parameter that is trained ..."),
        (["optimizer.turns.critic.match=critic.0.*"], "optimizer.turns: no turn has critic.2.weight (name it in a turn, ..."),
        (["optimizer.turns.critic.match='*'"], "optimizer.turns: critic and generator have generator.0.weight (one of them)"),
        (["optimizer.turns.critic.every=3"], "optimizer.turns: some steps would have no turn (every: 1 for one)"),
        (["part=lr_range", "rehearse=true"], "optimizer.turns: gives each step several losses ..."),
        (["precision=fp16"], "precision: fp16, but its loss scale needs whole steps, and optimizer.turns divides them ..."),
        (["trainer.divergence.action=skip"], "trainer.divergence.action: skip, but a step of several turns ..."),
        (
            ["parallel=local-sgd", "launch.nproc_per_node=2", "trainer.eval_every=null", "checkpoint.every=null"],
            "optimizer.turns: ... several optimizers ...",
        ),
    ],
)  # fmt: skip
def test_wrong_turns_are_refused_before_the_start(line: list[str], said: str) -> None:
    assert refused(*GAN, *line).splitlines()[-1] == Says(said)


@pytest.mark.slow
def test_it_is_evaluated_afterwards_as_in_training(tmp_path: Path) -> None:
    run = finished(*GAN, root=tmp_path / "runs")
    row = evaluated(run.directory, "eval.split=test", "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "none")
    expected = measured(run, step=6, split="test")
    numbers = {column: value for column, value in expected.items() if isinstance(value, float)}
    assert "loss" in numbers
    for column, value in numbers.items():
        assert abs(row[column] - value) <= 1e-10 * max(1.0, abs(value)), (column, row, expected)


def test_a_metric_of_two_turns_is_the_last_ones_by_its_own_weight_and_losses_are_added() -> None:
    critic = {
        "loss": torch.tensor(3.0), "gap": torch.tensor(4.0), "weight of gap": torch.tensor(16.0), "real": torch.tensor(8.0),
    }  # fmt: skip
    generator = {"loss": torch.tensor(1.0), "gap": torch.tensor(4.0)}
    assert means(over_turns(critic, generator), num_samples=4) == {"loss": 1.0, "gap": 1.0, "real": 2.0}
