"""Aim: one Aim run for all ranks and all resumes of a run, in a repository beside all runs."""

from dataclasses import dataclass
from typing import Any, ClassVar

from extras.loggers.shared import folder_of_runs, unique_name
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, best_of_monitor, scalars


@dataclass(kw_only=True)
class Aim:
    """Aim. `repo` is a folder or a tracking server (aim://HOST:PORT); with null, it is `aim` in the folder of all runs."""

    extra: ClassVar = "aim"  # the extra that installs the package

    experiment: str
    repo: str | None
    timeout_s: float

    def open(self, run: RunInfo) -> None:
        import aim

        repo = self.repo
        if repo is None:
            folder = folder_of_runs(run) / "aim"
            repo = aim.Repo.from_path(str(folder), init=not folder.exists())
        note = run.directory / "loggers" / "aim"  # the hash of the Aim run, which Aim chooses
        note.parent.mkdir(exist_ok=True)
        known = note.read_text() if note.exists() else None
        self._run = aim.Run(
            known, repo=repo, experiment=self.experiment, force_resume=True, system_tracking_interval=None,
            capture_terminal_logs=False,
        )  # fmt: skip
        note.write_text(self._run.hash)
        self._run.name = unique_name(run)
        self._run["config"] = run.config
        self._run["steadfast"] = {"commit": run.commit, "group": run.group, "run": str(run.directory.resolve())}
        replay(self, run)  # a value of a step that is there already is replaced

    def log(self, row: Row) -> None:
        for tag, value in scalars(row).items():
            split, _, name = tag.partition("/")
            self._run.track(value, name=name, step=row["step"], context={"subset": split})

    def media(self, item: Media) -> None:
        import aim

        kinds = {"image": lambda: aim.Image(str(item.path)), "audio": lambda: aim.Audio(str(item.path), format="wav")}
        text = lambda: aim.Text(item.path.read_text())  # noqa: E731  # also of a table
        self._run.track(kinds.get(item.kind, text)(), name=item.name, step=item.step)

    def close(self, summary: dict[str, Any]) -> None:
        best, step = best_of_monitor(summary)
        if best is not None:
            self._run[f"best/{summary['monitor']}"] = {"value": best, "step": step}
        self._run["status"] = summary["status"]
        self._run.close()
