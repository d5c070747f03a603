"""`steadfast show RUN`, `diff RUN RUN`, `why RUN`: the facts of a run, the differences of two, and the origin of a number."""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from framework.cli.run import checked_line
from framework.config.compose import compose_line
from framework.config.frozen_file import recall
from framework.config.identity import is_below
from framework.config.validation import validate
from framework.launch.decision import print_problems
from framework.runs import compare
from framework.runs.directory import RunDirectory
from framework.runs.facts import result
from framework.runs.lineage import Ancestor, fate_of, lineage
from framework.runs.metrics_file import last_rows
from framework.runs.provenance import Provenance, Start
from framework.runs.report import find_runs, printable
from framework.runs.settings import execution_of, settings_of
from framework.runs.status import last_step
from framework.runtime.exits import Exit
from framework.runtime.files import checksum
from framework.runtime.problem import Problem
from framework.runtime.secrets import redact

_RUN = "a run's directory, or the beginning of its id"


def about_runs(command: str, arguments: list[str]) -> int:
    """Run `show`, `diff` or `why` with the arguments after it. Return the exit code."""
    work, count = _COMMANDS[command]
    roots = [text.removeprefix("run.root=") for text in arguments if text.startswith("run.root=")]
    is_json, given = "--json" in arguments, [text for text in arguments if not text.startswith(("run.root=", "--json"))]
    if len(given) != count or any(argument.startswith("-") for argument in given):
        usage = " ".join(["steadfast", command, *["RUN"] * count, "[run.root=PATH] [--json]"])
        return print_problems([Problem(command, f"needs {count} run{'s' * (count > 1)}", f"{usage}; RUN is {_RUN}")])
    found = [find(text, Path(roots[-1]) if roots else None) for text in given]
    if problems := [Problem(command, what, _RUN, code=Exit.NO_VALID_CHECKPOINT) for what in found if isinstance(what, str)]:
        return print_problems(problems)
    sections = work(*found)
    if is_json:
        print(redact(json.dumps({section.name: section.plain() for section in sections}, indent=2)))
    else:
        print(redact("\n".join(printable(line) for section in sections for line in section.lines()).strip("\n")))
    return Exit.FINISHED


class Told(NamedTuple):
    """A part of what a command tells: pairs, or lines. `name` is its key in JSON; without a title, lines are not indented."""

    name: str
    title: str
    items: list[Any]

    @property
    def are_pairs(self) -> bool:
        return bool(self.items) and isinstance(self.items[0], tuple)

    def plain(self) -> Any:
        """Return the items for JSON. A pair without a name goes on with the text of the pair before it."""
        if not self.are_pairs:
            return self.items
        found: dict[str, str] = {}
        for name, text in self.items:
            last = name or list(found)[-1]
            found[last] = f"{found[last]}\n{text}" if last in found else text
        return found

    def lines(self) -> list[str]:
        lines = _aligned(self.items) if self.are_pairs else [f"{'  ' * bool(self.title)}{text}" for text in self.items]
        left = len(lines) - _MOST_LINES if self.title else 0
        lines = [*lines[:_MOST_LINES], f"  ... and {left} more"] if left > 0 else lines
        return ["", self.title, *lines] if self.title and lines else lines


def find(text: str, root: Path | None) -> Path | str:
    """Return the run with this directory or this beginning of its id. Return a message if there is not exactly one."""
    if (path := Path(text)).is_dir() and find_runs(path)[:1] == [path]:
        return path
    defaults = validate(compose_line([])).config
    root = root or Path("runs" if defaults is None else defaults.run.root)
    named = [path for path in find_runs(root) if text and path.name.startswith(text) or str(path.relative_to(root)) == text]
    if len(named) == 1:
        return named[0]
    several = f"names {len(named)} runs: {', '.join(map(str, named[:5]))}"
    return f"{text} {several if named else f'is neither a run nor the beginning of the id of a run below {root}'}"


# --- show


def _show(path: Path) -> list[Told]:
    directory, start = RunDirectory(path), Provenance(path).latest
    summary = directory.read_summary()
    step = last_step(summary, last_rows(directory.metrics))
    total = f" of {summary['total_steps']}" if "total_steps" in summary else ""
    known = [("directory", str(path.resolve())), ("step", f"{step:.0f}{total}")]
    computed, executed = _settings(path)
    return [
        Told("run", "", [f"{_label_of(path)}: {_state_line(directory)}"]),
        Told("result", "", [*known, *result(directory, root=str(path.parent))]),
        Told("computes", "what it computes (without the defaults)", computed),
        Told("executes", "how it is executed", [*executed, *_execution(summary, start)]),
        Told("files", "files", _files(directory)),
    ]


def _settings(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the keys of a run's configuration with values that are not the defaults: of the computation, of the execution."""
    try:
        own, checked = recall(path), checked_line([]).config
        defaults = settings_of(compose_line([]).config if checked is None else checked.plain())
    except ValueError as error:
        return [("?", str(error))], []
    execution, hidden = execution_of(own), ("run.id", "run.dir", "run.root")
    values = settings_of(own).items()
    pairs = [(key, value) for key, value in values if value != defaults.get(key, "null") and key not in hidden]
    computed = [(key, value) for key, value in pairs if not is_below(key, execution)]
    return computed, [pair for pair in pairs if pair not in computed]


def _execution(summary: dict[str, Any], start: Start | None) -> list[tuple[str, str]]:
    strategy, size = (summary.get(name) for name in ("parallel", "world_size"))
    found = [("strategy", f"{strategy}, {size} process{'es' * (size != 1)}")] if strategy else []
    if start is None:
        return found
    for workers in start.workers[-1:]:
        found += [("hosts", ", ".join(workers.hosts)), ("devices", ", ".join(workers.devices))]
    return [*found, ("command", command_of(start))]


def _files(directory: RunDirectory) -> list[tuple[str, str]]:
    steps = sorted(path.name for path in directory.checkpoints.glob("step_*")) if directory.checkpoints.is_dir() else []
    found = [("checkpoints", ", ".join(steps))] if steps else []
    return found + [(path.name, f"{path.stat().st_size:,} bytes")
                    for path in sorted(directory.path.iterdir()) if path.is_file() and path.name != "lock"]  # fmt: skip


# --- diff


def _diff(first: Path, second: Path) -> list[Told]:
    try:
        computed, executed = compare.config_differences(first, second)
    except ValueError as error:
        computed, executed = {"config.yaml": (str(error), "")}, {}
    return [
        Told("runs", "", [(name, f"{_label_of(path)}: {_state_line(RunDirectory(path))}")
                             for name, path in (("A", first), ("B", second))]),
        _two("computed", "configuration: keys that decide the id of a run", computed),
        _two("executed", "configuration: other keys", executed),
        Told("code", "code", compare.code_differences(first, second) or ["the same"]),
        _two("environment", "environment of the latest start", compare.environment_differences(first, second)),
        Told("rows", "rows of metrics.jsonl", _rows(compare.rows_difference(first, second))),
        Told("weights", "final weights", [compare.weights_difference(first, second)]),
    ]  # fmt: skip


def _rows(found: compare.RowsDifference) -> list[str]:
    alone = [f"{count} only in {run}" for run, count in zip("AB", found.num_alone) if count]
    counts = f"{found.num_common} rows are in both" + (f" ({', '.join(alone)})" if alone else "")
    if not found.num_common:
        return [f"{counts}: there is nothing to compare"]
    if found.first is None:
        return [f"{counts}, and all their values are the same, to the last bit (times and speeds are not compared)"]
    step, split = found.first
    values = "  ".join(
        f"{name} {_number(first)} and {_number(second)}" for name, (first, second) in list(found.values.items())[:8]
    )
    values += f"  and {len(found.values) - 8} more" if len(found.values) > 8 else ""
    largest = f"by at most {found.largest:.2g} of a value" if math.isfinite(found.largest) else "by more than rounding"
    same = f"the same up to step {found.last_same}" if found.last_same else "no earlier row is the same"
    return [f"{counts}; {same}", f"first difference: step {step}, {split}: {values}", f"they differ {largest}"]


def _number(value: Any) -> str:
    return "a list" if isinstance(value, list) else repr(value)


def _two(name: str, title: str, pairs: compare.TwoValues) -> Told:
    items = [(key, "  |  ".join(text or "-" for text in told_apart(pair))) for key, pair in pairs.items()]
    return Told(name, title, items or ["the same"])


# --- why


def _why(path: Path) -> list[Told]:
    found, directory = lineage(path), RunDirectory(path)
    facts = [pair for pair in result(directory, root="") if pair[0].partition(".")[0] in ("best", "val", "test")]
    if directory.weights.is_file():
        whole = directory.has_whole_weights
        digest = f"sha256 {checksum(directory.weights, hashlib.sha256)[1]}" if whole else "damaged: it is not safetensors"
        facts.append(("weights", f"model.safetensors, {digest}"))
    title = f"It comes from {len(found)} run{'s' * (len(found) > 1)}, in this order:" if len(found) > 1 else "Its starts:"
    lines = list[str]()
    for place, ancestor in enumerate(found, start=1):
        own = [f"{f'{place}. ' if not i else '   '}{line}" for i, line in enumerate(_ancestor(ancestor))]
        lines += ["", *own]
    return [
        Told("run", "", [f"{_label_of(path)}: {_state_line(directory)}"]),
        Told("result", "", facts),
        Told("origin", "", ["", title, *lines]),
    ]


def _ancestor(ancestor: Ancestor) -> Iterable[str]:
    directory = RunDirectory(ancestor.run)
    yield f"{_label_of(ancestor.run)} ({directory.path}): {_state_line(directory)}"
    for parent in ancestor.parents:
        rows = compare.rows_difference(Path(parent.owner), ancestor.run)
        begins = f"; both have the same rows up to step {rows.last_same}" if rows.last_same else ""
        fate = fate_of(parent)
        yield f"took {parent.key}={parent.path} from {_label_of(Path(parent.owner))}" + (
            f" ({fate}: its origin is not known)" if fate else begins
        )
    if not ancestor.starts:
        yield "there is no record of its starts (provenance.json)"
    earlier: dict[str, str] = {}
    for start in ancestor.starts:
        typed = command_of(start)
        facts = {
            "command": typed,
            **({} if start.line in typed else {"job": start.line}),  # the overrides of one run of a sweep
            "in": f"{start.host}:{start.directory}",
            "code": _code(start),
        }
        new = [f"{name} {text}" for name, text in facts.items() if earlier.get(name) != text]
        yield f"started {start.at[:16].replace('T', ' ')}" + ("" if new else ", as before")
        yield from (f"  {text}" for text in new)
        yield from (f"  changed in between, and accepted: {text}" for text in start.accepted)
        earlier = facts
    if steps := directory.read_summary().get("continued_at"):
        what = "" if any(start.accepted for start in ancestor.starts) else ": this changes no number"
        yield f"interrupted and continued after step {', '.join(map(str, steps))}{what}"


def _code(start: Start) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in start.packages.items())
    commit = "not in a git repository"
    if start.git is not None:
        changes = start.git.incomplete or (start.git.diff and "provenance.json has the changes")
        commit = f"commit {start.git.commit}{f' and changes ({changes})' if changes else ''}"
        commit += f", {len(start.git.untracked)} files that git does not know" if start.git.untracked else ""
    return f"{commit}; steadfast {start.framework}, python {start.python}, {versions}"


# --- lines about a run


_MOST_LINES = 40  # per list
_WIDEST, _BEFORE = 60, 20  # characters of a cut text, and how many of them may be before the first difference


def _state_line(directory: RunDirectory) -> str:
    error = directory.read_summary().get("error")
    return directory.state + (f": {' '.join(str(error).split())}" if error else "")


def command_of(start: Start) -> str:
    """Return the command of a start as a user would type it: without the paths of the interpreter and of `steadfast`."""
    try:
        words = shlex.split(start.command)
    except ValueError:  # a secret with a quote was removed from it
        return start.command
    is_installed = [os.path.basename(word) for word in words[1:2]] == ["steadfast"]
    words = ["steadfast", *words[2:]] if is_installed else [os.path.basename(word) for word in words[:1]] + words[1:]
    return "".join(f"{name}={shlex.quote(value)} " for name, value in start.environment.items()) + shlex.join(words)


def _label_of(path: Path) -> str:
    return "/".join(path.resolve().parts[-2:])


def told_apart(texts: Sequence[str]) -> list[str]:
    """Return two different texts, cut to the part in which they begin to differ if one is long."""
    begin = max(0, len(os.path.commonprefix([*texts])) - _BEFORE) if max(map(len, texts)) > _WIDEST else 0
    end = begin + _WIDEST
    return ["... " * (begin > 0) + text[begin:end] + " ..." * (len(text) > end) for text in texts]


def _aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:{width}}  {text}" for name, text in pairs]


# --- the commands of the command line, by name

_COMMANDS: dict[str, tuple[Callable[..., list[Told]], int]] = {"show": (_show, 1), "diff": (_diff, 2), "why": (_why, 1)}

show, diff, trace = (partial(about_runs, name) for name in _COMMANDS)
