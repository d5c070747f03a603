"""A run as a Slurm job: submitted through submitit, then one task a node, each of them a node of an elastic run."""

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from framework import log, slurm
from framework.environment import SlurmTask
from framework.files import make_directory
from framework.frozen import Frozen, freeze, thaw
from framework.launch.elastic import take_part
from framework.launch.start import Begun, claim
from framework.log import LOGGER
from framework.outcome import Exit
from framework.preemption import PREEMPTION
from framework.run_directory import RunDirectory
from framework.slurm import SlurmFailed

ROOT = Path(__file__).resolve().parent.parent.parent
# the first entry of the path would be the directory of the submission, which may hold a newer framework
NODE = "import sys; sys.path[0] = sys.argv[1]; from framework.launch.slurm import take_node; sys.exit(take_node(*sys.argv[2:]))"


def submit(config: dict[str, Any]) -> int:
    """Submit the run's job, unless it has one in the queue already. Returns the exit code at once, as a job may wait for days."""
    directory = RunDirectory(Path(config["run"]["dir"]))
    try:
        if standing := slurm.standing(directory):
            LOGGER.info("%s: %s", standing, directory.path)
            return Exit.FINISHED
        begun = claim(config)
        if not isinstance(begun, Begun):
            return begun
        try:  # its lock keeps others from submitting too; the job, which needs seconds to start, finds it free
            job_id = _submit(begun.config, folder=directory.path.absolute() / "slurm")
            directory.update_summary(status="queued", job_id=job_id, error=None)
        finally:
            begun.lock.release()
    except SlurmFailed as error:
        LOGGER.error("nothing submitted: %s", error)
        return Exit.FAILED
    except OSError as error:
        LOGGER.error("the run's directory cannot be written: %s", error)
        return Exit.DISK
    LOGGER.info("job %s is submitted: %s", job_id, directory.path)
    return Exit.FINISHED


def _submit(config: dict[str, Any], *, folder: Path) -> str:
    """Freeze the configuration for the job, copy the code if asked to, and submit. Returns the job's id."""
    import submitit
    from submitit.core.utils import FailedJobError

    run, asked = config["run"], config["launch"]["slurm"]
    if run["resume"] == "never":  # the earlier run has been moved aside; what the job finds after a requeue is its own
        run = run | {"resume": "auto"}
    make_directory(folder)
    frozen = freeze(config | {"run": run | {"dir": str(folder.parent)}}, folder, name="frozen.yaml")
    options = slurm.job_options(config)
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(
        **dict.fromkeys(("time", "wckey")),  # none of submitit's own
        setup=[f"cat {shlex.quote(str(frozen.path))} >/dev/null || exit {Exit.DISK}", *asked["setup"]],  # do we see it?
        stderr_to_stdout=True,
        additional_parameters={name.replace("-", "_"): value for name, value in options.items()},
        # of what a site, or the caller's environment, may have set otherwise
        srun_args=["--mpi=none", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0",
                   f"--cpus-per-task={options['cpus-per-task']}", *(["--no-kill"] if "no-kill" in options else [])],
    )  # fmt: skip
    code = _snapshot(folder) if asked["snapshot"] else ROOT
    # submitit starts the tasks and is then out of the way: its handlers would save on one rank alone, within a signal's
    command = [sys.executable, "-u", "-c", NODE, str(code), str(frozen.path), frozen.digest]
    try:
        return str(executor.submit(os.execv, command[0], command).job_id)
    except FailedJobError as error:
        raise SlurmFailed(" ".join(str(error).split())) from None


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
    task = SlurmTask.read()
    log.start_console(rank=task.node)
    PREEMPTION.speaks = task.node == 0
    PREEMPTION.watch()
    config = thaw(Frozen(Path(path), digest))
    code = take_part(config, attempt=[task.job_id, task.restarts])
    if code == Exit.PREEMPTED and task.node == 0 and config["launch"]["slurm"]["requeue"]:
        _requeue(task.job_id, RunDirectory(Path(config["run"]["dir"])))
    return code


def _requeue(job_id: int, directory: RunDirectory) -> None:
    """Requeue the job where it was Slurm who stopped it and would have let it end; all nodes have left the run by now."""
    PREEMPTION.ignore()
    try:
        facts = slurm.job_facts(job_id)
        is_preempted = facts.get("PreemptTime", "None") != "None"
        # after scancel it is CANCELLED, after scontrol requeue PENDING; both send TERM
        if facts["JobState"] == "RUNNING" and (PREEMPTION.signum == signal.SIGUSR1 or is_preempted):
            directory.record_end(status="queued")
            LOGGER.info("job %d requeues itself", job_id)
            slurm.requeue(job_id)
    except SlurmFailed as error:
        directory.record_end(status="preempted")
        LOGGER.error("job %d is not requeued (%s); the same command submits it again", job_id, error)
