"""ClearML: one task for all ranks and all resumes of a run."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from extras.loggers.shared import empty_folder, read_table, unique_name
from framework.config.identity import flat
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, best_of_monitor, scalars


@dataclass(kw_only=True)
class ClearML:
    """ClearML. Offline, the session in `loggers/clearml` in the run directory has all rows.

    `clearml.Task.import_offline_session` sends it. `timeout_s` limits the time in which the server must receive the remaining
    data at the end. ClearML's client takes about ten seconds to end.
    """

    extra: ClassVar = "clearml"  # the extra that installs the package

    project: str
    mode: Literal["offline", "online"]
    tags: list[str]
    timeout_s: float

    def open(self, run: RunInfo) -> None:
        is_online = self.mode == "online"
        os.environ["CLEARML_CACHE_DIR"] = str(empty_folder(run, "clearml"))
        from clearml import Task

        Task.set_offline(not is_online)
        name = unique_name(run)
        earlier = Task.get_task(project_name=self.project, task_name=name, allow_archived=False) if is_online else None
        self._task = Task.init(
            project_name=self.project, task_name=name, tags=self.tags, reuse_last_task_id=False,
            continue_last_task=earlier.id if earlier is not None else False, auto_connect_arg_parser=False,
            auto_connect_frameworks={"detect_repository": False}, auto_resource_monitoring=False, auto_connect_streams=False,
        )  # fmt: skip
        self._task.set_initial_iteration(0)
        facts = {"group": run.group or "", "commit": run.commit or "", "run": str(run.directory.resolve())}
        settings = {f"steadfast/{key}": value for key, value in flat(run.config).items()}
        self._task.set_parameters(settings | {f"record/{key}": value for key, value in facts.items()})
        replay(self, run, first=run.step + 1 if is_online else 0)  # the server has the earlier rows

    def log(self, row: Row) -> None:
        for tag, value in scalars(row).items():
            split, _, name = tag.partition("/")
            self._task.get_logger().report_scalar(name, split, value, row["step"])

    def media(self, item: Media) -> None:
        logger, path, step = self._task.get_logger(), str(item.path), item.step
        if item.kind == "image":
            logger.report_image(item.name, item.kind, step, local_path=path)
        elif item.kind == "table":
            logger.report_table(item.name, item.kind, step, table_plot=read_table(item.path))
        else:
            logger.report_media(item.name, item.kind, step, local_path=path)

    def close(self, summary: dict[str, Any]) -> None:
        best, _ = best_of_monitor(summary)
        if best is not None:
            self._task.get_logger().report_single_value(f"best/{summary['monitor']}", best)
        if summary["status"] == "failed" and self.mode == "online":
            self._task.mark_failed()
        self._task.close()
