"""Runs as Slurm jobs: submitted through submitit, then one task a node, each of them a node of an elastic run."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from framework.config.frozen_file import Frozen, freeze, thaw
from framework.launch.claim import Begun, claim
from framework.preflight.slurm import job_options
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import log, slurm
from framework.runtime.environment import SlurmTask, outside_of_jobs
from framework.runtime.exits import Exit
from framework.runtime.files import make_directory
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.slurm import SlurmFailed

Config = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
# Python, with signals that wait until take_node listens: one may come while the interpreter starts, and would end it
PATIENT = (
    f"import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {[int(signum) for signum in SIGNALS]}); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
# the first entry of the path would be the directory of the submission, which may hold a newer framework
NODE = "import sys; sys.path[0] = sys.argv[1]; from framework.launch.slurm import take_node; sys.exit(take_node(*sys.argv[2:]))"


def submit(configs: list[Config], *, folder: Path, name: str | None = None) -> list[int]:
    """Submit runs that ask for the same as one job, an array if they are several, but those with a job in the queue already.

    Returns each one's exit code at once, as a job may wait for days. `folder` is to be theirs alone: the job's output, and the
    code with launch.slurm.snapshot, go there. `name` is the job's; null = the run's.
    """
    codes = dict.fromkeys((config["run"]["dir"] for config in configs), int(Exit.FINISHED))
    begun: list[Begun] = []
    try:
        for config in _unqueued(configs):
            claimed = claim(config)
            if isinstance(claimed, Begun):
                begun.append(claimed)
            else:
                codes[config["run"]["dir"]] = claimed
        # until we had its lock, another may have submitted it; the job, which needs seconds to start, finds the lock free
        left = _unqueued([one.config for one in begun])
        if left:
            with _undisturbed(), outside_of_jobs():
                _submit(left, folder=folder.absolute(), name=name)
    except (SlurmFailed, OSError) as error:
        LOGGER.error("not submitted: %s; the same command tries again", error)
        code = Exit.FAILED if isinstance(error, SlurmFailed) else Exit.DISK
        codes |= {one.config["run"]["dir"]: code for one in begun}
    finally:
        for one in begun:
            one.lock.release()
    return [codes[config["run"]["dir"]] for config in configs]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have Ctrl-C, or the end of the terminal, wait: what Slurm has is to be on record."""
    came: list[int] = []
    signals = {*SIGNALS, signal.SIGHUP}
    before = {signum: signal.signal(signum, lambda signum, _: came.append(signum)) for signum in signals}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for sbatch, which inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in came:
            signal.raise_signal(number)


def _unqueued(configs: list[Config]) -> list[Config]:
    """Return the runs that have no job in the queue; of the others, tell it."""
    in_queue = queued_jobs(RunDirectory(Path(config["run"]["dir"])) for config in configs)
    for path, job in in_queue.items():
        LOGGER.info("job %s is %s already: %s", job.job_id, job.state, path)
    return [config for config in configs if Path(config["run"]["dir"]) not in in_queue]


def _submit(configs: list[Config], *, folder: Path, name: str | None) -> None:
    """Freeze the configurations for the job, copy the code if asked to, submit, and put the job's ids on record."""
    import submitit
    from submitit.core.utils import FailedJobError

    asked, options = configs[0]["launch"]["slurm"], job_options(configs[0])
    make_directory(folder)
    executor = submitit.SlurmExecutor(folder, python=shlex.join([sys.executable, "-I", "-S", "-c", PATIENT]))
    executor.update_parameters(
        **dict.fromkeys(("time", "wckey")),  # none of submitit's own
        setup=[f"ls {shlex.quote(str(folder))} >/dev/null || exit {Exit.DISK}", *asked["setup"]],  # do we see it?
        stderr_to_stdout=True,
        array_parallelism=asked["array_parallelism"] or len(configs),
        additional_parameters={key.replace("-", "_"): value for key, value in options.items()} | ({"job_name": name} if name else {}),
        # of what a site, or the caller's environment, may have set otherwise
        srun_args=["--mpi=none", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0",
                   f"--cpus-per-task={options['cpus-per-task']}", *(["--no-kill"] if "no-kill" in options else [])],
    )  # fmt: skip
    code = _snapshot(folder) if asked["snapshot"] else ROOT
    jobs = []
    try:
        with executor.batch():
            for frozen in [_freeze(config) for config in configs]:
                # submitit starts the tasks and is then out of the way: its handlers would save on one rank alone, within a signal's
                command = [sys.executable, "-u", "-c", NODE, str(code), str(frozen.path), frozen.digest]
                jobs.append(executor.submit(os.execv, command[0], command))
    except FailedJobError as error:
        raise SlurmFailed(" ".join(str(error).split())) from None
    for config, job in zip(configs, jobs):
        directory = RunDirectory(Path(config["run"]["dir"]))
        directory.update_summary(status="queued", job_id=str(job.job_id), error=None)
        LOGGER.info("job %s is submitted: %s", job.job_id, directory.path)


def _freeze(config: Config) -> Frozen:
    run = config["run"]
    folder = Path(run["dir"]).absolute() / "slurm"
    make_directory(folder)
    if run["resume"] == "never":  # the earlier run has been moved aside; what the job finds after a requeue is its own
        run = run | {"resume": "auto"}
    return freeze(config | {"run": run | {"dir": str(folder.parent)}}, folder, name="frozen.yaml")


def _snapshot(folder: Path) -> Path:
    """Copy the code: the Python files beside train.py and every folder there that has some."""
    copy = folder / "code"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.suffix == ".py":
            shutil.copy2(path, copy)
        elif path.is_dir() and any(path.glob("*.py")):
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def take_node(path: str, digest: str) -> int:
    """Be one node of the job, as its task there, by the configuration frozen at `path`. Returns the exit code."""
    from framework.launch.elastic.agent import take_part  # torch, which a submission has no use for

    task = SlurmTask.read()
    log.start_console(rank=task.node)
    PREEMPTION.speaks = task.node == 0
    PREEMPTION.watch()
    config = thaw(Frozen(Path(path), digest))
    code = take_part(config, attempt=[task.job_id, task.restarts])
    if code == Exit.PREEMPTED and task.node == 0 and config["launch"]["slurm"]["requeue"]:
        _requeue(task.name, RunDirectory(Path(config["run"]["dir"])))
    return code


def _requeue(job: str, directory: RunDirectory) -> None:
    """Requeue the job where it was Slurm who stopped it and would have let it end; all nodes have left the run by now."""
    PREEMPTION.ignore()
    try:
        facts = slurm.job_facts(job)
        is_preempted = facts.get("PreemptTime", "None") != "None"
        # after scancel it is CANCELLED, after scontrol requeue PENDING; both send TERM
        if facts["JobState"] == "RUNNING" and (PREEMPTION.signum == signal.SIGUSR1 or is_preempted):
            directory.record_end(status="queued")
            LOGGER.info("job %s requeues itself", job)
            slurm.requeue(job)
    except SlurmFailed as error:
        directory.record_end(status="preempted")
        LOGGER.error("job %s is not requeued (%s); the same command submits it again", job, error)
