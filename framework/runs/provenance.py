"""provenance.json: for each start of a run, its command, its code, and its hosts and devices."""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.config.arguments import split_flags
from framework.config.code import Code, Functions, changed, code_of, versions
from framework.config.folders import ROOT
from framework.runtime.environment import variables
from framework.runtime.files import write_atomically
from framework.runtime.secrets import redact
from framework.runtime.version import __version__

CHANGED = "the code of {} has changed since its last start"
WAYS = "run.resume=never starts over, run.code=accept continues and records the change; or restore the code"
_LARGEST_DIFF = 1 << 18  # in characters
_GIT_TIMEOUT_S = 10.0


class Provenance:
    """The file in a run's directory: `starts`, and the `code` of each start by its digest."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "provenance.json"

    def read(self) -> dict[str, Any]:
        """Return the content. It is empty if there is no file, or if the file is damaged."""
        try:
            content = json.loads(self.path.read_text())
            starts, code = content["starts"], content["code"]
            is_whole = all(isinstance(start, dict) for start in starts) and isinstance(code, dict)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        return {"starts": starts, "code": code} if is_whole else {"starts": [], "code": {}}

    def changes(self, targets: Iterable[str]) -> list[str]:
        """Return the changes since the latest start in the code that components reach, one line per file."""
        content = self.read()
        before = content["code"].get(content["starts"][-1].get("code")) if content["starts"] else None
        return changed(_modules(before), self._code(targets).modules) if isinstance(before, dict) else []

    def _code(self, targets: Iterable[str]) -> Code:
        start = self._latest()
        folders = [folder for folder in _texts(start, "folders") if os.path.isdir(folder)]
        return code_of(targets, folders=folders, loaded=_loaded(start))

    def _latest(self) -> dict[str, Any]:
        starts = self.read()["starts"]
        return starts[-1] if starts else {}

    @property
    def commit(self) -> str | None:
        """The commit of the latest start, if its folder was in a repository."""
        git = self._latest().get("git")
        return str(git["commit"]) if isinstance(git, dict) and git.get("commit") else None

    def files(self) -> dict[str, Path]:
        """Return the files of the user's modules that the latest start reached, by module. Skip files that no longer exist."""
        start = self._latest()
        modules = self.read()["code"].get(start.get("code"))
        folders = [*_texts(start, "folders"), str(start.get("directory", "")), str(ROOT)]
        found = {name: Path(file) for name, file in _loaded(start).items()}
        for name in modules if isinstance(modules, dict) else ():
            place = name.replace(".", "/")
            paths = [Path(folder, path) for folder in folders for path in (f"{place}.py", f"{place}/__init__.py")]
            if there := [path for path in paths if path.is_file()]:
                found[name] = there[0]
        return {name: path for name, path in found.items() if path.is_file()}

    @property
    def is_damaged(self) -> bool:
        """Return whether the file exists, but cannot be read."""
        return self.path.exists() and not self.read()["starts"]

    def add_start(
        self, targets: Sequence[str], *, line: Sequence[str] | None = None, taken: Sequence[dict[str, str]] = ()
    ) -> None:
        """Add a record of this start. If the user accepts changed code, the record contains the changes.

        `line`: the run's own overrides, if the command was a sweep. `taken`: what the run uses from other runs (lineage.py).
        """
        content, before, accepted, code = self.read(), self._latest(), self.changes(targets), self._code(targets)
        start = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": redact(shlex.join(sys.orig_argv)),
            "environment": _environment(),
            **({} if line is None else {"line": redact(shlex.join(line))}),
            "taken": list(taken),
            "directory": os.getcwd(),
            "host": socket.gethostname(),
            "framework": __version__,
            "python": platform.python_version(),
            "packages": versions(code.packages | {"torch"}),
            "git": git_state(Path.cwd()),
            "code": code.digest,
            "targets": list(targets),
            "folders": code.folders,
            **({"loaded": _loaded(before)} if "loaded" in before else {}),
            **({"accepted": accepted} if accepted else {}),
            "workers": [],
        }
        content["starts"].append(start)
        content["code"][code.digest] = code.modules
        self._write(content)

    def unknown(self, loaded: Iterable[str]) -> list[str]:
        """Return the modules that this start has loaded, but that the run had not loaded at its last checkpoint."""
        start = self._latest()
        known = self.read()["code"].get(start.get("code"), {})
        return [name for name in loaded if name not in known] if "loaded" in start else []

    def add_loaded(self, loaded: Mapping[str, str], *, accepted: Sequence[str] = ()) -> None:
        """Add modules that no import reaches, each with its file, to the latest start's code, and add the accepted changes."""
        content = self.read()
        if not content["starts"]:
            return
        start = content["starts"][-1]
        start["loaded"] = {**_loaded(start), **loaded}
        code = code_of(_texts(start, "targets"), folders=_texts(start, "folders"), loaded=start["loaded"])
        start["code"] = code.digest
        if accepted:
            start["accepted"] = [*_texts(start, "accepted"), *accepted]
        content["code"][code.digest] = code.modules
        self._write(content)

    def add_workers(self, **values: Any) -> None:
        """Add to the latest start's record the hosts and devices of its workers. Workers may start several times."""
        content = self.read()
        if content["starts"]:
            content["starts"][-1].setdefault("workers", []).append({"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values})
            self._write(content)

    def add_data(self, split: str, fingerprint: Mapping[str, str], *, accepted: Sequence[str] = ()) -> None:
        """Add to the latest start's record the fingerprint of a split, and the accepted changes of its data."""
        content = self.read()
        if content["starts"]:
            start = content["starts"][-1]
            start.setdefault("data", {})[split] = dict(fingerprint)
            if accepted:
                start["accepted"] = [*_texts(start, "accepted"), *(f"{split}: {line}" for line in accepted)]
            self._write(content)

    def data(self, split: str) -> dict[str, str]:
        """Return the fingerprint of a split at the latest start that has loaded it; {} if none has."""
        for start in reversed(self.read()["starts"]):
            found = start.get("data")
            if isinstance(found, dict) and isinstance(found.get(split), dict):
                return {str(name): str(text) for name, text in found[split].items()}
        return {}

    def _write(self, content: dict[str, Any]) -> None:
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")


def _texts(start: dict[str, Any], name: str) -> list[str]:
    value = start.get(name)
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _loaded(start: dict[str, Any]) -> dict[str, str]:
    value = start.get("loaded")
    return {name: file for name, file in value.items() if isinstance(file, str)} if isinstance(value, dict) else {}


def _modules(value: dict[str, Any]) -> dict[str, Functions]:
    return {name: functions for name, functions in value.items() if isinstance(functions, dict)}


def _environment() -> dict[str, str]:
    """Return the variables that are part of the command: STEADFAST_CONF, unless an option selected the user's folder."""
    folder = variables().get("STEADFAST_CONF")
    flags, _, _ = split_flags(sys.orig_argv)
    is_option = not flags.keys().isdisjoint(("--config-dir", "--config-path"))
    return {} if is_option or folder is None else {"STEADFAST_CONF": folder}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a folder's repository, and the differences from it. Return None without a repository or git."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    commit, status, diff = (_git(folder, *words) for words in (
        ["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=normal"], _DIFF))  # fmt: skip
    if commit is None:
        return None
    untracked = [line[3:] for line in (status or "").splitlines() if line.startswith("??")]
    return {"commit": commit.strip(), **_differences(diff), "untracked": untracked[:100]}


# `git apply` needs every byte, and the prefixes a/ and b/, whatever the user's configuration of git says
_DIFF = ["-c", "diff.relative=false", "diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short",
         "--src-prefix=a/", "--dst-prefix=b/", "HEAD"]  # fmt: skip


def _differences(diff: str | None) -> dict[str, str]:
    """Return `diff` for the record. If `git apply` could not use it, return with `incomplete` why not."""
    if diff is None:
        return {"diff": "", "incomplete": f"git did not print them within {_GIT_TIMEOUT_S:g} s"}
    recorded, reason = redact(diff), ""
    if recorded != diff:
        reason = "they contain a secret, which is not recorded"
    if len(recorded) > _LARGEST_DIFF:
        reason = f"they have {len(recorded):,} characters, and the record holds at most {_LARGEST_DIFF:,}"
    return {"diff": recorded[:_LARGEST_DIFF], **({"incomplete": reason} if reason else {})}


def _git(folder: Path, *words: str) -> str | None:
    line = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(line, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")  # a source in another encoding keeps its bytes
