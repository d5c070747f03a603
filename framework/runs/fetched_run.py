"""`run.resume=s3://...`: a run or checkpoint in an object store, from which another run starts."""

from pathlib import Path

from framework.checkpoint.manifest import MANIFEST, candidates, step_of
from framework.config.schema import RunSection
from framework.runs.directory import RunDirectory
from framework.runs.mirror import committed, fetch_valid
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.objects import Objects, StoreFailed, fetched_once, is_url
from framework.runtime.problem import Problem


def with_fetched_resume(run: RunSection) -> tuple[RunSection, list[Problem]]:
    """Return the section with a local copy for a URL in `resume`, unless the run has its own checkpoints."""
    if not is_url(run.resume) or candidates(RunDirectory(Path(run.dir)).checkpoints):
        return run, []
    try:
        return run.model_copy(update={"resume": str(_fetch_run(run.resume))}), []
    except StoreFailed as failure:
        expected = "the URL of a run or checkpoint that can be read" if failure.is_wrong else "the same command tries again"
        code = Exit.CONFIGURATION if failure.is_wrong else Exit.DISK
        return run, [Problem("run.resume", str(failure), expected, code=code)]
    except RunEnded as end:
        return run, [Problem("run.resume", str(end), code=end.code)]


def _fetch_run(url: str) -> Path:
    """Return the local path of a run or checkpoint in a store, with its rows and its newest valid (or the named) checkpoint.

    Raise StoreFailed if it does not exist or cannot be fetched.
    Raise NoValidCheckpoint if all checkpoints are damaged.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    is_checkpoint = step_of(Path(last)) is not None
    objects = Objects(parent.removesuffix("/checkpoints") if is_checkpoint else url, heeds_signals=True)
    there = objects.listing()
    wanted = [name for name in committed(there) if name == last or not is_checkpoint]
    if not wanted:
        raise StoreFailed(f"{url} has no checkpoint", is_wrong=True)

    def fetch(folder: Path) -> None:
        next(fetch_valid(objects, wanted, there, into=folder / "checkpoints"))
        if "metrics.jsonl" in there:
            objects.get("metrics.jsonl", folder / "metrics.jsonl")

    run = fetched_once([url, *(there[f"checkpoints/{name}/{MANIFEST}"].version for name in wanted)], fetch)
    return next((run / "checkpoints").iterdir()) if is_checkpoint else run
