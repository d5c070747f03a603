"""Runs as jobs of a real Slurm: whatever ends a job, the run goes on in its directory and ends as on one machine."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from framework.cli.run import checked_line
from tests.harness import Ended, Says, assert_close, command, finished, once, wait_for, wait_for_checkpoint
from tests.launch.paced import ROOT, pace_jobs, steps_in
from tests.launch.test_elastic import RUN, Cluster
from tests.pages import project

CLUSTER = ROOT / "slurm" / "local_cluster.sh"
SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [
    name for name in ("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "mariadbd") if not shutil.which(name, path=SEARCH)
]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: slurm/local_cluster.sh install installs it"),
]
TWO = ["launch=slurm", "launch.nnodes=2", "parallel=ddp"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """A cluster of four nodes, for all tests. Yields its directory."""
    folder = tempfile.mkdtemp(prefix="slurm_")  # munge's socket wants a short path
    before = dict(os.environ)
    os.environ |= {"SLURM_CLUSTER_DIR": folder, "SLURM_CONF": f"{folder}/conf/slurm.conf"}
    try:
        subprocess.run([CLUSTER, "start"], check=True, timeout=120)
        yield Path(folder)
    finally:
        subprocess.run([CLUSTER, "stop"], check=True, timeout=120)
        os.environ.clear()
        os.environ |= before
        shutil.rmtree(folder)


def one() -> Ended:
    return once(*RUN)


def ask(*words: str) -> str:
    return subprocess.run(words, check=True, text=True, timeout=60, stdout=subprocess.PIPE).stdout


def facts(job_id: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "show", "job", "-o", job_id)))


class Run:
    """A run that is submitted. Its steps are written down, and take a second each until `finish`.

    At this pace it does not end by itself before Slurm has done what a test waits for: some of that takes over a minute.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.root = folder / "runs"
        self.overrides = overrides
        self.slow = folder / "slow"
        self.slow.write_text("1")
        self.jobs: list[str] = []

    def submit(self) -> Ended:
        told = command(*self.overrides, root=self.root, before=pace_jobs(self.folder))
        assert told.code == 0, told.output
        self.jobs += re.findall(r"job (\d+) is submitted", told.output)
        return told

    @property
    def job(self) -> str:
        return self.jobs[-1]

    @property
    def now(self) -> Ended:
        return Ended(0, self.log(), self.root)

    def log(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.root.glob("*/*/slurm/*.out")))

    def steps(self) -> list[tuple[float, int, int, int]]:
        return steps_in(self.folder)

    def wait_for_step(self, *, world_size: int, after: float = 0.0, timeout_s: float = 90) -> None:
        def is_there() -> bool:
            return any(at > after and size == world_size for at, _, _, size in self.steps())

        self._wait(is_there, timeout_s=timeout_s, what=f"a step of {world_size} processes")

    def wait_for_state(self, *states: str, timeout_s: float = 90) -> None:
        self._wait(lambda: facts(self.job)["JobState"] in states, timeout_s=timeout_s, what=f"job {self.job} {states}")

    def wait_for_status(self, status: str) -> None:
        self._wait(lambda: self.now.summary["status"] == status, timeout_s=90, what=f"status {status}")

    def wait_for_restart(self, *, timeout_s: float = 120) -> None:
        self._wait(lambda: facts(self.job)["Restarts"] != "0", timeout_s=timeout_s, what="a requeue")

    def _wait(self, condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        try:
            wait_for(condition, timeout_s=timeout_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{facts(self.job)}\n{self.log()[-6000:]}") from None

    def finish(self) -> Ended:
        self.slow.unlink(missing_ok=True)
        self.wait_for_state("COMPLETED")
        return self.now


@pytest.fixture
def submitted(cluster: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run that is training as a job, on two nodes unless told otherwise."""
    made: list[Run] = []

    def make(*overrides: str) -> Run:
        made.append(Run(tmp_path, *RUN, *TWO, *overrides))
        made[-1].submit()
        made[-1].wait_for_step(world_size=1 if "launch.nnodes=1" in overrides else 2)
        return made[-1]

    yield make
    ask("scancel", f"--user={psutil.Process().username()}")
    wait_for(lambda: not ask("squeue", "-h"), timeout_s=60, what="an empty queue")


def assert_ends_as(run: Run, one: Ended, *, restarts: int) -> None:
    ended = run.finish()
    assert ended.summary["status"] == "finished"
    assert ended.summary["restarts"] == restarts, run.log()
    assert_close(ended, one)
    assert len(list(run.root.glob("*/*"))) == 1, "the same directory, and no trace of the nodes' meeting"


@pytest.mark.slow
def test_a_job_on_two_nodes_submitted_from_within_another_job(
    submitted: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Slurm tells the processes of that job, an interactive one say, is not for this one."""
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SBATCH_WAIT"):
        monkeypatch.setenv(name, "1")
    run = submitted()
    again = run.submit()
    assert f"job {run.job} is RUNNING already: {run.now.directory}" in again.output and len(run.jobs) == 1
    assert_ends_as(run, one(), restarts=0)
    late = run.submit()
    assert "finished already" in late.output and len(run.jobs) == 1


@pytest.mark.slow
def test_scontrol_requeue(submitted: Callable[..., Run]) -> None:
    run = submitted()
    ask("scontrol", "requeue", run.job)
    run.wait_for_status("preempted")
    stopped = run.now.summary
    assert stopped["step"] == max(step for _, step, _, _ in run.steps())  # nothing is lost
    assert_ends_as(run, one(), restarts=1)
    assert run.now.summary["record_id"] == stopped["record_id"], "for loggers it is the same run: wandb's id"


@pytest.mark.slow
def test_the_time_limit(submitted: Callable[..., Run]) -> None:
    run = submitted("launch.slurm.time_min=2", "launch.slurm.signal_s=30")  # which comes after 60 to 90 s
    run.wait_for_restart(timeout_s=180)
    assert "SIGUSR1: stopping after this step" in run.log() and "requeues itself" in run.log()
    ended = run.finish()  # after another minute, maybe
    assert ended.summary["status"] == "finished" and ended.summary["restarts"] >= 1
    assert_close(ended, one())


@pytest.mark.slow
def test_scancel_is_final_until_the_command_is_given_again(submitted: Callable[..., Run]) -> None:
    run = submitted()
    ask("scancel", run.job)
    run.wait_for_status("cancelled")
    wait_for(lambda: not ask("squeue", "-h"), timeout_s=60, what="an empty queue")
    assert facts(run.job)["JobState"] == "CANCELLED" and facts(run.job)["Restarts"] == "0"
    run.submit()
    assert len(run.jobs) == 2
    assert_ends_as(run, one(), restarts=1)


def slurmd_of(cluster: Path, node: str) -> psutil.Process:
    return psutil.Process(int((cluster / "run" / f"{node}.pid").read_text()))


def tasks_of(cluster: Path, node: str) -> list[psutil.Process]:
    """Return a node's step daemons, which outlive its slurmd, and all their processes."""
    log = str(cluster / "log" / f"{node}.log")
    steps = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd"
             and log in {file.path for file in process.open_files()}]  # fmt: skip
    return steps + [child for step in steps for child in step.children(recursive=True)]


@pytest.fixture
def repaired(cluster: Path) -> Iterator[list[str]]:
    """The nodes that a test has put here work again after it."""
    nodes: list[str] = []
    yield nodes
    for node in nodes:
        for process in tasks_of(cluster, node):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        subprocess.run([CLUSTER, "start-node", node], check=True, timeout=60)
    wait_for(lambda: "down" not in ask("sinfo", "-h", "-N", "-o", "%T"), timeout_s=60, what="every node up")


def lose(run: Run, number: int, *, repaired: list[str]) -> str:
    """Return the job's node of that number, which is to be lost and repaired later."""
    repaired.append(ask("scontrol", "show", "hostnames", facts(run.job)["NodeList"]).split()[number])
    return repaired[-1]


@pytest.mark.slow
def test_a_node_that_slurm_has_lost_leaves_the_run_to_the_next_attempt(
    cluster: Path, repaired: list[str], submitted: Callable[..., Run]
) -> None:
    """Its task runs on, and nobody tells it that the job is requeued elsewhere: two attempts of it want the run."""
    run = submitted("launch.nnodes=1")
    node = lose(run, 0, repaired=repaired)
    slurmd_of(cluster, node).kill()
    run.wait_for_restart()
    requeued_at = time.time()
    run.wait_for_step(world_size=1, after=requeued_at)  # still the old one's
    assert "continuing" not in run.log()
    run._wait(lambda: "has been taken by process" in run.log(), timeout_s=90, what="the old one's end")
    run._wait(lambda: "continuing from" in run.log(), timeout_s=90, what="the new one's beginning")
    assert_ends_as(run, one(), restarts=1)


@pytest.mark.slow
def test_a_job_that_loses_the_processes_of_its_first_node_requeues_itself(cluster: Path, submitted: Callable[..., Run]) -> None:
    """Slurm sees only that a task has failed: the other node has lost the store."""
    run = submitted()
    first = ask("scontrol", "show", "hostnames", facts(run.job)["NodeList"]).split()[0]
    for process in tasks_of(cluster, first):
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # it has died with the process before it
            if "take_node" in " ".join(process.cmdline()):
                process.kill()
    run.wait_for_restart()
    assert_ends_as(run, one(), restarts=1)


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_node_that_dies(
    cluster: Path, repaired: list[str], submitted: Callable[..., Run]
) -> None:
    run = submitted("launch.nnodes=1:2")
    node = lose(run, 1, repaired=repaired)
    killed_at = time.time()
    for process in [slurmd_of(cluster, node), *tasks_of(cluster, node)]:
        process.kill()
    run.wait_for_step(world_size=1, after=killed_at)
    assert facts(run.job)["Restarts"] == "0"
    run.slow.unlink()
    run.wait_for_status("finished")
    assert_close(run.now, one())


# --- from a laptop to a cluster

PAGE = (ROOT / "docs" / "clusters.md").read_text()
FIVE = re.findall(r"^python train.py (.*?) *#", PAGE[: PAGE.index("## A Slurm job")], re.MULTILINE)


def test_there_are_five_commands() -> None:
    assert len(FIVE) == 5 and sum("launch=slurm" in line for line in FIVE) == 2


@pytest.mark.slow
@pytest.mark.parametrize("line", FIVE)
def test_the_commands_from_a_laptop_to_a_cluster_compute_the_same(line: str, cluster: Path, tmp_path: Path) -> None:
    if "launch=slurm" in line:
        run = Run(tmp_path, *RUN, *line.split())
        run.submit()
        assert_ends_as(run, one(), restarts=0)
        return
    nodes = Cluster(tmp_path, *RUN, *line.split())
    machines = [nodes.start() for _ in range(2 if "launch.nnodes" in line else 1)]
    if len(machines) > 1:  # the second may come late, and joins
        nodes.wait_for_step(world_size=4, after=0.0, within_s=60)
    nodes.slow.unlink()
    assert [machine.end().code for machine in machines] == [0] * len(machines), machines[0].output.read_text()
    assert_close(Ended(0, "", nodes.root), one())


# --- what is frozen at the submission


@pytest.mark.slow
def test_what_is_edited_after_the_submission_changes_nothing(tmp_path: Path, submitted: Callable[..., Run]) -> None:
    copy = project(tmp_path / "project")
    ask("scontrol", "update", "PartitionName=main", "State=DOWN")  # jobs wait
    try:
        # a model of the user's own, in a package beside train.py
        (copy / "own").mkdir()
        (copy / "own" / "net.py").write_text("from models.cnn import CNN\n\n\nclass Net(CNN):\n    pass\n")
        option = (copy / "conf" / "model" / "cnn.yaml").read_text()
        (copy / "conf" / "model" / "own.yaml").write_text(option.replace("models.cnn.CNN", "own.net.Net"))
        line = [*(word.replace("model=cnn", "model=own") for word in RUN), *TWO, "launch.slurm.snapshot=true",
                f"run.root={tmp_path / 'runs'}"]  # fmt: skip
        assert "model=own" in line
        told = subprocess.run([sys.executable, "train.py", *line], cwd=copy, text=True, capture_output=True, timeout=120)
        assert told.returncode == 0, told.stderr
        run = Run(tmp_path, *line)
        run.jobs += re.findall(r"job (\d+) is submitted", told.stderr)
        assert run.now.summary.items() >= {"status": "queued", "job_id": run.job, "error": None}.items()
        for path in [*copy.rglob("*.py"), *copy.glob("conf/**/*.yaml")]:
            path.write_text("no longer what it was(")
    finally:
        ask("scontrol", "update", "PartitionName=main", "State=UP")
    assert_ends_as(run, one(), restarts=0)


# --- refused before anything is submitted


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["launch.slurm.partition=hihg"], "launch.slurm.partition: Slurm refuses partition=hihg: ... invalid partition ..."),
        (["launch.nnodes=5"], "launch.nnodes: Slurm refuses nodes=5-5: ..."),
        (["launch.nproc_per_node=5"], "launch.nproc_per_node: Slurm refuses cpus-per-task=5: ..."),
        (["launch.slurm.gpus_per_node=3", "launch.nproc_per_node=1", "launch.slurm.partition=gpu", "launch.nnodes=1"],
         "launch.slurm.gpus_per_node: Slurm refuses gpus-per-node=3: ..."),
        (["launch.nproc_per_node=3", "launch.slurm.gpus_per_node=2"], "launch.nproc_per_node: 3 ... gpus_per_node=3 ... device=cpu"),
        (["launch.slurm.time_min=2"], "launch.slurm.time_min: 2 ... launch.slurm.signal_s=120 ... 4"),
        (["name=a%j"], "run.dir: ... %"),
        (["launch=local", "launch.slurm.partition=main"], "launch.slurm.partition: unknown key (only with launch=slurm)"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_the_cluster_does_not_have_is_refused(line: list[str], problem: str, cluster: Path, tmp_path: Path) -> None:
    refused = command(*RUN, *TWO, *line, root=tmp_path / "runs")
    assert (refused.code, refused.output) == (78, Says(problem))
    assert not list(refused.root.iterdir())


def test_a_launcher_does_not_submit() -> None:
    problems = checked_line([*RUN, "launch=slurm", "parallel=ddp"], world_size=2).problems
    expected = "launch: slurm ... 2 ... launch=local"
    assert [str(problem) for problem in problems] == [Says(expected)]


def test_without_submitit_a_job_is_refused_before_the_rehearsal(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant() -> None:
        sys.modules["submitit"] = None
        sys.modules.pop("framework.preflight.rehearsal", None)
        monkeypatch.setattr("framework.preflight.dry_build.dry_build", lambda *_, **__: ([], []))
        monkeypatch.setattr("framework.preflight.rehearsal.rehearse", lambda *_, **__: pytest.fail("it has begun"))

    refused = command(*RUN, *TWO, "rehearse=true", root=tmp_path / "runs", before=plant)
    assert (refused.code, refused.output) == (78, Says("launch: submitit not installed (pip install 'steadfast[slurm]' ..."))


def test_a_machine_without_slurm_is_no_place_to_submit_from(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refused = command(*RUN, *TWO, root=tmp_path / "runs")
    assert (refused.code, refused.output) == (78, Says("launch: slurm ... no sbatch on PATH ... launch=local"))


@pytest.mark.slow
def test_a_directory_that_the_nodes_do_not_see_is_refused(cluster: Path, tmp_path: Path) -> None:
    """What is mounted there for the submitting process alone is another file system than the nodes see."""
    place, other = tmp_path / "runs", tmp_path / "other"
    place.mkdir(), other.mkdir()
    mount = f"mount --bind {other} {place}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("this user may not mount")
    line = [sys.executable, ROOT / "train.py", *RUN, *TWO, f"run.root={place}"]
    told = subprocess.run(["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *line],
                          text=True, capture_output=True, timeout=120)  # fmt: skip
    assert (told.returncode, told.stderr) == (78, f"run.dir: {place} is on this machine only: the nodes do not see it "
                                              "(a directory on a file system that the nodes share)\n")  # fmt: skip
    assert not list(other.iterdir())
    assert not ask("squeue", "-h")


# --- by hand


def by_hand(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> str:
    """Submit slurm/train.sbatch, from the project's directory. Returns the job's id."""
    line = [*RUN, *overrides, f"run.root={folder / 'runs'}"]
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["sbatch", "--parsable", f"--output={folder}/%A_%a.out", *options, "slurm/train.sbatch", *line],
                          cwd=ROOT, env=os.environ | python, check=True, text=True, stdout=subprocess.PIPE)  # fmt: skip
    return done.stdout.strip()


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.out")))


@pytest.mark.slow
def test_by_hand_a_signal_before_the_end_requeues_the_job(cluster: Path, tmp_path: Path) -> None:
    longer = ["parallel=ddp", "trainer.max_steps=600"]
    job = by_hand(tmp_path, *longer, options=("--nodes=2",))
    wait_for_checkpoint(tmp_path / "runs")
    ask("scancel", "--batch", "--signal=USR1", job)  # as --signal has it sent
    wait_for(lambda: facts(job)["Restarts"] == "1", timeout_s=60, what="a requeue")
    wait_for(lambda: facts(job)["JobState"] == "COMPLETED", timeout_s=120, what="the job's end")
    ended = Ended(0, output(tmp_path), tmp_path / "runs")
    assert "stopped after step" in ended.output and ended.summary["restarts"] == 1
    assert_close(ended, finished(*RUN, *longer[1:], root=tmp_path / "one"))
