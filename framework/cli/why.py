"""`steadfast why RUN`: the runs that a run comes from, and their starts."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from framework.cli.run_lines import aligned, command_of, items_of, label_of, state_line
from framework.runs import compare
from framework.runs.directory import RunDirectory
from framework.runs.facts import result
from framework.runs.lineage import Ancestor, lineage
from framework.runtime.files import checksum


def why(path: Path) -> list[str]:
    found, directory = lineage(path), RunDirectory(path)
    lines = [
        f"{label_of(path)}: {state_line(directory)}",
        *aligned(pair for pair in result(directory, root="") if pair[0] in ("best", "val", "test")),
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
    return lines


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
        typed, line = command_of(start), str(start.get("line", ""))
        facts = {
            "command": typed,
            **({} if line in typed else {"job": line}),  # the overrides of one run of a sweep
            "in": f"{start.get('host')}:{start.get('directory')}",
            "code": _code(start),
        }
        new = [f"{name} {text}" for name, text in facts.items() if earlier.get(name) != text]
        yield f"started {str(start.get('at'))[:16].replace('T', ' ')}" + ("" if new else ", as before")
        yield from (f"  {text}" for text in new)
        yield from (f"  changed in between, and accepted: {text}" for text in items_of(start.get("accepted")))
        earlier = facts
    if steps := directory.read_summary().get("continued_at"):
        yield f"interrupted and continued after step {', '.join(map(str, steps))}: this changes no number"


def _code(start: dict[str, Any]) -> str:
    packages, git = start.get("packages"), start.get("git")
    versions = ", ".join(f"{name} {version}" for name, version in packages.items()) if isinstance(packages, dict) else "?"
    commit = "not in a git repository"
    if isinstance(git, dict):
        changes = git.get("incomplete") or (git.get("diff") and "provenance.json has the changes")
        commit = f"commit {git.get('commit')}{f' and changes ({changes})' if changes else ''}"
        commit += f", {len(items_of(git.get('untracked')))} files that git does not know" if git.get("untracked") else ""
    return f"{commit}; steadfast {start.get('framework')}, python {start.get('python')}, {versions}"
