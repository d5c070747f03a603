"""A search draws in the parent, goes on after trials that diverge, stops bad ones, and continues when it was killed."""

import ast
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from framework.runtime.preemption import PREEMPTION
from framework.sweep.search import Watched
from framework.training.loop import Trainer
from tests.harness import Ended, after_each, assert_same_bits, finished, wait_for
from tests.launch.test_sweep import SHORT, TWO_AT_A_TIME, job, no_process, swept, table
from tests.test_resume import RUN, after_step, crash

ROOT = Path(__file__).resolve().parents[2]
# 14 steps, evaluated after every fifth and the last
SEARCH = [*RUN, "trainer.max_epochs=2", "checkpoint.every=null", "hydra/sweeper=optuna", "hydra/sweeper/pruner=none"]
SPACE = ["optimizer.lr=tag(log,interval(1e-5,1e-1))", "model.dropout=0,0.1"]
DRAWN = ("optimizer.lr", "model.dropout")


def trials(n: int) -> str:
    return f"hydra.sweeper.n_trials={n}"


def drawn(rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
    return [tuple(row[key] for key in DRAWN) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """A search of four trials that nothing disturbs."""
    ended = swept(*SEARCH, *SPACE, trials(4), root=tmp_path_factory.mktemp("whole") / "runs")
    assert ended.code == 0, ended.output
    return table(ended)


@pytest.mark.slow
def test_a_trial_is_a_run_and_its_objective_is_the_monitor(whole: list[dict[str, str]], tmp_path: Path) -> None:
    assert len(set(drawn(whole))) == 4
    assert {row["state"] for row in whole} == {"finished"}
    row = whole[1]
    assert 1e-5 <= float(row["optimizer.lr"]) <= 1e-1 and row["model.dropout"] in ("0", "0.1")
    own = finished(*SEARCH[:-2], *(f"{key}={row[key]}" for key in DRAWN), root=tmp_path / "own")
    assert own.directory.name == row["id"]
    assert float(row["objective"]) == min(r["loss"] for r in own.rows if r["split"] == "val")


@pytest.mark.slow
def test_the_same_search_draws_the_same_and_a_longer_one_continues_it(whole: list[dict[str, str]], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    first = swept(*SEARCH, *SPACE, trials(2), root=root)
    assert drawn(table(first)) == drawn(whole)[:2]
    longer = swept(*SEARCH, *SPACE, trials(3), root=root)
    assert drawn(table(longer)) == drawn(whole)[:3]
    assert longer.output.count("running ") == 1
    assert swept(*SEARCH, *SPACE, trials(3), root=root, before=no_process).code == 0
    plan = swept(*SEARCH, *SPACE, trials(4), "mode=plan", root=root)
    assert [line.split()[1] for line in plan.output.splitlines()[:-1]] == ["finished"] * 3
    assert plan.output.splitlines()[-1] == "1 of 4 trials are still to be drawn"


def kill_the_command() -> None:
    """Kill the command of a trial. The trial dies with it, and takes no step until it does."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def killed_in_trial(number: int) -> Callable[[], None]:
    """Return what kills the search, and so everything, at the ninth step of one of its trials."""

    def kill(watched: Watched, *_: object, **__: object) -> None:
        if watched.trial.number == number:
            after_step(9, kill_the_command)()

    return lambda: after_each(Watched, "__init__", kill)


@pytest.mark.slow  # what it draws is in test_study.py
def test_a_search_that_was_killed_goes_on_with_the_trial_it_was_in(whole: list[dict[str, str]], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    line = [*SEARCH, *SPACE, trials(4), "checkpoint.every=4"]
    killed = swept(*line, root=root, before=killed_in_trial(1))
    assert killed.code == -signal.SIGKILL
    ended = swept(*line, root=root)
    assert ended.code == 0 and ended.output.count("running ") == 3
    rows = table(ended)
    assert drawn(rows) == drawn(whole)
    assert [job(ended, row).summary["restarts"] for row in rows] == [0, 1, 0, 0]
    assert_same_bits(job(ended, rows[1]), job(ended, whole[1]))


@pytest.mark.slow
def test_a_trial_that_diverges_is_recorded_as_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    random = ["hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=3"]
    line = [*SEARCH, *random, "optimizer=sgd", trials(4), "optimizer.lr=1e-3,1e30"]
    ended = swept(*line, root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    rows = table(ended)
    assert {(row["optimizer.lr"], row["state"]) for row in rows} == {("0.001", "finished"), ("1e+30", "failed")}
    assert all("not finite" in row["error"] for row in rows if row["state"] == "failed")
    again = swept(*line, root=tmp_path / "runs", before=no_process)  # a failure is a result
    assert again.code == 0 and again.output.count("running ") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "end", "code", "error"), [("1e30", None, 70, "not finite"), ("1e-3", crash, 137, "killed, without a message")]
)
def test_a_search_whose_trials_all_fail_fails_also_when_nothing_is_left_to_run(
    lr: str, end: Callable[[], None] | None, code: int, error: str, tmp_path: Path
) -> None:
    line = [*SEARCH, "optimizer=sgd", trials(1), f"optimizer.lr=choice({lr})"]
    before = after_step(3, end) if end is not None else None
    ended = swept(*line, root=tmp_path / "runs", before=before)
    again = swept(*line, root=tmp_path / "runs", before=no_process)
    assert (ended.code, again.code) == (code, 1), again.output
    assert [row["state"] for row in table(again)] == ["failed"] and error in table(again)[0]["error"]
    assert re.search(f"  optimizer.lr=.+: .*{error}", again.output), again.output


@pytest.mark.quick(1)
@pytest.mark.parametrize("launcher", [TWO_AT_A_TIME, []], ids=["two at a time", "one"])
def test_the_trials_of_a_batch_are_drawn_before_any_runs_and_the_same_run_is_run_once(
    launcher: list[str], tmp_path: Path
) -> None:
    line = [*SHORT, "hydra/sweeper=optuna", *launcher, "hydra.sweeper.n_jobs=3", "seed=choice(1)", trials(4)]
    ended = swept(*line, root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    assert [row["state"] for row in table(ended)] == ["finished"] * 4
    assert (ended.output.count("running "), ended.output.count("finished already")) == (1, 3)


def watched_at_every_evaluation(folder: Path) -> Callable[[], None]:
    """Return what has a run wait after each evaluation until the search has seen it; and, if hopeless, for the signal."""
    folder.mkdir()

    def plant() -> None:
        is_hopeless, evaluate = Watched.is_hopeless, Trainer.evaluate

        def told(self: Watched) -> bool:
            answer = is_hopeless(self)
            (folder / f"{self._path.parent.name}_{self.step}_{answer}").touch()
            return answer

        def evaluated(self: Trainer, split: str, **options: bool) -> None:
            evaluate(self, split, **options)
            name = f"{self.recorder.directory.path.name}_{self.progress.step}"
            if split == "val" and not self.is_over:
                wait_for(lambda: bool(list(folder.glob(f"{name}_*"))), what="a look at it")
                if (folder / f"{name}_True").exists():
                    wait_for(lambda: PREEMPTION.requested, what="a signal to stop")

        Watched.is_hopeless, Trainer.evaluate = told, evaluated

    return plant


def losses(run: Ended) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.rows if row["split"] == "val"}


@pytest.mark.slow
def test_a_trial_that_is_worse_than_the_others_is_stopped(tmp_path: Path) -> None:
    line = [*SEARCH[:-1], *SPACE, trials(8), "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1"]
    ended = swept(*line, root=tmp_path / "runs", before=watched_at_every_evaluation(tmp_path / "seen"))
    assert ended.code == 0, ended.output
    rows = table(ended)
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned and {row["state"] for row in rows[:5]} == {"finished"}  # five show what is to be expected
    for row in pruned:
        assert int(row["step"]) < 14
        step = max(r["step"] for r in job(ended, row).rows if r["split"] == "val")
        others = [losses(job(ended, other)) for other in rows[: rows.index(row)] if other["state"] == "finished"]
        own = losses(job(ended, row))
        assert min(own[at] for at in own if at <= step) > median(other[step] for other in others)
        assert f"pruned, at step {step}: optimizer.lr={row['optimizer.lr']}" in ended.output
    plan = swept(*line, "mode=plan", root=tmp_path / "runs")
    assert [text.split()[1] for text in plan.output.splitlines()[:-1]] == [row["state"] for row in rows]
    told = swept(*line, "mode=status", root=tmp_path / "runs").output
    assert f"{len(pruned)} pruned" in told and told.count(" pruned") == len(pruned) + 1, told


@pytest.mark.slow
def test_what_is_drawn_and_stopped_does_not_depend_on_how_fast_the_search_looks(tmp_path: Path) -> None:
    line = [*SEARCH[:-1], *SPACE, trials(20)]
    slow = swept(*line, root=tmp_path / "slow", before=watched_at_every_evaluation(tmp_path / "seen"))
    fast = swept(*line, root=tmp_path / "fast")
    assert [(drawn([row]), row["state"]) for row in table(fast)] == [(drawn([row]), row["state"]) for row in table(slow)]
    assert "pruned" in [row["state"] for row in table(fast)]


def test_optuna_is_in_the_parent_alone() -> None:
    users = {str(path.relative_to(ROOT)) for path in (ROOT / "framework").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, (ast.Import, ast.ImportFrom)) and "optuna" in ast.unparse(node)}  # fmt: skip
    assert users == {f"framework/sweep/{name}.py" for name in ("search", "space")}


@pytest.mark.slow
def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    line = [*SHORT, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "optimizer.lr=interval(0.01, 0.02)"]
    first = swept(*line, root=tmp_path / "runs")
    assert first.code == 0, first.output
    (database,) = first.root.glob("sweeps/*/search.db")
    database.write_text("no database" * 1000)
    for mode in ([], ["mode=status"], ["mode=plan"]):
        told = swept(*line, *mode, root=tmp_path / "runs")
        assert told.code == 74 and f"{database} cannot be used" in told.output and len(told.output.splitlines()) == 1, (
            told.output
        )
