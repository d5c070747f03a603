"""Sweeps as jobs of a real Slurm: arrays, each kind of job with what it needs, taken up again; and mode=status."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from framework.cli.run import start
from framework.config.frozen_file import recall
from tests.harness import Ended, Says, assert_close, begin, command, end, files_below, wait_for
from tests.launch.paced import ROOT, pace_jobs
from tests.launch.test_elastic import RUN
from tests.launch.test_slurm import ask, cluster, facts, one, pytestmark  # noqa: F401
from tests.launch.test_sweep import multirun

ARRAY = [*RUN, "launch=slurm"]
SEEDS = [*ARRAY, "seed=0,1,2"]
SEARCH = [
    *ARRAY,
    "trainer.max_steps=10",
    "trainer.eval_every=null",
    "optimizer.lr=tag(log, interval(1e-4, 1e-1))",
    "hydra/sweeper=optuna",
]


class Sweep:
    """A sweep that is submitted. Its jobs' steps are written down, and take a second each until `hurry`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "runs"
        (folder / "slow").write_text("1")

    def submit(self, *line: str, code: int = 0) -> Ended:
        told = command(*line, root=self.root, run=multirun, before=pace_jobs(self.folder))
        assert told.code == code, told.output
        return told

    def hurry(self) -> None:
        (self.folder / "slow").unlink()

    def run(self, seed: int = 0) -> Ended:
        """The run of one seed, as if it had been a command of its own."""
        (path,) = [
            path for path in self.directories if yaml.safe_load((path / "slurm/frozen.yaml").read_text())["seed"] == seed
        ]
        return Ended(0, self.log, path)

    @property
    def directories(self) -> list[Path]:
        return [path.parent.parent for path in self.root.glob("default/*/slurm/frozen.yaml")]

    @property
    def log(self) -> str:
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in files_below(self.root, "*.out"))

    @property
    def table(self) -> list[dict[str, str]]:
        (path,) = self.root.glob("sweeps/*/sweep.csv")
        with open(path) as file:
            return list(csv.DictReader(file))

    def wait(self, condition: Callable[[], bool], *, what: str, timeout_s: float = 150) -> None:
        try:
            wait_for(condition, timeout_s=timeout_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{ask('squeue')}\n{self.log[-6000:]}") from None

    def wait_for_rows(self, *seeds: int) -> None:
        self.wait(lambda: all((self.run(seed).root / "metrics.jsonl").exists() for seed in seeds), what=f"rows of {seeds}")

    def wait_for_end(self) -> None:
        self.wait(lambda: not ask("squeue", "--noheader"), what="an empty queue")


def ids(told: Ended) -> list[str]:
    return re.findall(r"job (\S+) is submitted", told.output)


@pytest.fixture
def submitted(cluster: Path, tmp_path: Path) -> Iterator[Sweep]:  # noqa: F811
    yield Sweep(tmp_path)
    ask("scancel", f"--user={psutil.Process().username()}")
    wait_for(lambda: not ask("squeue", "-h"), timeout_s=60, what="an empty queue")


@pytest.fixture
def held(cluster: Path) -> Iterator[None]:  # noqa: F811
    """Jobs wait."""
    ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    yield
    ask("scontrol", "update", "PartitionName=main", "State=UP")


def status(*line: str, run: Callable[[list[str]], int] = start, root: Path) -> dict[str, dict[str, str]]:
    """Give mode=status, and return its table: each line by its first cell, by the names of the columns."""
    told = command("mode=status", *line, root=root, run=run)
    assert told.code == 0, told.output
    lines = told.output.splitlines()
    (rule,) = [number for number, text in enumerate(lines) if "──" in text]
    names = lines[rule - 1]
    starts = [match.start() for match in re.finditer(r"\S+", names)]
    columns = list(zip(names.split(), starts, [*starts[1:], None]))
    rows = [{name: text[first:last].strip() for name, first, last in columns} for text in lines[rule + 1 :] if text.strip()]
    return {row["run"]: row for row in rows[:-1]}  # the last counts them


# --- one array


@pytest.mark.slow
def test_a_sweep_is_an_array_that_ends_as_on_one_machine(submitted: Sweep) -> None:
    told = submitted.submit(*SEEDS)
    jobs = ids(told)
    assert len(jobs) == 3 and {job.partition("_")[2] for job in jobs} == {"0", "1", "2"}
    assert len({job.partition("_")[0] for job in jobs}) == 1, "one array"
    assert {row["state"] for row in submitted.table} <= {"queued", "running"}
    submitted.wait_for_rows(0, 1, 2)
    ask("scontrol", "requeue", jobs[0])  # one job of it, to which the others are nothing
    submitted.wait(lambda: submitted.run(0).summary.get("restarts") == 1, what="the requeued job's second start")
    submitted.hurry()
    submitted.wait_for_end()
    assert_close(submitted.run(0), one())
    assert [submitted.run(seed).summary["restarts"] for seed in (0, 1, 2)] == [1, 0, 0]
    (folder,) = submitted.root.glob("sweeps/*")
    assert {recall(path)["run"]["group"] for path in submitted.directories} == {f"sweep-{folder.name}"}

    again = submitted.submit(*SEEDS)
    assert not ids(again) and "3 jobs: 3 finished" in again.output and "best val/loss" in again.output
    assert {row["state"] for row in submitted.table} == {"finished"}


@pytest.mark.slow
def test_the_same_command_submits_only_what_is_missing(held: None, submitted: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "all")  # what the user likes to see is not what waits or runs
    jobs = ids(submitted.submit(*SEEDS))
    assert len(jobs) == 3
    ask("scancel", jobs[1])
    again = submitted.submit(*SEEDS)
    assert len(ids(again)) == 1
    for job in (jobs[0], jobs[2]):
        assert f"job {job} is PENDING already" in again.output
    more = submitted.submit(*ARRAY, "seed=0,1,2,3")  # another sweep, which shares three of its runs with the first
    assert len(ids(more)) == 1 and more.output.count("is PENDING already") == 3
    assert len(ask("squeue", "--noheader", "--array", "--states=PENDING").splitlines()) == 4
    planned = command("mode=plan", *SEEDS, root=submitted.root, run=multirun)
    assert planned.output.count("queued") == 3, planned.output


def sbatch_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = "sbatch") -> None:
    """Put an `sbatch`, or another of Slurm's commands, first on PATH. `$real` is Slurm's own."""
    real = shutil.which(name)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/bash\nreal={real}\n{does}\n")
    (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.parametrize("line", [["-m", "seed=0,1"], ["seed=0"]], ids=["sweep", "run"])
def test_a_signal_while_jobs_are_submitted_loses_none_of_them(
    line: list[str], held: None, submitted: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has the jobs, and nobody has written down their ids: a Ctrl-C, and the end of the terminal."""
    sbatch_that(
        '"$real" "$@"; [ "$1" = --test-only ] || kill -INT $PPID; [ "$1" = --test-only ] || kill -HUP $PPID',
        tmp_path,
        monkeypatch,
    )
    words = [sys.executable, str(ROOT / "train.py"), *line, *ARRAY, f"run.root={submitted.root}"]
    subprocess.run(words, timeout=120, stderr=subprocess.DEVNULL)
    (tmp_path / "bin" / "sbatch").unlink()
    again = submitted.submit(*ARRAY, "seed=0,1") if "-m" in line else command(*ARRAY, "seed=0", root=submitted.root)
    num_jobs = 2 if "-m" in line else 1
    assert not ids(again) and again.output.count("is PENDING already") == num_jobs
    assert len(ask("squeue", "--noheader", "--array", "--states=PENDING").splitlines()) == num_jobs


@pytest.mark.slow
def test_a_full_quota_is_waited_for_or_told(
    held: None, submitted: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch_that(
        '[ "$1" = --test-only ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }', tmp_path, monkeypatch
    )
    told = submitted.submit(*SEEDS, code=75)
    assert "not submitted: " in told.output and "QOSMaxSubmitJobPerUserLimit" in told.output
    assert "the same command tries again" in told.output and "failed" not in told.output
    assert {row["state"] for row in submitted.table} == {"missing"}


# --- each kind of job with what it needs


EACH = "name=${hydra:runtime.choices.parallel}"  # a strategy is not part of a run, a name is


def asked(job: str) -> tuple[str, str, str]:
    """Return a waiting job's nodes, CPUs of a task, and memory of a node."""
    nodes, cpus, memory = ask(
        "squeue", "--noheader", "--array", f"--jobs={job}", "--Format=NumNodes,cpus-per-task,MinMemory"
    ).split()
    return nodes, cpus, memory


@pytest.mark.slow
def test_all_that_slurm_would_refuse_is_found_before_anything_is_submitted(submitted: Sweep) -> None:
    told = submitted.submit(*ARRAY, "parallel=single,ddp", EACH, "launch.nproc_per_node=99", code=78)  # single alone could go
    assert told.output.splitlines()[0] == Says("launch.nproc_per_node: Slurm refuses cpus-per-task=99: ...")
    assert not ask("squeue", "--noheader") and not list(submitted.root.glob("*"))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["launch=local,slurm"], "launch: ... local ... slurm ... one sweep"),
        (["launch=slurm", "seed=0,1", "hydra.launcher.n_jobs=2"], "hydra/launcher: ... launch=slurm ... array_parallelism"),
        (["seed=0,1", "hydra/launcher=submitit_slurm"], "hydra/launcher: ... not installed ... launch=slurm; ... hydra-submitit-launcher"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_does_not_go_together_is_refused(line: list[str], problem: str, tmp_path: Path) -> None:
    assert Sweep(tmp_path).submit(*RUN, *line, code=78).output == Says(problem)


# --- mode=status


@pytest.mark.slow
def test_status_tells_of_each_run_where_it_is_and_why(submitted: Sweep) -> None:
    first = ids(submitted.submit(*ARRAY, "seed=0,1"))
    submitted.submit(*ARRAY, "seed=5,6", "optimizer.lr=1e30")  # these diverge
    submitted.wait_for_rows(0, 1)
    submitted.wait(lambda: submitted.run(5).summary.get("status") == "failed", what="the diverged run's end")
    ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        later = ids(submitted.submit(*ARRAY, "seed=3,4"))
        alone = ids(command(*ARRAY, "seed=7", root=submitted.root))
        ask("scancel", later[1], *alone)
        submitted.wait(
            lambda: not {later[1], *alone} & set(ask("squeue", "--noheader", "--array", "--format=%i").split()),
            what="the cancelled jobs' end",
        )
        found = status(root=submitted.root)
        by_line = status(*ARRAY, "seed=0,3,9", run=multirun, root=submitted.root)
    finally:
        ask("scontrol", "update", "PartitionName=main", "State=UP")

    def row(seed: int) -> dict[str, str]:
        return found[str(submitted.run(seed).root.relative_to(submitted.root))]

    assert len(found) == 7
    running = row(0)
    assert (running["state"], running["job"]) == ("running", first[0]) and running["node"].startswith("node")
    assert re.fullmatch(r"\d+/200", running["step"]) and re.fullmatch(r"\d:\d\d:\d\d", running["ETA"])
    assert re.fullmatch(r"(train|val)/loss \S+", running["metric"])
    queued = row(3)
    assert (queued["state"], queued["job"], queued["why"]) == ("queued", later[0], "PartitionDown")
    assert (row(4)["state"], row(4)["why"]) == ("cancelled", "it left the queue before it began")
    assert row(7)["state"] == "cancelled" and row(7)["why"].startswith("CANCELLED")
    failed = row(5)
    assert failed["state"] == "failed" and "is not finite" in failed["why"]

    (folder,) = [path for path in submitted.root.glob("sweeps/*") if "seed=0,1" in (path / "sweep.yaml").read_text()]
    of_sweep = command("mode=status", root=folder)
    assert "seed=0" in of_sweep.output and "2 runs: 2 running" in of_sweep.output and "seed=3" not in of_sweep.output
    assert {row["differs"]: row["state"] for row in by_line.values()} == {
        "seed=0": "running",
        "seed=3": "queued",
        "seed=9": "missing",
    }


@pytest.mark.slow
def test_status_without_slurm_tells_what_the_directories_do(
    held: None, submitted: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted.submit(*ARRAY, "seed=0,1")
    monkeypatch.setenv("PATH", "/nowhere")
    found = status(root=submitted.root)
    assert {row["state"] for row in found.values()} == {"?"}


@pytest.mark.parametrize("damage", ["a fifo", "a directory", "id,directory,state,objective\n1,a\0b,finished,0", "x" * 200_000])
def test_status_of_a_damaged_sweep_says_so(damage: str, tmp_path: Path) -> None:
    table = tmp_path / "runs" / "sweep.csv"
    table.parent.mkdir()
    if damage == "a fifo":
        os.mkfifo(table)
    elif damage == "a directory":
        table.mkdir()
    else:
        table.write_text(f"id,directory,state,objective\n{damage}\n" if "," not in damage else damage)
    told = command("mode=status", root=tmp_path / "runs", timeout_s=20)
    assert told.code == 78 and told.output.startswith(f"run.root: {table} cannot be read ("), told.output
    assert len(told.output.splitlines()) == 1


def test_status_of_numbers_that_are_none(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "default" / "odd"
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text('{"status": "running", "step": 1e999, "total_steps": NaN, "job_id": ["7"]}')
    (directory / "metrics.jsonl").write_text(f'{{"step": {"9" * 400}, "split": "train", "step_s": 1e300, "loss": 0.5}}\n')
    (odd,) = status(root=tmp_path / "runs").values()
    assert (odd["state"], odd["metric"]) == ("killed", "train/loss 0.5") and "ETA" not in odd


# --- searches


@pytest.mark.slow
def test_a_search_waits_for_its_trials_and_when_it_is_stopped_leaves_them_to_the_same_command(submitted: Sweep) -> None:
    line = [*SEARCH, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2"]
    waiting = begin(*line, root=submitted.root, run=multirun, before=pace_jobs(submitted.folder))
    submitted.wait(lambda: len(list(submitted.root.glob("default/*/metrics.jsonl"))) == 2, what="rows of two trials")
    os.kill(waiting.pid, signal.SIGINT)
    told = end(waiting, root=submitted.root)
    assert told.code == 75 and "stopped; the same command continues" in told.output, told.output
    assert len(ask("squeue", "--noheader", "--states=RUNNING").splitlines()) == 2
    submitted.hurry()
    again = submitted.submit(*line)
    assert "3 jobs: 3 finished" in again.output and len(ids(again)) == 1, again.output
    assert "best val/loss" in again.output
    assert [Ended(0, "", Path(row["directory"])).summary["restarts"] for row in submitted.table] == [0, 0, 0]


@pytest.mark.slow
def test_a_bad_trial_on_the_cluster_is_stopped(submitted: Sweep) -> None:
    pruner = "hydra.sweeper.pruner={_target_:optuna.pruners.ThresholdPruner,upper:0.0}"
    line = [*SEARCH, "hydra.sweeper.n_trials=1", pruner, "trainer.eval_every=1", "trainer.max_steps=100"]
    told = submitted.submit(*line)
    assert "1 job: 1 pruned" in told.output, told.output
    (row,) = submitted.table
    assert 1 <= int(row["step"]) < 100
