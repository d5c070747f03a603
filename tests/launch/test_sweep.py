"""A sweep is its runs: one after the other or several at a time, killed and continued, with its table."""

import csv
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from optuna.distributions import FloatDistribution, IntDistribution

from framework.build.training import Builder
from framework.preflight import rehearsal
from framework.runtime.lock import Lock
from framework.runtime.preemption import PREEMPTION
from framework.sweep import pools
from framework.sweep.jobs import Job, exit_code
from framework.sweep.line import read
from framework.sweep.pools import Pool
from framework.sweep.space import combinations
from framework.sweep.sweep import sweep
from tests.harness import Ended, Says, assert_same_bits, before_each, begin, checked, command, end, finished, wait_for
from tests.test_resume import RUN, after_step, preempted

REPOSITORY = Path(__file__).resolve().parents[2]
DDP = ["parallel=ddp", "launch.nproc_per_node=2"]
SHORT = [*RUN, "trainer.max_epochs=null", "trainer.max_steps=2", "checkpoint.every=null"]
TWO_AT_A_TIME = ["hydra.launcher.n_jobs=2"]


def multirun(line: list[str]) -> int:
    return sweep(line, [])


def swept(*line: str, root: Path, **options: Any) -> Ended:
    return command(*line, root=root, run=multirun, **options)


def table(ended: Ended) -> list[dict[str, str]]:
    (path,) = ended.root.glob("sweeps/*/sweep.csv")
    with open(path) as file:
        return list(csv.DictReader(file))


def job(ended: Ended, row: dict[str, str]) -> Ended:
    """One job's run, as if it had been a command of its own."""
    return Ended(0, ended.output, Path(row["directory"]))


# --- one after the other


def alone() -> None:
    """Refuse to start a job while a process of another is left."""

    def look(*_: Any, **__: Any) -> None:
        left = psutil.Process().children(recursive=True)
        assert not left, left

    before_each(Pool, "_started", look)


@pytest.mark.slow
def test_a_job_is_the_run_that_its_own_command_is_and_its_workers_end_before_the_next(tmp_path: Path) -> None:
    ended = swept(*RUN, *DDP, "optimizer.lr=1e-3,1e-2", root=tmp_path / "runs", before=alone)
    assert ended.code == 0, ended.output
    rows = table(ended)
    assert [(row["optimizer.lr"], row["state"]) for row in rows] == [("0.001", "finished"), ("0.01", "finished")]
    for row in rows:
        own = finished(*RUN, *DDP, f"optimizer.lr={row['optimizer.lr']}", root=tmp_path / row["optimizer.lr"])
        assert own.directory.name == row["id"]
        assert_same_bits(job(ended, row), own)


def no_process() -> None:
    before_each(Pool, "_started", lambda _, job, *__, **___: pytest.fail(f"{job} was started"))


@pytest.mark.slow
def test_the_same_command_again_runs_what_is_missing(tmp_path: Path) -> None:
    line = [*SHORT, "model.dropout=0.1,0.2,0.3"]
    root = tmp_path / "runs"
    assert finished(*SHORT, "model.dropout=0.2", root=root).code == 0
    before = json.loads(next(root.glob("*/*/summary.json")).read_text())
    ended = swept(*line, root=root)
    assert ended.code == 0 and ended.output.count("finished already: model.dropout=0.2, in ") == 1
    assert [row["state"] for row in table(ended)] == ["finished"] * 3
    assert before in [json.loads(path.read_text()) for path in root.glob("*/*/summary.json")]
    again = swept(*line, root=root, before=no_process)
    assert again.code == 0 and again.output.count("finished already") == 3, again.output


@pytest.mark.slow
def test_a_job_that_fails_does_not_stop_the_others_and_is_named_at_the_end(tmp_path: Path) -> None:
    line = [*RUN, "optimizer=sgd", "optimizer.lr=1e-3,1e30,1e-2"]
    ended = swept(*line, root=tmp_path / "runs")
    assert ended.code == 70
    rows = table(ended)
    assert [row["state"] for row in rows] == ["finished", "failed", "finished"]
    first, second = ended.output.splitlines()[-2:]
    assert first == "1 of 3 jobs failed:" and second.startswith("  exit 70: optimizer.lr=1e+30: the ")
    assert "not finite" in rows[1]["error"]
    again = swept(*line, root=tmp_path / "runs")
    assert again.code == 70 and again.output.count("finished already") == 2


@pytest.mark.slow
def test_the_table_tells_what_the_runs_tell(tmp_path: Path) -> None:
    ended = swept(
        *RUN,
        "checkpoint.monitor=val/accuracy",
        "checkpoint.mode=max",
        "seed=0,1",
        "model.dropout=0,0.1",
        root=tmp_path / "runs",
    )
    rows = table(ended)
    assert list(rows[0])[:5] == ["id", "directory", "state", "seed", "model.dropout"]
    assert [(row["seed"], row["model.dropout"]) for row in rows] == [("0", "0"), ("0", "0.1"), ("1", "0"), ("1", "0.1")]
    for row in rows:
        run = job(ended, row)
        evaluations = [r["accuracy"] for r in run.rows if r["split"] == "val"]
        assert float(row["objective"]) == max(evaluations)
        assert float(row["val/accuracy"]) == evaluations[-1]
        assert (row["id"], row["step"]) == (run.directory.name, "21")
        assert float(row["seconds"]) == run.summary["wall_s"]
    best = max(rows, key=lambda row: float(row["objective"]))
    assert f": seed={best['seed']} model.dropout={best['model.dropout']}, in {best['directory']}" in ended.output


# --- interrupted


@pytest.mark.slow
def test_a_preempted_sweep_is_continued_by_its_command(tmp_path: Path) -> None:
    line = [*RUN, "seed=1,2,3"]
    ended = swept(*line, root=tmp_path / "runs", before=in_second_job(lambda: os.kill(os.getppid(), signal.SIGTERM)))
    assert ended.code == 75, ended.output
    assert [row["state"] for row in table(ended)] == ["finished", "preempted", "missing"]
    ended = swept(*line, root=tmp_path / "runs")
    assert ended.code == 0 and ended.output.count("finished already") == 1
    interrupted = table(ended)[1]
    assert_same_bits(job(ended, interrupted), finished(*RUN, "seed=2", root=tmp_path / "alone"))


def in_second_job(act: Callable[[], None]) -> Callable[[], None]:
    """Return what makes the second job that is started `act` after step 9."""

    count = itertools.count(1)
    return lambda: before_each(Pool, "_started", lambda *_, **__: after_step(9, act)() if next(count) == 2 else None)


def held_at(step: int, folder: Path) -> Callable[[], None]:
    """Return what has every rank say its process's id after that step, and then wait for a signal."""
    folder.mkdir()

    def hold() -> None:
        (folder / str(os.getpid())).touch()
        wait_for(lambda: PREEMPTION.requested, what="a signal")

    return after_step(step, hold)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_of_a_sweep_that_is_killed_no_process_is_left_and_its_command_continues_it(tmp_path: Path) -> None:
    line, root, folder = [*RUN, *DDP, *TWO_AT_A_TIME, "seed=1,2,3"], tmp_path / "runs", tmp_path / "held"
    process = begin(*line, root=root, run=multirun, before=held_at(6, folder))
    wait_for(lambda: len(list(folder.iterdir())) == 4, what="two jobs of two ranks at a time")
    left = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert {int(path.name) for path in folder.iterdir()} <= set(left)
    process.kill()
    wait_for(lambda: all(is_gone(pid) for pid in left), what="no process left")
    killed = Ended(end(process, root=root).code, "", root)
    assert [row["state"] for row in table(killed)] == ["missing"] * 3  # as it was when the sweep began
    plan = swept(*line, "mode=plan", root=root)
    assert [row.split()[1] for row in plan.output.splitlines()] == ["killed", "killed", "missing"]
    ended = swept(*line, root=root)
    assert ended.code == 0, ended.output
    assert [job(ended, row).summary["restarts"] for row in table(ended)] == [1, 1, 0]


@pytest.mark.slow
def test_ctrl_c_ends_all_jobs_of_a_sweep_with_a_checkpoint(tmp_path: Path) -> None:
    line, root, folder = [*RUN, *TWO_AT_A_TIME, "seed=1,2,3"], tmp_path / "runs", tmp_path / "held"
    process = begin(*line, root=root, run=multirun, before=held_at(6, folder))
    wait_for(lambda: len(list(folder.iterdir())) == 2, what="two jobs at a time")
    os.killpg(process.pid, signal.SIGINT)  # to the whole foreground group
    ended = end(process, root=root)
    assert ended.code == 75, ended.output
    assert [(row["state"], row["step"]) for row in table(ended)] == [("preempted", "6"), ("preempted", "6"), ("missing", "")]
    ended = swept(*line, root=root)
    for row in table(ended)[:1]:
        assert_same_bits(job(ended, row), finished(*RUN, f"seed={row['seed']}", root=tmp_path / "alone"))


def test_jobs_at_a_time_share_the_cpus(tmp_path: Path) -> None:
    folder, cpus = tmp_path / "cpus", os.sched_getaffinity(0)
    folder.mkdir()

    def note() -> None:
        share = os.sched_getaffinity(0)
        assert torch.get_num_threads() <= len(share)
        (folder / str(os.getpid())).write_text(" ".join(map(str, share)))
        wait_for(lambda: len(list(folder.iterdir())) == 2, what="two jobs at a time")

    ended = swept(*SHORT, *TWO_AT_A_TIME, "seed=1,2", root=tmp_path / "runs", before=after_step(1, note))
    assert ended.code == 0, ended.output
    one, other = ({int(cpu) for cpu in path.read_text().split()} for path in folder.iterdir())
    assert one | other == cpus and (not one & other or len(cpus) == 1)
    assert "training" not in ended.output and all("training" in path.read_text() for path in ended.root.glob("sweeps/*/logs/*"))


@pytest.mark.slow
def test_jobs_at_a_time_share_the_gpus(tmp_path: Path) -> None:
    """The sweep sees GPUs; the jobs, which only note what they would see, compute on the CPU."""
    folder = tmp_path / "devices"
    folder.mkdir()

    def enter() -> None:
        pools._devices = lambda: ["3", "5", "GPU-7"]
        after_step(1, lambda: (folder / str(os.getpid())).write_text(os.environ["CUDA_VISIBLE_DEVICES"]))()

    for n_jobs, expected in ((2, ["3,GPU-7", "5"]), (-1, ["3", "5", "GPU-7"])):
        ended = swept(
            *SHORT, f"hydra.launcher.n_jobs={n_jobs}", "seed=1,2,3", f"name=j{n_jobs}", root=tmp_path / "runs", before=enter
        )
        assert ended.code == 0, ended.output
        assert sorted({path.read_text() for path in folder.iterdir()}) == expected
        for path in folder.iterdir():
            path.unlink()


# --- the plan


@pytest.mark.slow
def test_the_plan_lists_the_jobs_with_their_states_and_runs_nothing(tmp_path: Path) -> None:
    line, root = [*RUN, "optimizer=sgd", "optimizer.lr=1e-3,1e-2,1e-1,1,1e30"], tmp_path / "runs"
    preempted(*RUN, "optimizer=sgd", "optimizer.lr=1e-2", at=9, root=root)
    for lr in ("1e-3", "1e30"):
        command(*RUN, "optimizer=sgd", f"optimizer.lr={lr}", root=root)
    before = sorted(root.rglob("*"))
    plan = swept(*line, "mode=plan", root=root)
    assert (plan.code, sorted(root.rglob("*"))) == (0, before)
    found = [listed.split() for listed in plan.output.splitlines()]
    assert [(state, assignment) for _, state, assignment, *_ in found] == [
        ("finished", "optimizer.lr=0.001"), ("preempted", "optimizer.lr=0.01"), ("missing", "optimizer.lr=0.1"),
        ("missing", "optimizer.lr=1"), ("failed", "optimizer.lr=1e+30"),
    ]  # fmt: skip
    assert "is not finite" in plan.output.splitlines()[-1]
    lock = Lock(root / "default" / found[2][0])
    lock.take()
    assert swept(*line, "mode=plan", root=root).output.splitlines()[2].split()[1] == "running"
    lock.release()


def test_the_plan_of_one_run_is_its_state(tmp_path: Path) -> None:
    plan = command("mode=plan", "seed=7", root=tmp_path / "runs")
    assert plan.code == 0 and plan.output.split()[1:] == ["missing", "mode=plan", "seed=7", f"run.root={tmp_path}/runs"]
    assert not list((tmp_path / "runs").iterdir())


# --- what is refused, and what is the same


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("seed=1,2 hydra/launcher=joblib", "hydra/launcher: joblib is not installed ... hydra.launcher.n_jobs=N ... hydra-joblib-launcher"),
        ("seed=1,2 hydra.launcher.njobs=2", "hydra.launcher.njobs: unknown ... mean hydra.launcher.n_jobs"),
        ("seed=1,2 hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs: 0 is out of range (at least 1"),
        ("seed=1,2 hydra/launcher=bsic", "hydra/launcher: no option 'bsic' ... mean basic?"),
        ("model=mlp,cnn model.dim@mlp=8,16", "model.dim@mlp: unknown group"),
        ("seed=1,2 hydra.run.dir=x", "hydra.run.dir: ... Hydra ... nothing ... run.root ... run.dir"),
        ("optimizer.lr=interval(1,2)", "optimizer.lr: ... hydra/sweeper=optuna"),
        ("optimizer.lr=interval(-1,1) hydra/sweeper=optuna", "optimizer.lr: -1.0 is out of range (above 0)"),
        ("seed=1 hydra/sweeper=optuna", "hydra/sweeper: ... nothing ... search"),
        ("seed=range(3,3)", "seed: no value is left to run (as in "),
        ("seed=1,2 hydra/launcher=basic,mine", "hydra/launcher: cannot be swept"),
        ("mode=train,plan", "mode: cannot be swept (one value for all jobs)"),
        ("global_batch_size=16,4 micro_batch_size=2,8", "micro_batch_size: 8 ... global_batch_size=4 ... 4"),
        ("seed=1,2 run.dir=there", "run.dir: ... several ... seed=1 seed=2 run.root"),
    ],
)  # fmt: skip
def test_a_sweep_with_a_mistake_starts_nothing(line: str, problem: str, tmp_path: Path) -> None:
    refused = swept(*line.split(), root=tmp_path / "runs")
    assert refused.code == 78
    assert refused.output == Says(problem), refused.output
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_strategies_are_one_run_and_with_the_name_of_each_several(tmp_path: Path) -> None:
    line = [*SHORT, "parallel=single,dp"]
    ended = swept(*line, root=tmp_path / "one")
    assert ended.code == 0 and "1 of these 2 jobs are the same run" in ended.output and len(table(ended)) == 1
    ended = swept(*line, "name=${hydra:runtime.choices.parallel}", root=tmp_path / "two")
    assert ended.code == 0 and {path.name for path in (tmp_path / "two").iterdir()} >= {"single", "dp"}, ended.output
    assert len(table(ended)) == 2


def test_a_line_is_taken_apart_as_hydra_does() -> None:
    line, problems = read(
        ["seed=range(3)", "model=glob(*t)", "+model.dropout=choice(0,0.1)", "name=x", "optimizer=sgd,adam", "optimizer=sgd"]
    )
    assert not problems and line.fixed == ["name=x", "optimizer=sgd"]
    assert line.space == {"seed": ["0", "1", "2"], "model": ["gpt", "resnet", "vit"], "model.dropout": ["0", "0.1"]}
    found = combinations(line.space)
    assert len(found) == 18 and found[1] == {"seed": "0", "model": "gpt", "model.dropout": "0.1"}
    assert line.line(found[1]) == ["name=x", "optimizer=sgd", "seed=0", "model=gpt", "model.dropout=0.1"]
    search, problems = read(
        ["a=interval(1,2)", "b=int(interval(1,8))", "c=tag(log,interval(1e-3,1))", "d=range(1,9,3)", "hydra/sweeper=optuna"]
    )
    assert not problems and search.space == {
        "a": FloatDistribution(1.0, 2.0), "b": IntDistribution(1, 8), "c": FloatDistribution(1e-3, 1.0, log=True), "d": IntDistribution(1, 7, step=3)
    }  # fmt: skip


def test_the_exit_code_of_a_sweep() -> None:
    assert [exit_code(codes) for codes in ([], [0, 0], [0, 70, 70], [70, 74, 0], [70, 75])] == [0, 0, 70, 1, 75]


@pytest.mark.quick(1)
@pytest.mark.parametrize("summary", [{"status": ["x"], "metrics": None}, ["x"]])
def test_a_summary_that_is_none_is_no_traceback(summary: Any, tmp_path: Path) -> None:
    line = [*SHORT, "seed=0,1"]
    directory = Path(checked(*SHORT, "seed=0", f"run.root={tmp_path / 'runs'}").run.dir)
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(summary))
    for mode in ("plan", "status"):
        told = swept(f"mode={mode}", *line, root=tmp_path / "runs")
        assert told.code == 0 and "Traceback" not in told.output and "seed=0" in told.output, told.output


# --- one rehearsal for jobs that are alike


def counting(file: Path) -> Callable[[], None]:
    """Write the optimizer and the seed of each rehearsal into a file, a line each."""

    def plant() -> None:
        perform = rehearsal.perform

        def counted(build: Builder) -> Any:
            with file.open("a") as lines:
                lines.write(f"{build.config.optimizer['_target_']} {build.config.optimizer.get('weight_decay')}\n")
            return perform(build)

        rehearsal.perform = counted

    return plant


@pytest.mark.slow
def test_a_sweep_rehearses_once_what_a_rehearsal_cannot_tell_apart(tmp_path: Path) -> None:
    line = [*SHORT, "optimizer.weight_decay=0.0,0.1", "seed=0,1", "rehearse=true"]
    ended = swept(*line, root=tmp_path / "runs", before=counting(tmp_path / "rehearsals"))
    assert ended.code == 0, ended.output
    assert len((tmp_path / "rehearsals").read_text().splitlines()) == 2


@pytest.mark.parametrize(("words", "num"), [
    ("optimizer.lr=1e-3,1e-2", 1), ("seed=0,1", 1), ("optimizer.weight_decay=0.0,0.1,0.2", 2), ("model.dropout=0,0.1,0.2", 3),
])  # fmt: skip
def test_a_rehearsal_tells_numbers_of_an_optimizer_apart_by_being_off(words: str, num: int) -> None:
    key, _, values = words.partition("=")
    builds = [Job({}, line=[], config=checked(*SHORT, f"{key}={value}")).build for value in values.split(",")]
    assert len({rehearsal.subject(build) for build in builds}) == num


def test_a_model_that_breaks_the_promise_is_refused_once_before_the_first_job(tmp_path: Path) -> None:
    line = ["dataset=synthetic", "dataset.image_size=8", "model._target_=tests.faulty.Counter", "seed=0,1,2", "rehearse=true"]
    ended = swept(*line, root=tmp_path / "runs", before=counting(tmp_path / "rehearsals"))
    assert ended.code == 78
    assert ended.output.count("model: ") == 1 and len((tmp_path / "rehearsals").read_text().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*/*/config.yaml"))
