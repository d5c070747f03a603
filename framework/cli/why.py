"""`steadfast why RUN`: the origin of a number, how to reproduce it, and how to cite it."""

import hashlib
import math
import re
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from framework.cli.run_lines import aligned, as_typed, command_of, command_words, items_of, label_of, metrics_of, state_line
from framework.config.arguments import FOLDER_FLAGS, split_flags
from framework.runs import compare
from framework.runs.directory import RunDirectory
from framework.runs.lineage import Ancestor, lineage
from framework.runs.provenance import Provenance
from framework.runs.report import number
from framework.runtime.files import checksum


def patch_of(run: Path) -> bytes:
    """Return the differences from the commit at a run's first start. Raise ValueError if there is no whole record of them."""
    starts = Provenance(run).read()["starts"]
    git = starts[0].get("git") if starts else None
    if not isinstance(git, dict) or not (git.get("diff") or git.get("incomplete")):
        raise ValueError(f"{run} was started from a commit without changes, or has no record of its start")
    if git.get("incomplete"):
        raise ValueError(f"the differences from the commit are not all recorded: {git['incomplete']}")
    return str(git["diff"]).encode(errors="surrogateescape")


def why(path: Path) -> list[str]:
    found, directory = lineage(path), RunDirectory(path)
    lines = [
        f"{label_of(path)}: {state_line(directory)}",
        *aligned(pair for pair in metrics_of(directory.read_summary()) if not pair[0].startswith("train")),
    ]
    if directory.weights.is_file():
        whole = directory.has_whole_weights
        digest = f"sha256 {checksum(directory.weights, hashlib.sha256)[1]}" if whole else "damaged: it is not safetensors"
        lines += aligned([("weights", f"model.safetensors, {digest}")])
    lines += [
        "",
        f"It comes from {len(found)} run{'s' * (len(found) > 1)}, in this order:" if len(found) > 1 else "Its starts:",
    ]
    for place, ancestor in enumerate(found, start=1):
        lines += ["", *(f"{f'{place}. ' if not i else '   '}{line}" for i, line in enumerate(_ancestor(ancestor)))]
    return [*lines, "", "To do it again:", *_again(found), "", "To cite it:", *_citation(path, found[-1])]


def _ancestor(ancestor: Ancestor) -> Iterable[str]:
    directory = RunDirectory(ancestor.run)
    yield f"{label_of(ancestor.run)} ({directory.path}): {state_line(directory)}"
    for parent in ancestor.parents:
        rows = compare.rows_difference(parent.run, ancestor.run)
        begins = f"; both have the same rows up to step {rows.last_same}" if rows.last_same else ""
        fate = parent.fate
        yield f"took {parent.key}={parent.path} from {parent.label}" + (
            f" ({fate}: its origin is not known)" if fate else begins
        )
    if not ancestor.starts:
        yield "there is no record of its starts (provenance.json)"
    earlier: dict[str, str] = {}
    for start in ancestor.starts:
        facts = {"command": command_of(start), "in": f"{start.get('host')}:{start.get('directory')}", "code": _code(start)}
        new = [f"{name} {text}" for name, text in facts.items() if earlier.get(name) != text]
        yield f"started {str(start.get('at'))[:16].replace('T', ' ')}" + ("" if new else ", as before")
        yield from (f"  {text}" for text in new)
        yield from (f"  changed in between, and accepted: {text}" for text in items_of(start.get("accepted")))
        earlier = facts
    if steps := directory.read_summary().get("continued_at"):
        yield f"interrupted and continued after step {', '.join(map(str, steps))}: this changes no number"


def _code(start: dict[str, Any]) -> str:
    packages = start.get("packages")
    versions = ", ".join(f"{name} {version}" for name, version in packages.items()) if isinstance(packages, dict) else "?"
    return f"{_commit(start)}; steadfast {start.get('framework')}, python {start.get('python')}, {versions}"


def _commit(start: dict[str, Any]) -> str:
    git = start.get("git")
    if not isinstance(git, dict):
        return "not in a git repository"
    lines = [line for line in str(git.get("diff", "")).splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    changes = f" and {len(lines)} changed lines" if lines else " and changed files" if git.get("diff") else ""
    changes += " (provenance.json has them)" if changes and not git.get("incomplete") else ""
    untracked = f", {len(items_of(git.get('untracked')))} files that git does not know" if git.get("untracked") else ""
    return f"commit {git.get('commit')}{changes}{untracked}"


def _again(found: list[Ancestor]) -> Iterable[str]:
    checked_out = None
    for ancestor in found:
        for start in ancestor.starts[:1]:
            git = start.get("git")
            if isinstance(git, dict) and git.get("commit") != checked_out:
                checked_out = git.get("commit")
                yield f"  git checkout {checked_out}"
            if isinstance(git, dict) and git.get("incomplete"):
                yield f"  (the differences from this commit are not all recorded: {git['incomplete']})"
            elif isinstance(git, dict) and git.get("diff"):
                yield f"  steadfast why {shlex.quote(str(ancestor.run))} patch=changes.patch"
                # from the top: in a subfolder, git passes over other files
                yield '  git -C "$(git rev-parse --show-toplevel)" apply "$PWD/changes.patch"'
            yield f"  {_own_command(start)}{_remark(start)}"
        if not ancestor.starts:
            yield f"  (how {label_of(ancestor.run)} was started is not recorded)"


def _citation(path: Path, run: Ancestor) -> list[str]:
    summary, start = RunDirectory(path).read_summary(), run.starts[-1] if run.starts else {}
    test = [text for name, text in metrics_of(summary) if name == "test last"]
    began = number(summary.get("began"))
    git = start.get("git")
    notes = [
        f"Steadfast {start['framework']}" if "framework" in start else "",
        f"commit {git.get('commit')}" if isinstance(git, dict) else "",
        f"test at {' '.join(test[0].split())}" if test else "",
    ]
    year = time.strftime("%Y", time.localtime(began)) if math.isfinite(began) else str(start.get("at"))[:4]
    title, note = (re.sub(r"([%&_#$])", r"\\\1", text) for text in (f"Run {label_of(path)}", "; ".join(filter(None, notes))))
    return [
        f"  @misc{{{path.resolve().name},",
        f"    title = {{{title}}},",
        f"    year = {{{year}}},",
        f"    note = {{{note}}},",
        "  }",
    ]


def _remark(start: dict[str, Any]) -> str:
    """Return how many processes a start had, if its command does not say it: torchrun, mpirun or srun started them."""
    workers = items_of(start.get("workers"))
    hosts = items_of(workers[0].get("hosts")) if workers and isinstance(workers[0], dict) else []
    is_said = "nproc_per_node" in str(start.get("command")) or len(hosts) < 2
    return "" if is_said else f"  # on {len(hosts)} processes"


def _own_command(start: dict[str, Any]) -> str:
    """Return the command of one run. For a sweep, return the command of the job, with the sweep's flags that name options."""
    words, line = command_words(start), start.get("line")
    is_program = (word == "steadfast" or word.endswith(".py") or words[i - 1 : i + 1] == ["-m", "framework"]
                  for i, word in enumerate(words))  # fmt: skip
    first = next((i for i, found in enumerate(is_program, start=1) if found), 1)  # of the arguments
    flags, _, _ = split_flags(words[first:])
    if not isinstance(line, str) or "--multirun" not in flags:
        return command_of(start)
    options = [word for flag, value in flags.items() if flag in FOLDER_FLAGS for word in (flag, value)]
    return f"{as_typed([*words[:first], *options], start)} {line}"
