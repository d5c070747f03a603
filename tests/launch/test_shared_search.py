"""Several commands work on one search: each trial is run once, a killed command's is taken up; several objectives; files."""

import csv
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.sweep.jobs import Job
from framework.sweep.pools import Pool, SlurmPool
from tests.harness import Ended, Says, assert_same_bits, begin, end, files_below, finished, typed, wait_for
from tests.launch.test_search import SEARCH, SPACE, kill_the_command, trials
from tests.launch.test_slurm import MISSING, cluster  # noqa: F401  # a fixture
from tests.launch.test_slurm_sweep import SEARCH as ON_SLURM
from tests.launch.test_slurm_sweep import Sweep, submitted  # noqa: F401  # a fixture
from tests.launch.test_sweep import job, multirun, no_process, swept, table
from tests.test_resume import after_step

ANY_MODEL = [word for word in SEARCH if not word.startswith("model.")]
SHARED = [*SEARCH, *SPACE, "hydra.sweeper.storage=journal", "hydra.sweeper.sampler=random"]


def paths(tmp_path: Path) -> tuple[Path, Path]:
    """Return one root by two paths, so that each of two commands has a console of its own."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.symlink_to(first)
    return first, second


def touching(mine: Path, *, until: Path, pool: type[Pool] | type[SlurmPool] = Pool) -> Callable[[], None]:
    """Return what has a command say that it starts its first job, and wait there for another file."""

    def plant() -> None:
        original = pool.start

        def start(self: Any, job: Job) -> None:
            mine.touch()
            wait_for(until.exists, what=str(until), timeout_s=100)
            original(self, job)

        pool.start = start  # type: ignore[method-assign, assignment]

    return plant


def both(first: Any, second: Any, roots: tuple[Path, Path]) -> tuple[Ended, Ended]:
    return end(first, root=roots[0]), end(second, root=roots[1])


@pytest.mark.slow
def test_two_commands_share_the_trials_of_one_search(tmp_path: Path) -> None:
    roots, (a, b) = paths(tmp_path), (tmp_path / "a", tmp_path / "b")
    line = [*SHARED, trials(5)]
    started = [begin(*line, root=root, run=multirun, before=touching(mine, until=other))
               for root, mine, other in ((roots[0], a, b), (roots[1], b, a))]  # fmt: skip
    ended = both(started[0], started[1], roots)
    assert [one.code for one in ended] == [0, 0], ended
    num_run = [one.output.count("running ") for one in ended]
    assert min(num_run) > 0 and sum(num_run) == 5, ended
    rows = table(swept(*line, root=roots[0], before=no_process))
    assert [row["state"] for row in rows] == ["finished"] * 5 and len({row["id"] for row in rows}) == 5
    alone = table(swept(*line[:-3], "hydra.sweeper.sampler=random", trials(1), root=tmp_path / "alone"))
    assert alone[0]["id"] == rows[0]["id"]  # a draw follows from its number, whoever makes it


@pytest.mark.slow
def test_a_killed_commands_trial_is_taken_up_by_another(tmp_path: Path) -> None:
    roots, (a, gone) = paths(tmp_path), (tmp_path / "a", tmp_path / "gone")
    line = [*SHARED, trials(3), "checkpoint.every=4"]

    def killed() -> None:
        touching(a, until=a)()
        after_step(9, kill_the_command)()

    first = begin(*line, root=roots[0], run=multirun, before=killed)
    wait_for(a.exists, what="the first command's trial")
    second = begin(*line, root=roots[1], run=multirun, before=touching(tmp_path / "b", until=gone))
    died = end(first, root=roots[0])
    gone.touch()
    ended = end(second, root=roots[1])
    assert (died.code, ended.code) == (-signal.SIGKILL, 0), ended.output
    rows = table(ended)
    assert [row["state"] for row in rows] == ["finished"] * 3
    assert [job(ended, row).summary["restarts"] for row in rows] == [1, 0, 0]
    own = finished(*SEARCH[:-2], *(f"{key}={rows[0][key]}" for key in ("optimizer.lr", "model.dropout")), root=tmp_path / "own")
    assert_same_bits(job(ended, rows[0]), own)


def test_a_run_that_two_commands_draw_is_run_once(tmp_path: Path) -> None:
    roots, begun, go = paths(tmp_path), tmp_path / "begun", tmp_path / "go"
    line = [*SHARED, "model.dropout=choice(0)", "optimizer.lr=choice(0.01)", trials(2)]

    def hold() -> None:
        begun.touch()
        wait_for(go.exists, what="the other command", timeout_s=100)

    first = begin(*line, root=roots[0], run=multirun, before=after_step(5, hold))
    wait_for(begun.exists, what="step 5")
    second = begin(*line, root=roots[1], run=multirun, before=no_process)
    console = tmp_path / "second.output"
    wait_for(lambda: console.exists() and "waiting for model.dropout=0" in console.read_text(), what="a command that waits")
    go.touch()
    ended = both(first, second, roots)
    assert [one.code for one in ended] == [0, 0], ended
    assert (ended[0].output.count("running "), ended[1].output.count("finished already")) == (1, 1)


@pytest.mark.slow
def test_without_a_storage_a_search_is_one_commands(tmp_path: Path) -> None:
    roots, a, go = paths(tmp_path), tmp_path / "a", tmp_path / "go"
    line = [*SEARCH, *SPACE, trials(1)]
    first = begin(*line, root=roots[0], run=multirun, before=touching(a, until=go))
    wait_for(a.exists, what="the first command")
    refused = swept(*line, root=roots[1])
    go.touch()
    assert end(first, root=roots[0]).code == 0
    assert refused.code == 1 and "is in use by process" in refused.output


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: slurm/local_cluster.sh install installs it")
def test_two_commands_share_a_search_whose_trials_are_slurm_jobs(submitted: Sweep, tmp_path: Path) -> None:  # noqa: F811
    submitted.hurry()
    roots, (a, b) = paths(tmp_path), (tmp_path / "a", tmp_path / "b")
    line = [*ON_SLURM, "hydra.sweeper.n_trials=4", "hydra.sweeper.storage=journal", "hydra.launcher.array_parallelism=1"]
    started = [begin(*line, root=root, run=multirun, before=touching(mine, until=other, pool=SlurmPool))
               for root, mine, other in ((roots[0], a, b), (roots[1], b, a))]  # fmt: skip
    ended = both(started[0], started[1], roots)
    assert [one.code for one in ended] == [0, 0], ended
    num_run = [one.output.count("running ") for one in ended]
    assert min(num_run) > 0 and sum(num_run) == 4, ended
    rows = table(swept(*line, root=roots[0]))
    assert [row["state"] for row in rows] == ["finished"] * 4 and len(list(roots[0].glob("default/*/summary.json"))) == 4


# --- several objectives


@pytest.mark.slow
def test_the_pareto_set_of_several_objectives_is_marked_and_told(tmp_path: Path) -> None:
    line = [*ANY_MODEL[:-1], "model=mlp", "model.dim=4,16,64", "optimizer.lr=1e-5,1e-2", "hydra.sweeper.sampler=grid"]
    ended = swept(*line, "hydra.sweeper.objectives=[val/loss:min,parameters:min]", root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    rows = table(ended)
    found = {row["id"]: (float(row["objective:val/loss"]), float(row["objective:parameters"])) for row in rows}
    for row in rows:
        run = job(ended, row)
        best = min((r for r in run.rows if r["split"] == "val"), key=lambda r: r["loss"])
        assert found[row["id"]] == (best["loss"], run.summary["parameters"])
    front = {name for name, own in found.items()
             if not any(other[0] <= own[0] and other[1] <= own[1] and other != own for other in found.values())}  # fmt: skip
    assert 1 < len(front) < 6
    assert {row["id"] for row in rows if row["pareto"] == "true"} == front
    told = [text for text in ended.output.splitlines() if text.startswith("Pareto: val/loss ")]
    assert {text.rpartition("/")[2] for text in told} == front
    longer = swept(*line, "hydra.sweeper.objectives=[val/loss:min,parameters:max]", "mode=plan", root=tmp_path / "runs")
    assert longer.output.splitlines()[-1] == "6 of 6 trials are still to be drawn"  # another search


def test_an_objective_that_is_no_metric_is_refused(tmp_path: Path) -> None:
    refused = swept(*SEARCH[:-1], *SPACE, "hydra.sweeper.objectives=[val/loss:min,val/acuracy:max]", root=tmp_path / "runs")
    assert refused.code == 78 and not list((tmp_path / "runs").iterdir())
    assert refused.output == Says("hydra.sweeper.objectives: 'val/acuracy' ... mean val/accuracy?")


# --- conditions


@pytest.mark.slow
def test_a_search_over_models_has_each_models_own_keys(tmp_path: Path) -> None:
    line = [
        *ANY_MODEL,
        "model=mlp,cnn",
        "model.dim@mlp=8,16",
        "model.channels@cnn=[4],[8]",
        "hydra.sweeper.pruner=asha",
        trials(8),
    ]
    ended = swept(*line, root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    rows = table(ended)
    assert {(row["model"], bool(row["model.dim"]), bool(row["model.channels"])) for row in rows} == {
        ("mlp", True, False), ("cnn", False, True)
    }  # fmt: skip
    row = next(row for row in rows if row["model"] == "cnn")
    own = finished(*ANY_MODEL[:-2], "model=cnn", f"model.channels={row['model.channels']}", root=tmp_path / "own")
    assert own.directory.name == row["id"]
    assert [text.split()[1] for text in swept(*line, "mode=plan", root=tmp_path / "runs").output.splitlines()[:-1]] == [
        row["state"] for row in rows
    ]


# --- files

GRID = "params:\n  model: mlp,cnn\n  model.dim@mlp: 8,16\n  optimizer:\n    lr@model:cnn: 1e-3,1e-2\n"
DRAWN = """\
defaults: [optuna]
n_trials: 3
sampler: random
pruner: {name: percentile, percentile: 10}
params:
  optimizer.lr: tag(log, interval(1e-4, 1e-1))
  model: mlp,cnn
  model.dim@mlp: range(8, 17, 8)
  model.dropout@mlp: interval(0, 0.5)
  model.norm@cnn: choice(batch, group)
"""


def sweep_file(folder: Path, name: str, text: str) -> None:
    path = folder / "conf" / "hydra" / "sweeper" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.slow
def test_a_sweep_written_in_a_file_is_named_on_the_line(tmp_path: Path) -> None:
    sweep_file(tmp_path, "widths", GRID)
    listed = typed("-m", "hydra/sweeper=widths", "mode=plan", directory=tmp_path)
    assert [text.split()[2:] for text in listed.output.splitlines()] == [
        ["model=mlp", "model.dim=8"], ["model=mlp", "model.dim=16"],
        ["model=cnn", "optimizer.lr=0.001"], ["model=cnn", "optimizer.lr=0.01"],
    ], listed.output  # fmt: skip
    fewer = typed("-m", "hydra/sweeper=widths", "mode=plan", "hydra.sweeper.params.model.dim@mlp=32", directory=tmp_path)
    assert fewer.code == 0 and "model.dim=32" in fewer.output and len(fewer.output.splitlines()) == 3, fewer.output
    refused = typed("hydra/sweeper=widths", directory=tmp_path)
    assert (refused.code, refused.output) == (78, Says("hydra/sweeper: is about the jobs of a sweep (add -m)"))
    sweep_file(tmp_path, "widths", GRID + "n_trails: 3\n")
    misspelt = typed("-m", "hydra/sweeper=widths", "mode=plan", directory=tmp_path)
    assert misspelt.code == 78 and misspelt.output == Says("hydra.sweeper.n_trails: unknown key"), misspelt.output
    unknown = typed("-m", "hydra/sweeper=width", "mode=plan", directory=tmp_path)
    assert unknown.code == 78 and unknown.output == Says("hydra/sweeper: no option 'width' ... mean widths?"), unknown.output


@pytest.mark.slow
def test_a_search_written_in_a_file_has_intervals_choices_and_conditions(tmp_path: Path) -> None:
    sweep_file(tmp_path, "widths", DRAWN)
    short = ["trainer.max_epochs=null", "trainer.max_steps=2", "rehearse=false"]
    ended = typed("-m", "hydra/sweeper=widths", *short, directory=tmp_path)
    assert ended.code == 0 and "3 jobs: 3 finished" in ended.output, ended.output
    (path,) = tmp_path.glob("runs/sweeps/*/sweep.csv")
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert 1e-4 <= float(row["optimizer.lr"]) <= 1e-1
        if row["model"] == "mlp":
            assert row["model.dim"] in ("8", "16") and 0 <= float(row["model.dropout"]) <= 0.5 and not row.get("model.norm")
        else:
            assert row["model.norm"] in ("batch", "group") and not row.get("model.dim")
    longer = typed("-m", "hydra/sweeper=widths", "hydra.sweeper.n_trials=4", "mode=plan", *short, directory=tmp_path)
    assert longer.output.splitlines()[-1] == "1 of 4 trials are still to be drawn"
    assert yaml.safe_load(path.with_name("sweep.yaml").read_text())["line"][1] == "hydra/sweeper=widths"


# --- a database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The URL, with a password, of a PostgreSQL server that listens to a socket in a folder; skipped where there is none."""
    pytest.importorskip("psycopg")
    if shutil.which("initdb") is None:
        pytest.skip("there is no PostgreSQL")
    with tempfile.TemporaryDirectory() as name:  # a short path, as sockets need it
        folder = Path(name)
        (folder / "password").write_text("open-sesame\n")
        user = ["runuser", "-u", "nobody", "--"] if os.getuid() == 0 else []  # the server refuses to run as root
        if user:
            subprocess.run(["chown", "-R", "nobody", name], check=True)
        subprocess.run([*user, "initdb", "-D", folder / "data", "-U", "me", "-A", "scram-sha-256", "--pwfile", folder / "password"],
                       check=True, capture_output=True)  # fmt: skip
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={name}"]
        with open(folder / "log", "w") as log:
            server = subprocess.Popen([*user, "postgres", "-D", folder / "data", *options], stderr=log)
        try:
            wait_for(lambda: "ready to accept" in (folder / "log").read_text(), what="PostgreSQL")
            yield f"postgresql+psycopg://me:open-sesame@/postgres?host={name}"
        finally:
            server.terminate()
            server.wait()


@pytest.mark.slow
def test_commands_share_a_search_in_a_database_whose_password_is_written_nowhere(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", database)
    roots, (a, b) = paths(tmp_path), (tmp_path / "a", tmp_path / "b")
    lines = [[*SHARED, f"hydra.sweeper.storage={url}", trials(5)] for url in (f"'{database}'", "${oc.env:WHERE}")]
    started = [begin(*line, root=root, run=multirun, before=touching(mine, until=other))
               for line, root, mine, other in ((lines[0], roots[0], a, b), (lines[1], roots[1], b, a))]  # fmt: skip
    ended = both(started[0], started[1], roots)
    assert [one.code for one in ended] == [0, 0], ended
    assert sum(one.output.count("running ") for one in ended) == 5
    assert [row["state"] for row in table(ended[0])] == ["finished"] * 5
    elsewhere = swept(*lines[0][:-1], trials(1), root=tmp_path / "elsewhere")  # whose runs are others
    assert elsewhere.code == 0 and elsewhere.output.count("running ") == 1
    written = [path for path in files_below(tmp_path, "*") if path.is_file() and b"sesame" in path.read_bytes()]
    assert not written


@pytest.mark.quick(2)
@pytest.mark.parametrize("text", ["params: {: \n", "params: {a: [\n", 'params: {seed: "0,1", seed: "2,3"}\n', "params: [a]\n",
                                  "params: text\n", "- a\n- b\n"])  # fmt: skip
def test_a_file_that_is_no_sweep_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "conf" / "hydra" / "sweeper" / "bad.yaml").write_text(text)
    refused = typed("-m", "hydra/sweeper=bad", directory=tmp_path)
    assert refused.code == 78 and "hydra/sweeper" in refused.output and "Traceback" not in refused.output, refused.output
