"""`steadfast show RUN`, `diff RUN RUN` and `why RUN`: what a run is, how two differ, and where a number comes from."""

import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from framework.cli.run import checked_line
from framework.config.compose import compose_line
from framework.config.frozen_file import recall
from framework.config.identity import EXECUTION, flat, is_below
from framework.config.validation import validate
from framework.launch.claim import print_problems
from framework.runs import compare
from framework.runs.directory import RunDirectory
from framework.runs.lineage import Ancestor, lineage
from framework.runs.metrics_file import is_curve
from framework.runs.report import find_runs, number, printable
from framework.runtime.exits import Exit
from framework.runtime.files import checksum
from framework.runtime.problem import Problem, shown
from framework.runtime.secrets import redact

_MOST_LINES = 40  # of a list of differences
_RUN = "a run's directory, or the beginning of its id"


def about_runs(command: str, arguments: list[str]) -> int:
    """Run `show`, `diff` or `why` with what the command line gives after it. Returns the exit code."""
    work, count = _COMMANDS[command]
    given = [argument for argument in arguments if not argument.startswith("run.root=")]
    root = next((Path(text.partition("=")[2]) for text in arguments if text.startswith("run.root=")), None)
    if len(given) != count or any(argument.startswith("-") for argument in given):
        usage = f"steadfast {command} {' '.join(['RUN'] * count)} [run.root=ROOT]"
        return print_problems([Problem(command, f"needs {count} run{'s' * (count > 1)}", f"{usage}; RUN is {_RUN}")])
    found = [_find(text, root) for text in given]
    if problems := [Problem(command, what, _RUN, code=Exit.NO_VALID_CHECKPOINT) for what in found if isinstance(what, str)]:
        return print_problems(problems)
    print(redact("\n".join(map(printable, work(*found)))))
    return Exit.FINISHED


def _find(text: str, root: Path | None) -> Path | str:
    """Return the run that a text names, by its directory or the beginning of its id; what is wrong, if there is not one."""
    if (path := Path(text)).is_dir() and find_runs(path)[:1] == [path]:
        return path
    defaults = validate(compose_line([])).config
    root = root or Path("runs" if defaults is None else defaults.run.root)
    named = [path for path in find_runs(root) if path.name.startswith(text) or str(path.relative_to(root)) == text]
    if len(named) == 1:
        return named[0]
    several = f"names {len(named)} runs: {', '.join(map(str, named[:5]))}"
    return f"{text} {several if named else f'is neither a run nor the beginning of the id of one below {root}'}"


# --- show


def _show(path: Path) -> list[str]:
    directory = RunDirectory(path)
    summary, start = directory.read_summary(), compare.latest_start(path)
    lines = [f"{_label(path)}: {_state(directory)}", *_pairs([("directory", str(path.resolve())), *_progress(summary)])]
    lines += _section("what it computes, beside the defaults", _settings(path, is_execution=False))
    lines += _section("how it is executed", [*_settings(path, is_execution=True), *_execution(summary, start)])
    lines += _section("metrics", _metrics(summary))
    lines += _section("files", _files(directory))
    where = shlex.quote(str(path))
    return [*lines, *_section("next", [f"steadfast {text}" for text in
            (f"mode=eval run.dir={where}", f"why {where}", f"diff {where} RUN")], is_pairs=False)]  # fmt: skip


def _state(directory: RunDirectory) -> str:
    error = directory.read_summary().get("error")
    return directory.state + (f": {' '.join(str(error).split())}" if error else "")


def _progress(summary: dict[str, Any]) -> list[tuple[str, str]]:
    step, total, samples = (number(summary.get(name)) for name in ("step", "total_steps", "samples_seen"))
    seconds, trained = number(summary.get("wall_s")), number(summary.get("train_s"))
    memory = [number(value) for value in _list(summary.get("memory_gib"))]
    shown_as = {
        "step": f"{step:,.0f}" + (f" of {total:,.0f}" if math.isfinite(total) else ""),
        "samples": f"{samples:,.0f}" + (f", {samples / trained:,.0f} a second of training" if trained > 0 else ""),
        "time": f"{seconds:,.1f} s, {summary.get('restarts', 0)} restarts",
        "parameters": f"{number(summary.get('parameters')):,.0f}",
        "memory": f"{max(memory, default=math.nan):.2f} GiB, of the largest process",
    }
    return [(name, text) for name, text in shown_as.items() if "nan" not in text]


def _settings(path: Path, *, is_execution: bool) -> list[tuple[str, str]]:
    """Return the keys of a run's configuration whose values are not the defaults."""
    try:
        own, checked = flat(recall(path)), checked_line([]).config
        defaults = flat(compose_line([]).config if checked is None else checked.plain())
    except ValueError as error:
        return [("?", str(error))]
    hidden = ("run.id", "run.dir", "run.root", "run.draws")
    keys = [key for key, value in own.items() if value != defaults.get(key) and key not in hidden]
    return [(key, _written(own[key])) for key in keys if is_below(key, EXECUTION) == is_execution]


def _execution(summary: dict[str, Any], start: dict[str, Any]) -> list[tuple[str, str]]:
    workers = [worker for worker in _list(start.get("workers")) if isinstance(worker, dict)][-1:]
    strategy, size = (summary.get(name) for name in ("parallel", "world_size"))
    found = [("strategy", f"{strategy}, {size} process{'es' * (size != 1)}")] if strategy else []
    found += [(name, ", ".join(map(str, _list(worker.get(name))))) for worker in workers for name in ("hosts", "devices")]
    return [*found, ("command", _command(start))] if start else found


def _metrics(summary: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for split, kinds in summary.get("metrics", {}).items():
        for kind in ("last", "best"):
            row = kinds.get(kind, {})
            if kind == "last" or split == "val":
                numbers = "  ".join(f"{name} {number(value):.4f}" for name, value in row.items() if is_curve(name))
                lines.append((f"{split} {kind}", f"step {row.get('step')}  {numbers}"))
    return lines


def _files(directory: RunDirectory) -> list[tuple[str, str]]:
    steps = sorted(path.name for path in directory.checkpoints.glob("step_*")) if directory.checkpoints.is_dir() else []
    found = [("checkpoints", ", ".join(steps))] if steps else []
    return found + [(path.name, f"{path.stat().st_size:,} bytes")
                    for path in sorted(directory.path.iterdir()) if path.is_file() and path.name != "lock"]  # fmt: skip


# --- diff


def _diff(first: Path, second: Path) -> list[str]:
    lines = [f"A  {_label(first)}: {_state(RunDirectory(first))}", f"B  {_label(second)}: {_state(RunDirectory(second))}"]
    try:
        computed, executed = compare.config_differences(first, second)
    except ValueError as error:
        computed, executed = {"config.yaml": (str(error), "")}, {}
    lines += _two("configuration: what decides the id of a run", computed)
    lines += _two("configuration: what does not", executed)
    code = compare.code_differences(first, second)
    lines += _section("code", code or ["the same"], is_pairs=False)
    lines += _two("surroundings of the latest start", compare.environment_differences(first, second))
    lines += _section("rows of metrics.jsonl", _rows(compare.rows_difference(first, second)), is_pairs=False)
    return lines + _section("final weights", [compare.weights_difference(first, second)], is_pairs=False)


def _rows(found: compare.RowsDifference) -> list[str]:
    alone = [f"{count} only in {run}" for run, count in zip("AB", found.num_alone) if count]
    counts = f"{found.num_common} rows are of both" + (f" ({', '.join(alone)})" if alone else "")
    if not found.num_common:
        return [f"{counts}: there is nothing to compare"]
    if found.first is None:
        return [f"{counts}, and all their values are the same, to the last bit (times and speeds are not compared)"]
    step, split = found.first
    values = "  ".join(f"{name} {first!r} and {second!r}" for name, (first, second) in found.values.items())
    largest = f"up to {found.largest:.2g} of a value, anywhere" if math.isfinite(found.largest) else "not by rounding alone"
    same = f"the same up to step {found.last_same}" if found.last_same else "no earlier row is the same"
    return [f"{counts}; {same}", f"first difference: step {step}, {split}: {values}", f"they differ {largest}"]


# --- why


def _why(path: Path) -> list[str]:
    found, directory = lineage(path), RunDirectory(path)
    lines = [
        f"{_label(path)}: {_state(directory)}",
        *_pairs(pair for pair in _metrics(directory.read_summary()) if not pair[0].startswith("train")),
    ]
    if directory.weights.is_file():
        lines += _pairs([("weights", f"model.safetensors, sha256 {checksum(directory.weights, 'sha256')[1]}")])
    lines += [
        "",
        f"It comes from {len(found)} run{'s' * (len(found) > 1)}, in this order:" if len(found) > 1 else "Its starts:",
    ]
    for place, ancestor in enumerate(found, start=1):
        lines += ["", *(f"{f'{place}. ' if not i else '   '}{line}" for i, line in enumerate(_ancestor(ancestor)))]
    return [*lines, "", "To do it again:", *_again(found), "", "To cite it:", *_citation(path, found[-1])]


def _ancestor(ancestor: Ancestor) -> Iterable[str]:
    directory = RunDirectory(ancestor.run)
    yield f"{_label(ancestor.run)} ({directory.path}): {_state(directory)}"
    for parent in ancestor.parents:
        rows = compare.rows_difference(parent.run, ancestor.run)
        begins = f"; its rows begin with those of it, up to step {rows.last_same}" if rows.last_same else ""
        yield f"took {parent.key}={parent.path} from {_label(parent.run)}{begins}"
    if not ancestor.starts:
        yield "there is no record of its starts (provenance.json)"
    earlier: dict[str, str] = {}
    for start in ancestor.starts:
        facts = {"command": _command(start), "in": f"{start.get('host')}:{start.get('directory')}", "code": _code(start)}
        new = [f"{name} {text}" for name, text in facts.items() if earlier.get(name) != text]
        yield f"started {str(start.get('at'))[:16].replace('T', ' ')}" + ("" if new else ", as before")
        yield from (f"  {text}" for text in new)
        yield from (f"  changed in between, and accepted: {text}" for text in _list(start.get("accepted")))
        earlier = facts
    if steps := directory.read_summary().get("continued_at"):
        yield f"interrupted and continued after step {', '.join(map(str, steps))}: which changes no number"


def _code(start: dict[str, Any]) -> str:
    packages = start.get("packages")
    versions = ", ".join(f"{name} {version}" for name, version in packages.items()) if isinstance(packages, dict) else "?"
    return f"{_commit(start)}; steadfast {start.get('framework')}, python {start.get('python')}, {versions}"


def _commit(start: dict[str, Any]) -> str:
    git = start.get("git")
    if not isinstance(git, dict):
        return "not in a git repository"
    lines = [line for line in str(git.get("diff", "")).splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    changes = f" and {len(lines)} changed lines (provenance.json has them)" if lines else ""
    untracked = f", {len(_list(git.get('untracked')))} files that git does not know" if git.get("untracked") else ""
    return f"commit {git.get('commit')}{changes}{untracked}"


def _again(found: list[Ancestor]) -> Iterable[str]:
    checked_out = None
    for ancestor in found:
        for start in ancestor.starts[:1]:
            git = start.get("git")
            if isinstance(git, dict) and git.get("commit") != checked_out:
                checked_out = git.get("commit")
                yield f"  git checkout {checked_out}"
            yield f"  {_command(start)}"


def _citation(path: Path, run: Ancestor) -> list[str]:
    summary, start = RunDirectory(path).read_summary(), run.starts[-1] if run.starts else {}
    test = [text for name, text in _metrics(summary) if name == "test last"]
    began = number(summary.get("began"))
    git = start.get("git")
    notes = [
        f"Steadfast {start.get('framework')}",
        f"commit {git.get('commit')}" if isinstance(git, dict) else "",
        f"test at {' '.join(test[0].split())}" if test else "",
    ]
    year = time.strftime("%Y", time.localtime(began)) if math.isfinite(began) else str(start.get("at"))[:4]
    return [f"  @misc{{{path.name},", f"    title = {{Run {_label(path)}}},", f"    year = {{{year}}},",
            f"    note = {{{'; '.join(filter(None, notes))}}},", "  }"]  # fmt: skip


# --- lines


def _command(start: dict[str, Any]) -> str:
    """Return the command of a start as a user would type it: without the path of the interpreter."""
    try:
        words = shlex.split(str(start.get("command", "")))
    except ValueError:
        return str(start.get("command"))
    return shlex.join([os.path.basename(word) if i == 0 else word for i, word in enumerate(words)])


def _label(path: Path) -> str:
    return "/".join(path.resolve().parts[-2:])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _written(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:{width}}  {text}" for name, text in pairs]


def _section(title: str, items: list[Any], *, is_pairs: bool = True) -> list[str]:
    lines = _pairs(items) if is_pairs else [f"  {text}" for text in items]
    left = len(lines) - _MOST_LINES
    return ["", title, *lines[:_MOST_LINES], *([f"  ... and {left} more"] if left > 0 else [])] if lines else []


def _two(title: str, pairs: compare.TwoValues) -> list[str]:
    items = [(key, f"{first or '-'}  |  {second or '-'}") for key, (first, second) in pairs.items()]
    return _section(title, items) or ["", title, "  the same"]


_COMMANDS: dict[str, tuple[Callable[..., list[str]], int]] = {"show": (_show, 1), "diff": (_diff, 2), "why": (_why, 1)}
