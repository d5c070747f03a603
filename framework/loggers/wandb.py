"""Weights & Biases: one wandb run for all ranks and all resumes of a run."""

import netrc
import secrets
from typing import Any, Literal

from framework.environment import variable
from framework.loggers.sink import RunInfo
from framework.metrics import read_rows


class Wandb:
    """`mode` auto is online with an API key and offline without one."""

    def __init__(self, *, project: str, mode: Literal["auto", "online", "offline", "disabled"]) -> None:
        self.project = project
        self.mode = mode

    def open(self, run: RunInfo) -> None:
        import wandb

        mode = self.mode if self.mode != "auto" else ("online" if _has_api_key() else "offline")
        self._run = wandb.init(
            project=self.project,
            name=f"{run.name}/{run.run_id}",
            id=_wandb_id(run),
            resume="allow",
            mode=mode,
            dir=str(run.directory),
            config=run.config,
            # no git: the URL of a remote may hold a token, of which wandb hides passwords only
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        # What wandb does not have of the steps before: all of them offline, where each start writes a file of its own
        # and a kill loses what it held; online, what had not been sent.
        for row in read_rows(run.directory / "metrics.jsonl"):
            if row["step"] >= self._run.starting_step:
                self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        shown = {name: value for name, value in row.items() if name not in ("step", "split") and value is not None}
        values = {f"{row['split']}/{name}": value for name, value in shown.items()}
        self._run.log(values, step=row["step"])

    def close(self, summary: dict[str, Any]) -> None:
        self._run.finish(exit_code=0 if summary.get("status") in ("finished", "preempted") else 1)


def _wandb_id(run: RunInfo) -> str:
    """Return the id that this run's directory has kept since its first start."""
    path = run.directory / "wandb_id"
    if not path.exists():
        path.write_text(f"{run.run_id}-{secrets.token_hex(4)}")
    return path.read_text()


def _has_api_key() -> bool:
    if variable("WANDB_API_KEY") is not None:
        return True
    try:  # where `wandb login` leaves the key
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
