"""provenance.json: for each start of a run, its command, its code, and its hosts and devices."""

import functools
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel

from framework.config.arguments import split_flags
from framework.config.code import Code, Functions, changed, code_of, find_module
from framework.config.files_read import is_file
from framework.config.frozen_file import digest_of
from framework.runtime.environment import variables
from framework.runtime.files import write_atomically
from framework.runtime.log import LOGGER
from framework.runtime.secrets import redact
from framework.runtime.version import __version__

CHANGED = "the code of {} has changed since its last start"
WAYS = "run.resume=never starts over, run.code=accept continues and records the change; or restore the code"
_LARGEST_DIFF = 1 << 18  # in characters
_GIT_TIMEOUT_S = 10.0


class Git(BaseModel):
    """The commit of a start's folder, and the differences from it."""

    commit: str
    diff: str = ""
    incomplete: str = ""  # why `diff` does not hold all differences
    untracked: list[str] = []


class Parent(BaseModel, frozen=True):
    """A file or folder that a run's configuration names, and the run that has written it."""

    key: str  # the key in the configuration
    path: str
    owner: str  # the directory of the other run
    record: str  # the id of its record at that time; a later run in the same folder has another id


class Workers(BaseModel):
    """The hosts and devices of all ranks, each time that the workers of a start begin."""

    at: str
    hosts: list[str]
    devices: list[str]


class Start(BaseModel):
    """The record of one start of a run."""

    at: str
    command: str
    environment: dict[str, str] = {}
    line: str = ""  # the overrides of this run, if the command was a sweep
    taken: list[Parent] = []
    directory: str
    host: str
    framework: str
    python: str
    packages: dict[str, str]
    git: Git | None
    code: str  # the digest
    targets: list[str]
    folders: list[str]
    loaded: dict[str, str] | None = None  # modules that no import reaches, each with its file, once a checkpoint was written
    accepted: list[str] = []  # changes of the code and the data
    workers: list[Workers] = []
    data: dict[str, dict[str, str]] = {}  # the fingerprint of each split


class Record(BaseModel):
    """The content of provenance.json: the starts, and the code of each start by its digest."""

    starts: list[Start] = []
    code: dict[str, dict[str, Functions]] = {}

    @property
    def latest(self) -> Start | None:
        return self.starts[-1] if self.starts else None

    @property
    def modules(self) -> dict[str, Functions] | None:
        """The code of the latest start, by module. None without a record of it."""
        return self.code.get(self.starts[-1].code) if self.starts else None


class Provenance:
    """The file in a run's directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "provenance.json"

    def read(self) -> Record:
        """Return the content. It is empty if there is no file, or if the file is damaged."""
        try:
            return Record.model_validate(json.loads(self.path.read_text()))
        except (OSError, ValueError, RecursionError):
            return Record()

    @property
    def latest(self) -> Start | None:
        """The record of the latest start."""
        return self.read().latest

    def changes(self, targets: Iterable[str] | None = None) -> list[str]:
        """Return the changes since the latest start in the code that components reach (None: its own), one line per file."""
        record = self.read()
        if record.latest is None or record.modules is None:
            return []
        return changed(record.modules, self._code(record.latest.targets if targets is None else targets).modules)

    def _code(self, targets: Iterable[str]) -> Code:
        start = self.latest
        if start is None:
            return code_of(targets)
        return code_of(targets, folders=filter(os.path.isdir, start.folders), loaded=start.loaded or {})

    def files(self) -> dict[str, Path]:
        """Return the files of the user's modules that the latest start reached, by module. Skip files that no longer exist."""
        record = self.read()
        if (start := record.latest) is None:
            return {}
        folders = (*start.folders, start.directory)
        specs = {name: find_module(name, folders) for name in record.modules or () if not is_file(name)}
        found = {name: spec.origin for name, spec in specs.items() if spec is not None} | (start.loaded or {})
        modules = {name: file for name, file in found.items() if file is not None and not is_file(name)}
        return {name: Path(file) for name, file in modules.items() if os.path.isfile(file)}

    @property
    def is_damaged(self) -> bool:
        """Return whether the file exists, but cannot be read."""
        return self.path.exists() and not self.read().starts

    def add_start(self, targets: Sequence[str], *, line: Sequence[str] = (), taken: Sequence[Parent] = ()) -> None:
        """Add a record of this start. If the user accepts changed code, the record contains the changes.

        `line`: the run's own overrides, if the command was a sweep. `taken`: what the run uses from other runs (lineage.py).
        """
        record, accepted, code = self.read(), self.changes(targets), self._code(targets)
        before = record.latest
        start = Start(
            at=_now(),
            command=redact(shlex.join(sys.orig_argv)),
            environment=_environment(),
            line=redact(shlex.join(line)),
            taken=[*taken],
            directory=os.getcwd(),
            host=socket.gethostname(),
            framework=__version__,
            python=platform.python_version(),
            packages=_versions(code.packages | {"torch"}, of_targets={target.split(".")[0] for target in targets} - {"torch"}),
            git=git_state(Path.cwd()),
            code=code.digest,
            targets=[*targets],
            folders=[*code.folders],
            loaded=None if before is None else before.loaded,
            accepted=accepted,
        )
        known = {} if before is None else before.packages
        if others := [f"{name} {known[name]}, now {v}" for name, v in start.packages.items() if known.get(name, v) != v]:
            LOGGER.warning("other packages than at the last start, whose results may differ: %s", "; ".join(others))
        record.starts.append(start)
        record.code[code.digest] = {**code.modules}
        self._write(record)

    def changes_loaded(self, loaded: Mapping[str, str], *, with_new: bool) -> list[str]:
        """Return how what this process has loaded or read, and no import reaches, differs from the run's last checkpoint.

        `with_new`: modules that the run had not loaded then count too.
        """
        record = self.read()
        if (start := record.latest) is None or start.loaded is None or (before := record.modules) is None:
            return []
        code = code_of(start.targets, folders=start.folders, loaded=loaded).modules
        known = {name: code[name] for name in loaded if name in code and name in before}
        new = [f"{file} is new" for name, file in loaded.items() if name not in before and not is_file(name)]
        return new * with_new + changed({name: before[name] for name in known}, known)

    def add_loaded(self, loaded: Mapping[str, str], *, accepted: Sequence[str] = ()) -> None:
        """Add modules that no import reaches, each with its file, to the latest start's code, and add the accepted changes."""
        record = self.read()
        if (start := record.latest) is not None:
            code, earlier = code_of(start.targets, folders=start.folders, loaded=loaded), record.modules or {}
            unloaded = (start.loaded or {}).keys() - loaded.keys()  # so far: their files may have changed since the start
            code = replace(code, modules={**code.modules, **{name: earlier[name] for name in unloaded if name in earlier}})
            start.loaded = {**(start.loaded or {}), **loaded}
            start.code = code.digest
            start.accepted += accepted
            record.code[code.digest] = {**code.modules}
            self._write(record)

    def add_workers(self, *, hosts: list[str], devices: list[str]) -> None:
        """Add to the latest start's record the hosts and devices of its workers. Workers may start several times."""
        record = self.read()
        if (start := record.latest) is not None:
            start.workers.append(Workers(at=_now(), hosts=hosts, devices=devices))
            self._write(record)

    def add_data(self, split: str, fingerprint: Mapping[str, str], *, accepted: Sequence[str] = ()) -> None:
        """Add to the latest start's record the fingerprint of a split, and the accepted changes of its data."""
        record = self.read()
        if (start := record.latest) is not None:
            start.data[split] = dict(fingerprint)
            start.accepted += (f"{split}: {line}" for line in accepted)
            self._write(record)

    def data(self, split: str) -> dict[str, str]:
        """Return the fingerprint of a split at the latest start that has loaded it; {} if none has."""
        return next((start.data[split] for start in reversed(self.read().starts) if split in start.data), {})

    def _write(self, record: Record) -> None:
        write_atomically(self.path, json.dumps(record.model_dump(exclude_defaults=True), indent=1) + "\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _environment() -> dict[str, str]:
    """Return the variables that are part of the command: STEADFAST_CONF, unless an option selected the user's folder."""
    folder = variables().get("STEADFAST_CONF")
    flags, _, _ = split_flags(sys.orig_argv)
    is_option = not flags.keys().isdisjoint(("--config-dir", "--config-path"))
    return {} if is_option or folder is None else {"STEADFAST_CONF": folder}


def git_state(folder: Path) -> Git | None:
    """Return the commit of a folder's repository, and the differences from it. Return None without a repository or git."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    commit, status, diff = (_git(folder, *words) for words in (
        ["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=normal"], _DIFF))  # fmt: skip
    if commit is None:
        return None
    untracked = [line[3:] for line in (status or "").splitlines() if line.startswith("??")]
    recorded, incomplete = _recordable(diff)
    return Git(commit=commit.strip(), diff=recorded, incomplete=incomplete, untracked=untracked[:100])


# `git apply` needs every byte, and the prefixes a/ and b/, whatever the user's configuration of git says
_DIFF = ["-c", "diff.relative=false", "diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short",
         "--src-prefix=a/", "--dst-prefix=b/", "HEAD"]  # fmt: skip


def _recordable(diff: str | None) -> tuple[str, str]:
    """Return `diff` for the record, and the reason why `git apply` could not use it, if there is one."""
    if diff is None:
        return "", f"git did not print them within {_GIT_TIMEOUT_S:g} s"
    recorded, reason = redact(diff), ""
    if recorded != diff:
        reason = "they contain a secret, which is not recorded"
    if len(recorded) > _LARGEST_DIFF:
        reason = f"they have {len(recorded):,} characters, and the record holds at most {_LARGEST_DIFF:,}"
    return recorded[:_LARGEST_DIFF], reason


def _git(folder: Path, *words: str) -> str | None:
    line = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(line, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")  # a source in another encoding keeps its bytes


def _versions(packages: Iterable[str], *, of_targets: Collection[str]) -> dict[str, str]:
    """Return the versions of installed packages, by their import names; with a hash of the code of those with a `_target_`."""
    found = {}
    for package in sorted(packages):
        with suppress(metadata.PackageNotFoundError, IndexError):
            try:
                there = metadata.distribution(package)
            except metadata.PackageNotFoundError:
                there = metadata.distribution(_distributions().get(package, [])[0])
            found[package] = f"{there.version} ({_hash_of(there)})" if package in of_targets else there.version
    return found


def _hash_of(package: metadata.Distribution) -> str:
    """Return a hash of a package's code, of which its installer has listed the hashes: the version may stay the same."""
    lines = (package.read_text("RECORD") or "").splitlines()
    return digest_of(sorted(line for line in lines if ".py,sha256=" in line))[:8]


_distributions = functools.cache(metadata.packages_distributions)
