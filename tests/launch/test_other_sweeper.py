"""A sweeper of Hydra that nobody here wrote draws the jobs, and the same command continues it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig

from framework.sweep.other_sweeper import Asked
from tests.harness import assert_same_bits, before_each, finished
from tests.launch.test_sweep import job, no_process, swept, table
from tests.test_resume import RUN, after_step, preempt

CLIMB = "hydra.sweeper={_target_:tests.launch.test_other_sweeper.Climb,key:optimizer.lr,rounds:2}"
LINE = [*RUN, "trainer.max_epochs=2", "checkpoint.every=2", "optimizer.lr=interval(0.001,0.1)", CLIMB]


class Climb(Sweeper):
    """Tries two values around the best one so far, as Hydra's documentation has a sweeper written."""

    def __init__(self, key: str, rounds: int) -> None:
        self.key, self.rounds = key, rounds

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        assert config.hydra.sweeper.key == self.key
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        parsed = OverridesParser.create().parse_overrides(arguments)
        (swept,) = (override for override in parsed if override.is_sweep_override())
        fixed = [override.input_line for override in parsed if override is not swept]
        best, width, tried = (swept.value().start * swept.value().end) ** 0.5, 4.0, 0
        for _ in range(self.rounds):
            values = [round(best / width, 6), round(best * width, 6)]
            returns = self.launcher.launch([[*fixed, f"{self.key}={value}"] for value in values], initial_job_idx=tried)
            losses = [answer.return_value for answer in returns]
            best, width, tried = values[losses.index(min(losses))], width / 2, tried + 2


def kill_in_the_second_round() -> None:
    """Kill the command, and so its job, after five steps of the third job."""

    def kill() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    before_each(Asked, "launch", lambda asked, *_, **__: after_step(5, kill)() if asked.rows() else None)


def test_its_jobs_depend_on_the_answers_and_a_killed_sweep_continues(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    killed = swept(*LINE, root=root, before=kill_in_the_second_round)
    assert killed.code == -signal.SIGKILL
    states = swept(*LINE, "mode=plan", root=root)
    assert [line.split()[1] for line in states.output.splitlines()] == ["finished", "finished", "killed", "missing"]
    ended = swept(*LINE, root=root)
    assert ended.code == 0 and ended.output.count("finished already") == 2, ended.output
    rows = table(ended)
    tried, losses = ([float(row[name]) for row in rows] for name in ("optimizer.lr", "objective"))
    best = tried[losses[:2].index(min(losses[:2]))]
    assert tried == pytest.approx([0.0025, 0.04, best / 2, best * 2])
    assert [job(ended, row).summary["restarts"] for row in rows] == [0, 0, 1, 0]
    own = finished(*LINE[:-2], f"optimizer.lr={rows[2]['optimizer.lr']}", root=tmp_path / "own")
    assert own.directory.name == rows[2]["id"]
    assert_same_bits(job(ended, rows[2]), own)
    assert swept(*LINE, root=root, before=no_process).code == 0


@pytest.mark.slow
def test_an_interrupted_job_ends_the_sweep_and_not_as_a_failure(tmp_path: Path) -> None:
    stopped = swept(*LINE, root=tmp_path / "runs", before=after_step(5, preempt))
    assert stopped.code == 75 and "stopped; the same command continues" in stopped.output, stopped.output
    ended = swept(*LINE, root=tmp_path / "runs")
    assert ended.code == 0 and [job(ended, row).summary["restarts"] for row in table(ended)] == [1, 1, 0, 0]


@pytest.mark.slow
def test_a_sweeper_that_ends_at_a_failed_job_ends_with_its_code(tmp_path: Path) -> None:
    line = [*LINE[:-2], "optimizer=sgd", "optimizer.lr=interval(1e29,1e31)", CLIMB]
    ended = swept(*line, root=tmp_path / "runs")
    assert ended.code == 70 and "2 of 2 jobs failed:" in ended.output and "not finite" in ended.output, ended.output


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("tests.launch.test_other_sweeper.Climber", "hydra.sweeper._target_: "),
        ("torch.nn.Linear", "hydra.sweeper"),
        ("hydra_plugins.hydra_ax_sweeper.ax_sweeper.AxSweeper", "hydra.sweeper._target_: "),
    ],
)
def test_what_is_no_sweeper_is_refused(target: str, said: str, tmp_path: Path) -> None:
    ended = swept(*LINE[:-1], f"hydra.sweeper._target_={target}", root=tmp_path / "runs")
    assert ended.code == 78 and said in ended.output, ended.output
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_sweeper_that_fails_is_told(tmp_path: Path) -> None:
    ended = swept(*LINE, "hydra.sweeper.key=optimizer.beta", root=tmp_path / "runs", before=no_process)
    assert ended.code == 1 and "hydra/sweeper draws a job with a problem" in ended.output, ended.output
    ended = swept(*LINE[:-2], CLIMB, root=tmp_path / "runs", before=no_process)
    assert ended.code == 1 and "hydra/sweeper: ValueError: not enough values to unpack" in ended.output, ended.output
