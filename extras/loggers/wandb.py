"""Weights & Biases: one wandb run for all ranks and all resumes of a run."""

import html
import json
import netrc
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import numpy as np

from extras.loggers.shared import histograms, read_table
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, scalars
from framework.runtime.log import LOGGER


@dataclass(kw_only=True)
class Wandb:
    """Weights & Biases. `mode` auto means WANDB_MODE if it is set.

    Otherwise it means online with an API key; without a key, or if no server answers, it means offline. `timeout_s` limits the
    time of the server's answer at the start, and of the upload of the remaining data at the end.
    """

    extra: ClassVar = "wandb"  # the extra that installs the package
    takes_lists: ClassVar = True

    project: str
    mode: Literal["auto", "online", "offline", "disabled"]
    tags: list[str]
    log_checkpoints: bool
    log_code: bool
    timeout_s: float

    def open(self, run: RunInfo) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise errors, with their contents, go to its makers
        import wandb

        mode = _MODES.get(os.environ.get("WANDB_MODE") if self.mode == "auto" else self.mode)
        mode = mode or ("online" if _has_api_key() else "offline")
        if mode == "online" and not _has_api_key():
            LOGGER.warning("wandb has no API key (WANDB_API_KEY, or `wandb login`), so this run is recorded offline")
            mode = "offline"
        try:
            self._run = self._init(run, mode=mode)
        except (wandb.Error, TimeoutError) as error:
            if mode != "online":
                raise
            wandb.teardown()  # otherwise it keeps the failed run
            self._run = self._init(run, mode="offline")
            LOGGER.warning("wandb cannot be reached, so this run is recorded offline (`wandb sync %s` sends it): %s",
                           self._run.settings.sync_dir, " ".join(str(error).split()))  # fmt: skip
        self._info = run
        # Earlier rows that wandb does not have. Offline these are all rows, because each start writes a new file, and a kill
        # loses unwritten rows. Online these are the rows that were not sent.
        replay(self, run, first=self._run.starting_step)
        if self.log_code:
            self._log_code(run)

    def _init(self, run: RunInfo, *, mode: Literal["online", "offline", "disabled"]) -> Any:
        import wandb

        return wandb.init(
            project=self.project,
            name=f"{run.name}/{run.run_id}",
            id=run.record_id,
            group=run.group,
            tags=self.tags,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run.directory),
            config=run.config,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,  # the URL of a remote may contain a token, and wandb hides only passwords
                git_commit=run.commit,
                save_code=False,
                init_timeout=self.timeout_s,
                finish_timeout=self.timeout_s,
                finish_timeout_raises=True,
            ),
        )

    def log(self, row: Row) -> None:
        # before a kill, steps after the last checkpoint were sent already: steps never go backwards
        if row["step"] >= self._run.starting_step:
            import wandb

            shown = {tag: wandb.Histogram(np_histogram=(np.array(found.counts), np.array(found.edges)))
                     for tag, found in histograms(row).items()}  # fmt: skip
            self._run.log({**scalars(row), **shown}, step=row["step"])

    def media(self, item: Media) -> None:
        if item.step >= self._run.starting_step:
            import wandb

            def table() -> Any:
                columns, *rows = read_table(item.path)
                return wandb.Table(columns=[*columns], data=rows)

            path = str(item.path)
            shown = {
                "image": lambda: wandb.Image(path),
                "audio": lambda: wandb.Audio(path),
                "table": table,
                "text": lambda: wandb.Html(f"<pre>{html.escape(item.path.read_text())}</pre>"),
            }
            self._run.log({item.name: shown[item.kind]()}, step=item.step)

    def _log_code(self, run: RunInfo) -> None:
        """Send the user's modules that the run reaches."""
        import wandb

        artifact = wandb.Artifact(f"code-{run.record_id}", type="code")
        for name, path in run.code.items():
            artifact.add_file(path, name=f"{name.replace('.', '/')}.py")
        self._run.log_artifact(artifact)

    def close(self, summary: dict[str, Any]) -> None:
        for split, rows in summary.get("metrics", {}).items():
            for which, row in rows.items():
                self._run.summary.update({f"{which}/{split}/{name}": row[name] for name in row if name != "split"})
        self._log_predictions()
        if self.log_checkpoints and summary["status"] == "finished":
            self._log_checkpoints(summary)
        try:
            self._run.finish(exit_code=1 if summary["status"] == "failed" else 0)
        except TimeoutError:
            LOGGER.warning("wandb has not received all of this run within %g s: `wandb sync %s` sends it",
                           self.timeout_s, self._run.settings.sync_dir)  # fmt: skip

    def _log_predictions(self) -> None:
        """Send the output of part=predictions as a table: a row for each sample, with its picture if the sample is an image."""
        import wandb

        for path in sorted((self._info.directory / "predictions").glob("first_*.jsonl")):
            rows, strip = [json.loads(line) for line in path.read_text().splitlines()], path.with_suffix(".png")
            if strip.exists():
                from PIL import Image

                with Image.open(strip) as picture:
                    size = picture.height  # the size of each image: the images are squares, side by side
                    for n, row in enumerate(rows):
                        is_there = size * n < picture.width  # a strip has so many images at most
                        row["image"] = wandb.Image(picture.crop((size * n, 0, size * (n + 1), size))) if is_there else None
            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._run.log({f"predictions/{path.stem}": table})

    def _log_checkpoints(self, summary: dict[str, Any]) -> None:
        import wandb

        best = summary["metrics"].get("val", {}).get("best", {}).get("step")
        for path in sorted((self._info.directory / "checkpoints").glob("step_*")):
            step = int(path.name.removeprefix("step_"))
            artifact = wandb.Artifact(f"checkpoint-{self._info.record_id}", type="checkpoint", metadata={"step": step})
            artifact.add_dir(str(path), policy="immutable")  # nothing changes the folder from now on, so no copy is needed
            self._run.log_artifact(artifact, aliases=[path.name, *(["best"] if step == best else [])])


# the values of wandb's own option, and their older names
_MODES: dict[str | None, Literal["online", "offline", "disabled"]] = {
    "online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled",
}  # fmt: skip


def _has_api_key() -> bool:
    if os.environ.get("WANDB_API_KEY") is not None:
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:  # the file into which `wandb login` writes the key
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
