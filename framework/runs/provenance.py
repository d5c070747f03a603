"""provenance.json: for each start of a run, by which command, from which code, on what it began."""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from framework.config.code import Code, Functions, changed, code_of, versions
from framework.runtime.files import write_atomically
from framework.runtime.secrets import redact
from framework.runtime.version import __version__

_LARGEST_DIFF = 1 << 18  # characters
_GIT_TIMEOUT_S = 10.0


class Provenance:
    """The file of a run's directory: `starts`, and the `code` of each by its digest."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "provenance.json"

    def read(self) -> dict[str, Any]:
        """Return the content; empty if there is none, or it is damaged."""
        try:
            content = json.loads(self.path.read_text())
            starts, code = content["starts"], content["code"]
            is_whole = all(isinstance(start, dict) for start in starts) and isinstance(code, dict)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        return {"starts": starts, "code": code} if is_whole else {"starts": [], "code": {}}

    def changes(self, targets: Iterable[str]) -> list[str]:
        """Return what has changed since the latest start in the code that components reach, a line for each file."""
        content = self.read()
        before = content["code"].get(content["starts"][-1].get("code")) if content["starts"] else None
        return changed(_modules(before), self._code(targets).modules) if isinstance(before, dict) else []

    def _code(self, targets: Iterable[str]) -> Code:
        starts = self.read()["starts"]
        folders = starts[-1].get("folders") if starts else None
        return code_of(targets, folders=filter(os.path.isdir, folders) if isinstance(folders, list) else ())

    def other_version(self) -> str | None:
        """Return the framework's version at the latest start, if it was another."""
        starts = self.read()["starts"]
        before = starts[-1].get("framework") if starts else None
        return before if isinstance(before, str) and before != __version__ else None

    def add_start(self, targets: Sequence[str]) -> None:
        """Add a record of this start, which has the code's changes if the user accepts them."""
        content, accepted, code = self.read(), self.changes(targets), self._code(targets)
        start = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": redact(shlex.join(sys.orig_argv)),
            "directory": os.getcwd(),
            "host": socket.gethostname(),
            "framework": __version__,
            "python": platform.python_version(),
            "packages": versions(code.packages | {"torch"}),
            "git": git_state(Path.cwd()),
            "code": code.digest,
            "folders": code.folders,
            **({"accepted": accepted} if accepted else {}),
            "workers": [],
        }
        content["starts"].append(start)
        content["code"][code.digest] = code.modules
        self._write(content)

    def add_workers(self, **values: Any) -> None:
        """Add to the record of the latest start on which hosts and devices its workers began, which they may do again."""
        content = self.read()
        if content["starts"]:
            content["starts"][-1].setdefault("workers", []).append({"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values})
            self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")


def _modules(value: dict[str, Any]) -> dict[str, Functions]:
    return {name: functions for name, functions in value.items() if isinstance(functions, dict)}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a folder's repository and what differs from it; None outside of a repository, or without git."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    commit, status, diff = (_git(folder, *words) for words in (
        ["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=normal"], ["diff", "HEAD"]))  # fmt: skip
    if commit is None:
        return None
    untracked = [line[3:] for line in (status or "").splitlines() if line.startswith("??")]
    return {"commit": commit.strip(), "diff": redact((diff or "")[:_LARGEST_DIFF]), "untracked": untracked[:100]}


def _git(folder: Path, *words: str) -> str | None:
    line = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(line, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
