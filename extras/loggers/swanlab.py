"""SwanLab: one SwanLab run for all ranks and all resumes of a run."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from extras.loggers.shared import empty_folder, unique_name
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, best_of_monitor, scalars


@dataclass(kw_only=True)
class SwanLab:
    """SwanLab. Offline, the folder `loggers/swanlab` in the run directory has all rows; `swanlab sync` sends it.

    `timeout_s` limits the time in which the server must receive the remaining data at the end.
    """

    extra: ClassVar = "swanlab"  # the extra that installs the package

    project: str
    mode: Literal["offline", "online"]
    tags: list[str]
    timeout_s: float

    def open(self, run: RunInfo) -> None:
        import swanlab

        nothing_else = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
        self._run = swanlab.init(
            project=self.project, name=unique_name(run), group=run.group, tags=self.tags, mode=self.mode, reinit=True,
            id=run.record_id, resume="allow", log_dir=str(empty_folder(run, "swanlab")),
            config=run.config | {"steadfast": {"commit": run.commit, "run": str(run.directory.resolve())}},
            settings=swanlab.Settings(interactive=False, probe=nothing_else, terminal={"proxy_type": "none"}),
        )  # fmt: skip
        replay(self, run, first=run.step + 1 if self.mode == "online" else 0)  # the server has the earlier rows

    def log(self, row: Row) -> None:
        self._run.log(scalars(row), step=row["step"])

    def media(self, item: Media) -> None:
        import swanlab

        kinds = {"image": lambda: swanlab.Image(str(item.path)), "audio": lambda: swanlab.Audio(str(item.path))}
        text = lambda: swanlab.Text(item.path.read_text())  # noqa: E731  # also of a table
        self._run.log({item.name: kinds.get(item.kind, text)()}, step=item.step)

    def close(self, summary: dict[str, Any]) -> None:
        best, step = best_of_monitor(summary)
        if best is not None:
            self._run.log({f"best/{summary['monitor']}": best}, step=step)
        self._run.finish("crashed" if summary["status"] == "failed" else "success")
