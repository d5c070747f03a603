"""Runs as Slurm jobs: submitted through submitit, then one task a node, and each task is a node of an elastic run."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.config.folders import ROOT, project_folders
from framework.config.frozen_file import FrozenConfig, freeze, thaw
from framework.config.schema import RunConfig
from framework.launch.claim import ClaimedRun, claim
from framework.preflight.slurm import job_options, slurm_section
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import log, slurm
from framework.runtime.environment import SlurmTask, outside_of_jobs
from framework.runtime.exits import Exit
from framework.runtime.files import make_directory
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.slurm import SlurmFailed

# Python, with signals blocked until take_node handles them: a signal would end an interpreter that is starting
PATIENT = (
    f"import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {[int(signum) for signum in SIGNALS]}); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
# the first entry of the path would be the directory of the submission, which may hold a newer framework
NODE = "import sys; sys.path[0] = sys.argv[1]; from framework.launch.slurm import take_node; sys.exit(take_node(*sys.argv[2:]))"


def submit(configs: list[RunConfig], *, folder: Path, name: str | None = None) -> list[int]:
    """Submit runs that ask for the same as one job, an array if they are several, skipping runs with a job in the queue.

    Returns each run's exit code at once, since a job may wait for days. `folder` must hold nothing else: the job's output, and
    the code with launch.slurm.snapshot, go there. `name` is the job's; None = the run's.
    """
    codes = {config.run.dir: int(Exit.FINISHED) for config in configs}
    claimed: list[ClaimedRun] = []
    try:
        queued = _queued(list(codes))
        for config in configs:
            found = claim(config) if config.run.dir not in queued else None
            if isinstance(found, ClaimedRun):
                claimed.append(found)
            elif found is not None:
                codes[config.run.dir] = found
        # before we had its lock, another process may have submitted it; the job needs seconds to start, and finds the lock free
        queued = _queued([run.config.run.dir for run in claimed])
        left = [run for run in claimed if run.config.run.dir not in queued]
        if left:
            with _undisturbed(), outside_of_jobs():
                _submit(left, folder=folder.absolute(), name=name)
    except (SlurmFailed, OSError) as error:
        LOGGER.error("not submitted: %s; the same command tries again", error)
        code = Exit.FAILED if isinstance(error, SlurmFailed) else Exit.DISK
        codes |= {run.config.run.dir: code for run in claimed}
    finally:
        for run in claimed:
            run.lock.release()
    return [codes[config.run.dir] for config in configs]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay Ctrl-C, and the end of the terminal: the job that Slurm has taken must be recorded."""
    received: list[int] = []
    before = {signum: signal.signal(signum, lambda signum, _: received.append(signum)) for signum in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for sbatch, which inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in received:
            signal.raise_signal(number)


def _queued(paths: list[str]) -> list[str]:
    jobs = queued_jobs(RunDirectory(Path(path)) for path in paths)
    for path, job in jobs.items():
        LOGGER.info("job %s is %s already: %s", job.job_id, job.state, path)
    return [path for path in paths if Path(path) in jobs]


def _submit(runs: list[ClaimedRun], *, folder: Path, name: str | None) -> None:
    import submitit
    from submitit.core.utils import FailedJobError

    first = runs[0].config
    asked, options = slurm_section(first.launch), job_options(first.launch, job_name=f"{first.name}/{first.run.id}")
    others = {key.replace("-", "_"): value for key, value in options.items()}
    make_directory(folder)
    executor = submitit.SlurmExecutor(folder, python=shlex.join([sys.executable, "-I", "-S", "-c", PATIENT]))
    executor.update_parameters(
        **dict.fromkeys(("time", "wckey")),  # not submitit's defaults
        setup=[f"ls {shlex.quote(str(folder))} >/dev/null || exit {Exit.DISK}", *asked.setup],  # does the node see it?
        stderr_to_stdout=True,
        array_parallelism=asked.array_parallelism or len(runs),
        additional_parameters=others | ({"job_name": name} if name else {}),
        # a site, or the caller's environment, may have set these otherwise
        srun_args=["--mpi=none", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0",
                   f"--cpus-per-task={options['cpus-per-task']}", *(["--no-kill"] if "no-kill" in options else [])],
    )  # fmt: skip
    code = _snapshot(folder) if asked.snapshot else ROOT
    frozen_configs, jobs = [], []
    for run in runs:
        own = Path(run.config.run.dir).absolute() / "slurm"
        make_directory(own)
        # an earlier run has been moved aside; what the job finds after a requeue is its own
        plain = run.config.begun().with_run(dir=str(own.parent)).plain()
        frozen_configs.append(freeze(plain, own, name="frozen.yaml"))
    try:
        with executor.batch():
            for frozen in frozen_configs:
                # submitit only starts the tasks: its signal handlers would save on one rank alone
                python = [sys.executable, "-u", "-c", NODE, str(code), str(frozen.path), frozen.digest]
                command = ["/usr/bin/env", *([f"STEADFAST_SNAPSHOT={code}"] if asked.snapshot else []), *python]
                jobs.append(executor.submit(os.execv, command[0], command))
    except FailedJobError as error:
        raise SlurmFailed(" ".join(str(error).split())) from None
    for run, job in zip(runs, jobs):
        directory = RunDirectory(Path(run.config.run.dir))
        directory.update_summary(status="queued", job_id=str(job.job_id), error=None)
        LOGGER.info("job %s is submitted: %s", job.job_id, directory.path)


def _snapshot(folder: Path) -> Path:
    """Copy the code: the framework, and of each project folder the Python files and the folders that have some."""
    copy = folder / "code"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    sources = [ROOT / "framework", ROOT / "models"]
    for project in reversed(project_folders()):  # where two have a module of one name, the first one's counts
        sources += [path for path in sorted(project.iterdir()) if path.suffix == ".py" or _holds_code(path)]
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, copy / source.name, ignore=_not_code, dirs_exist_ok=True)
        else:
            shutil.copy2(source, copy)
    return copy


def _holds_code(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and any(path.glob("*.py"))


_LARGEST_FILE = 1 << 20  # bytes; larger files in a package are data, which the job reads where they are


def _not_code(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.name.startswith((".", "__pycache__")) or
            not (path.is_dir() or (path.is_file() and path.stat().st_size <= _LARGEST_FILE))]  # fmt: skip


def take_node(path: str, digest: str) -> int:
    """Be one node of the job, with the configuration frozen at `path`: the job's task. Returns the exit code."""
    from framework.launch.elastic.agent import take_part  # torch, which a submission does not need

    task = SlurmTask.read()
    log.start_console(rank=task.node)
    PREEMPTION.speaks = task.node == 0
    PREEMPTION.watch()
    config = thaw(FrozenConfig(Path(path), digest))
    code = take_part(config, attempt=[task.job_id, task.restarts])
    if code == Exit.PREEMPTED and task.node == 0 and slurm_section(config.launch).requeue:
        _requeue(task.name, RunDirectory(Path(config.run.dir)))
    return code


def _requeue(job: str, directory: RunDirectory) -> None:
    """Requeue the job if Slurm has stopped it and would let it end; all nodes have left the run by now."""
    PREEMPTION.ignore()
    try:
        facts = slurm.job_facts(job)
        is_preempted = facts.get("PreemptTime", "None") != "None"
        # after scancel it is CANCELLED, after scontrol requeue PENDING; both send TERM
        if facts["JobState"] == "RUNNING" and (PREEMPTION.signum == signal.SIGUSR1 or is_preempted):
            directory.record_end(status="queued")
            LOGGER.info("job %s requeues itself", job)
            slurm.ask("scontrol", "requeue", job)  # it then ends its processes, maybe including this one
    except SlurmFailed as error:
        directory.record_end(status="preempted")
        LOGGER.error("job %s is not requeued (%s); the same command submits it again", job, error)
