"""Runs as Slurm jobs, submitted through submitit. Each node has one task, and each task is a node of an elastic run."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from framework.config.folders import EXTRAS, PACKAGED, ROOT, project_folders
from framework.config.frozen_file import FrozenConfig, freeze, thaw
from framework.config.launch import SlurmSection
from framework.config.modes import folder_of
from framework.config.schema import RunConfig, RunSection
from framework.launch.claim import ClaimedRun, claim
from framework.preflight.slurm import JobRequest
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import log, slurm
from framework.runtime.environment import SlurmTask, outside_of_jobs
from framework.runtime.exits import Exit
from framework.runtime.files import make_directory
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.slurm import SlurmFailed, SlurmSilent

# Python, with signals blocked until take_node handles them: a signal would end an interpreter during its start
PATIENT = (
    f"import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {[int(signum) for signum in SIGNALS]}); "
    "os.environ['STEADFAST_PYTHON'] = sys.executable; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
# otherwise the first entry of the path is the directory of the submission, which may contain a newer framework
NODE = "import sys; sys.path[0] = sys.argv[1]; from framework.launch.slurm import take_node; sys.exit(take_node(*sys.argv[2:]))"


def submit(configs: list[RunConfig], *, folder: Path, name: str | None = None) -> list[int]:
    """Submit runs with equal requests as one job, or as an array if there are several. Skip runs with a job in the queue.

    Return each run's exit code immediately, because a job may wait for days. `folder` must contain nothing else: it gets the
    job's output and, with launch.slurm.snapshot, the code. `name` is the job's name; None means the run's name.
    """
    codes: dict[str, int] = {}
    claimed: list[ClaimedRun] = []
    try:
        codes |= dict.fromkeys(_queued([config.run for config in configs], mode=configs[0].mode), Exit.FINISHED)
        for config in [config for config in configs if config.run.dir not in codes]:
            found = claim(config)
            if isinstance(found, ClaimedRun):
                claimed.append(found)
            else:
                codes[config.run.dir] = found
        # another process may have submitted it before this process had its lock; the job starts seconds later, and finds the
        # lock free
        codes |= dict.fromkeys(_queued([run.config.run for run in claimed], mode=configs[0].mode), Exit.FINISHED)
        left = [run for run in claimed if run.config.run.dir not in codes]
        with _undisturbed(), outside_of_jobs():
            for run in _submitted(left, folder=folder.absolute(), name=name) if left else []:
                codes[run.config.run.dir] = Exit.FINISHED
    except (SlurmFailed, OSError) as error:
        LOGGER.error("not submitted: %s; the same command tries again", error)
        code = Exit.PREEMPTED if isinstance(error, SlurmFailed) else Exit.DISK
        codes = {config.run.dir: code for config in configs} | codes
    finally:
        for run in claimed:
            run.lock.release()
    return [codes[config.run.dir] for config in configs]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay Ctrl-C, and the end of the terminal: a job that Slurm has accepted must be recorded."""
    received: list[int] = []
    before = {signum: signal.signal(signum, lambda signum, _: received.append(signum)) for signum in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for sbatch, which inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in received:
            signal.raise_signal(number)


def _queued(runs: list[RunSection], *, mode: str) -> list[str]:
    jobs = queued_jobs(RunDirectory(folder_of(run, mode)) for run in runs)
    for path, job in jobs.items():
        LOGGER.info("job %s is %s already: %s", job.job_id, job.state, path)
    return [run.dir for run in runs if folder_of(run, mode) in jobs]


def _submitted(runs: list[ClaimedRun], *, folder: Path, name: str | None) -> Iterator[ClaimedRun]:
    """Submit an array, or several if it is too large for the cluster or for a quota. Yield the runs that Slurm has accepted."""
    first = runs[0].config
    request = JobRequest.of(first.launch, first.dataset, first.parallel, first.backend, first.device)
    options = request.options(job_name=name or f"{first.name}/{first.run.id}")
    code = _snapshot(folder) if request.asked.snapshot else None
    most = slurm.largest_array() if len(runs) > 1 else 1
    parts = [runs[first : first + most] for first in range(0, len(runs), most)]
    LOGGER.info("%s", request)
    while parts:
        part = parts.pop(0)
        try:
            jobs = _sbatch(part, request.asked, options, folder=folder, code=code)
        except SlurmFailed as error:
            if len(part) == 1 or isinstance(error, SlurmSilent):
                raise
            parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
            continue
        for run, (job_id, output) in zip(part, jobs):
            directory = RunDirectory(folder_of(run.config.run, run.config.mode))
            directory.update_summary(status="queued", job_id=job_id, job_output=output, error=None)
            LOGGER.info("job %s is submitted: %s", job_id, directory.path)
            yield run


def _sbatch(
    runs: list[ClaimedRun], asked: SlurmSection, options: dict[str, Any], *, folder: Path, code: Path | None
) -> list[tuple[str, str]]:
    """Submit one job or one array. Return for each run the job's id and the path of its output."""
    import submitit
    from submitit.core.utils import FailedJobError

    make_directory(folder)
    executor = submitit.SlurmExecutor(
        folder, python=shlex.join([*(asked.python or [sys.executable]), "-I", "-S", "-c", PATIENT])
    )
    executor.update_parameters(
        **dict.fromkeys(("time", "wckey")),  # without submitit's defaults
        setup=[f"ls {shlex.quote(str(folder))} >/dev/null || exit {Exit.DISK}", *_checked(asked.setup)],
        stderr_to_stdout=True,
        array_parallelism=asked.array_parallelism or len(runs),
        additional_parameters={key.replace("-", "_"): value for key, value in options.items()},
        # a site, or the caller's environment, may have set other values
        srun_args=["--mpi=none", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0",
                   f"--cpus-per-task={options['cpus-per-task']}", *(["--no-kill"] if "no-kill" in options else []),
                   *asked.srun],
    )  # fmt: skip
    # the packages beside an installed framework belong to this machine: a container has its own packages
    place = str(code or ROOT) if code or not asked.python or not PACKAGED.is_dir() else ""
    frozen_configs, jobs = [], []
    for run in runs:
        config = run.config.begun()  # an earlier run has been moved aside; after a requeue, the job finds its own run
        own = folder_of(config.run, config.mode).absolute() / "slurm"
        make_directory(own)
        plain = config.with_run(dir=str(Path(config.run.dir).absolute())).plain()
        frozen_configs.append(freeze(plain, own, name="frozen.yaml"))
    try:
        with executor.batch():
            for frozen in frozen_configs:
                # submitit only starts the tasks: its signal handlers would save on one rank only
                node = ["-u", "-c", NODE, place, str(frozen.path), frozen.digest]
                command = ["/usr/bin/env", *([f"STEADFAST_SNAPSHOT={code}"] if code else []),
                           "sh", "-c", 'exec "$STEADFAST_PYTHON" "$@"', "sh", *node]  # fmt: skip
                jobs.append(executor.submit(os.execv, command[0], command))
    except FailedJobError as error:
        raise slurm.failure(str(error)) from None
    return [(str(job.job_id), str(job.paths.stdout)) for job in jobs]


def _checked(lines: list[str]) -> list[str]:
    """Return the job's setup with checks: if a line fails or ends the script, the job fails and reports the line."""
    told = f'code=$?; echo "{slurm.SETUP_FAILED} $code: $setup_line" >&2; exit {Exit.CONFIGURATION}'
    checked = [text for line in lines for text in (f"setup_line={shlex.quote(line)}", f"{{ {line}\n}} || exit")]
    return [f"trap {shlex.quote(told)} EXIT", *checked, "trap - EXIT"] if lines else []


def _snapshot(folder: Path) -> Path:
    """Copy the code: the framework, and from each project folder the Python files and the folders with Python files."""
    copy = folder / "code"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    sources = [folder for folder in (ROOT / "framework", ROOT / "models", EXTRAS) if folder.is_dir()]
    for project in reversed(project_folders()):  # if two folders have a module of the same name, the first one counts
        folders = {file.parent for file in project.glob("[!.]*/*.py")}
        sources += [path for path in sorted(project.iterdir()) if path.suffix == ".py" or path in folders]
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, copy / source.name, ignore=_not_code, dirs_exist_ok=True)
        else:
            shutil.copy2(source, copy)
    return copy


_LARGEST_FILE = 1 << 20  # bytes; larger files in a package are data, which the job reads in their place


def _not_code(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.name.startswith((".", "__pycache__")) or
            not (path.is_dir() or (path.is_file() and path.stat().st_size <= _LARGEST_FILE))]  # fmt: skip


def take_node(path: str, digest: str) -> int:
    """Be one node of the job, as the job's task, with the configuration frozen at `path`. Return the exit code."""
    from framework.launch.elastic.agent import take_part  # imports torch, which a submission does not need
    from framework.launch.elastic.meeting import StoreLost, meeting_folder
    from framework.runtime.forks import comes_true

    task = SlurmTask.read()
    log.start_console(rank=task.node)
    PREEMPTION.speaks = task.node == 0
    PREEMPTION.watch()
    config = thaw(FrozenConfig(Path(path), digest))
    directory, asked = RunDirectory(folder_of(config.run, config.mode)), config.launch.slurm
    may_requeue = asked is not None and asked.requeue
    try:
        code = take_part(config, attempt=[task.job_id, task.restarts], is_first=task.node == 0)
    except StoreLost as lost:
        LOGGER.error("%s", lost)
        first = Lock(meeting_folder(directory.path))  # of the first node: if it is held for seconds, this node cannot reach it
        if comes_true(lambda: not first.is_held, within_s=8.0):
            _conclude(task, directory, may_requeue=may_requeue, is_lost=True)
        return lost.code
    if code == Exit.FINISHED and task.node == 0 and directory.read_summary().get("status") == "queued":
        directory.record_end(status="finished")  # an evaluation keeps no summary
    if code == Exit.PREEMPTED and task.node == 0:
        _conclude(task, directory, may_requeue=may_requeue)
    return code


def _conclude(task: SlurmTask, directory: RunDirectory, *, may_requeue: bool, is_lost: bool = False) -> None:
    """Requeue the job if Slurm has stopped it and would let it end, or record that it was cancelled.

    All nodes have left the run before this call. `is_lost`: they have lost the first node, but Slurm may not know it.
    """
    PREEMPTION.ignore()
    job = task.name
    try:
        facts = slurm.job_facts(job)
        must_restart = PREEMPTION.signum == signal.SIGUSR1 or facts.get("PreemptTime", "None") != "None"
        must_restart |= is_lost and facts.get("Restarts") == str(task.restarts)
        # scancel and scontrol requeue both send TERM, and leave the job COMPLETING: only the accounts show which of them it
        # was
        if slurm.ends([job]).get(job, facts["JobState"]).startswith("CANCELLED"):
            directory.record_end(status="cancelled")
        elif may_requeue and facts["JobState"] == "RUNNING" and must_restart:
            directory.record_end(status="queued")
            LOGGER.info("job %s requeues itself", job)
            slurm.ask("scontrol", "requeue", job)  # this ends the job's processes, maybe including this process
    except SlurmFailed as error:
        directory.record_end(status="preempted")
        LOGGER.error("job %s is not requeued (%s); the same command submits it again", job, error)
