"""Comet: one experiment for all ranks and all resumes of a run."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from extras.loggers.shared import empty_folder, unique_name
from framework.config.identity import flat
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, best_of_monitor, scalars


@dataclass(kw_only=True)
class Comet:
    """Comet. Offline, the archive in `loggers/comet` in the run directory has all rows; `comet upload` sends it.

    `timeout_s` limits the time in which the server must receive the remaining data at the end, or the archive is written.
    """

    extra: ClassVar = "comet"  # the extra that installs the package

    project: str
    mode: Literal["offline", "online"]
    tags: list[str]
    timeout_s: float

    def open(self, run: RunInfo) -> None:
        os.environ.setdefault("COMET_INTERNAL_SENTRY_DSN", "")  # otherwise errors, with their contents, go to its makers
        import comet_ml

        is_online = self.mode == "online"
        nothing_else = dict.fromkeys(
            ("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details", "auto_log_co2",
             "auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_histogram_weight_logging"), False
        )  # fmt: skip
        settings = comet_ml.ExperimentConfig(
            name=unique_name(run), tags=self.tags, display_summary_level=0,
            offline_directory=None if is_online else str(empty_folder(run, "comet")), **nothing_else,
        )  # fmt: skip
        key = 2 * run.record_id.replace("-", "")  # at least 32 letters and digits, at most 50
        self._experiment = comet_ml.start(
            project_name=self.project, experiment_key=key, mode="get_or_create" if is_online else "create", online=is_online,
            experiment_config=settings,
        )  # fmt: skip
        self._experiment.log_parameters(flat(run.config))
        self._experiment.log_others({"group": run.group, "commit": run.commit, "run": str(run.directory.resolve())})
        replay(self, run, first=run.step + 1 if is_online else 0)  # the server has the earlier rows

    def log(self, row: Row) -> None:
        self._experiment.log_metrics(scalars(row), step=row["step"])

    def media(self, item: Media) -> None:
        path, step = str(item.path), item.step
        if item.kind == "image":
            self._experiment.log_image(path, name=item.name, step=step)
        elif item.kind == "audio":
            self._experiment.log_audio(path, file_name=item.name, step=step)
        elif item.kind == "table":
            self._experiment.log_asset(path, file_name=item.name, step=step)
        else:
            self._experiment.log_text(item.path.read_text(), step=step, metadata={"name": item.name})

    def close(self, summary: dict[str, Any]) -> None:
        best, _ = best_of_monitor(summary)
        self._experiment.log_others({"status": summary["status"], f"best/{summary['monitor']}": best})
        self._experiment.end()
