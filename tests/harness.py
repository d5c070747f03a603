"""Running the real command in tests: in a child forked from the warm test process, so that a run costs tenths of a second."""

import fnmatch
import gc
import importlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  # these are what a run would import: every forked child has them
import numpy as np
import torch
import torch.distributed.elastic.rendezvous.static_tcp_rendezvous
import torch.distributed.fsdp
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import framework.data.synthetic
import framework.launch.worker
import framework.loggers.console
import framework.modes.train
import framework.modules.pretrained
import framework.parallel.parallelize
import framework.preflight.dry_build
import framework.preflight.optimizer
import framework.preflight.rehearsal
import framework.runs.provenance
import framework.tasks.language_modeling
import models.cnn
import models.gpt
import models.mlp  # noqa: F401
from framework.build import components
from framework.cli.run import admit, checked_line, start
from framework.config.compose import compose_line
from framework.config.frozen_file import recall
from framework.config.overrides import parse
from framework.config.schema import RunConfig
from framework.runs.metrics_file import MACHINE
from framework.runtime.exits import Exit
from framework.runtime.preemption import PREEMPTION
from framework.runtime.torch_compiler import import_dynamo
from train import main

import_dynamo()
compose_line([])  # Hydra's plug-ins and parsers too
torch.set_num_threads(1)  # a pool of OpenMP threads would not survive the fork

_FORK = multiprocessing.get_context("fork")


def num_operations(group: Any) -> int:
    """Return how many operations this rank has started on a gloo group."""
    count: int = group._get_sequence_number_for_group()
    return count


_COMPOSED = set[tuple[str, ...]]()


@dataclass(frozen=True)
class Ended:
    code: int
    output: str  # stdout and stderr
    root: Path

    @property
    def directory(self) -> Path:
        found = [
            path.parent for path in files_below(self.root, "config.yaml") if not {"wandb", "loggers"} & {*path.parts}
        ]  # they have one too
        assert len(found) == 1, f"{len(found)} run directories in {self.root}: {found}\n{self.output}"
        return found[0]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model.safetensors")


def checked(*overrides: str) -> RunConfig:
    """Return the complete configuration of a command line that has no problem."""
    found = checked_line(list(overrides))
    assert found.config is not None, found.problems
    return found.config


def together(*acts: Callable[[], None]) -> Callable[[], None]:
    def plant() -> None:
        for act in acts:
            act()

    return plant


def files_below(root: Path, pattern: str) -> list[Path]:
    """Return the files below `root` of such names, also while a run deletes there (pathlib's `**` fails at that before Python 3.13)."""
    return sorted(Path(folder, name) for folder, _, names in os.walk(root) for name in fnmatch.filter(names, pattern))


class Says:
    """Equal to a line that begins with the words' first, the key, and has the others in this order: wording is free to change.

    `...` only shows the reader that words are left out.
    """

    def __init__(self, words: str) -> None:
        self.words = words
        self._pattern = ".*".join(re.escape(word) for word in words.split() if word != "...") + ".*\n?"

    def __eq__(self, line: object) -> bool:
        return isinstance(line, str) and re.fullmatch(self._pattern, line) is not None

    def __repr__(self) -> str:
        return f"Says({self.words!r})"


def wait_for(condition: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def wait_for_checkpoint(root: Path) -> None:
    wait_for(lambda: bool(list(root.glob("*/*/checkpoints/step_*"))), what=f"a checkpoint in {root}", timeout_s=100)


def begin(
    *overrides: str,
    root: Path,
    before: Callable[[], None] | None = None,
    leave: Callable[[int], None] = os._exit,
    with_curves: bool = False,
    run: Callable[[list[str]], int] = start,
) -> Any:
    """Start `python train.py OVERRIDES run.root=ROOT` in a child process of a group of its own; return the process.

    `run` takes the line: `start`, or what `python train.py -m` does.
    `before` runs in the child first: to plant a fault. `leave` ends it; sys.exit does so as an interpreter would.
    The picture of the curves, a third of a short run's time, is drawn only on demand; so is the rehearsal made.
    """
    root.mkdir(parents=True, exist_ok=True)
    compose_once(overrides)
    import_for(overrides)
    rehearse = [] if any(word.startswith(("rehearse=", "mode=")) for word in overrides) else ["rehearse=false"]
    line = [*overrides, *rehearse, f"run.root={root}"]
    process = _FORK.Process(target=_child, args=(line, _output(root), before, leave, with_curves, run))
    process.start()
    return process


def refused(*words: str) -> str:
    """Return what is said of a line that is refused before the start, with nothing written. It is checked here, without a process."""
    rehearse = [] if any(word.startswith(("rehearse=", "mode=")) for word in words) else ["rehearse=false"]
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()) as said:
        code = admit([*words, *rehearse, f"run.root={folder}/runs"], world_size=None)
        assert code == Exit.CONFIGURATION and not os.listdir(folder), said.getvalue()
    return said.getvalue()


def compose_once(overrides: Sequence[str]) -> None:
    """Compose the options that are chosen here, so that the children inherit what it takes: Hydra's parsers and files."""
    for word in overrides:
        parse(word)
    choices = tuple(word for word in overrides if re.match(r"\w+=[\w+-]+$", word))
    if choices not in _COMPOSED:
        _COMPOSED.add(choices)
        with suppress(Exception):  # the command itself will tell
            compose_line([*overrides])


# what a command with such a word would import in its child, for a second of its time
_IMPORTS = {"optuna": ["framework.sweep.search", "alembic.command", "optuna.storages._rdb.models", "sqlalchemy.dialects.sqlite"],
            "metric=": ["torchmetrics.classification"], "wandb": ["wandb"]}  # fmt: skip


def import_for(words: Sequence[str]) -> None:
    """Import what the children for a command of these words would."""
    for part, modules in _IMPORTS.items():
        if any(part in word for word in words):
            for module in modules:
                importlib.import_module(module)
    freeze()


def freeze() -> None:
    """Let no collection in a child touch (and so copy) what it inherits. What earlier tests have left, such as stores, goes first."""
    gc.collect()  # looks at what came since the last time
    gc.freeze()


def _output(root: Path) -> Path:
    return root.parent / f"{root.name}.output"


def end(process: Any, *, root: Path, timeout_s: float = 120.0) -> Ended:
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout_s} s\n{_output(root).read_text()}")
    return Ended(process.exitcode, _output(root).read_text(), root)


def command(*overrides: str, root: Path, timeout_s: float = 120.0, **options: Any) -> Ended:
    """Run `python train.py OVERRIDES run.root=ROOT` to its end; the options are those of `begin`."""
    return end(begin(*overrides, root=root, **options), root=root, timeout_s=timeout_s)


def typed(*words: str, directory: Path, timeout_s: float = 120.0, before: Callable[[], None] | None = None) -> Ended:
    """Run `python train.py WORDS` in a directory as a shell would, flags and all, to its end."""

    def enter() -> None:
        os.chdir(directory)
        if before is not None:
            before()

    import_for(words)
    root = directory / "runs"
    process = _FORK.Process(target=_child, args=([*words], _output(root), enter, os._exit, False, main))
    process.start()
    return end(process, root=root, timeout_s=timeout_s)


def _child(
    overrides: list[str],
    output: Path,
    before: Callable[[], None] | None,
    leave: Callable[[int], None],
    with_curves: bool,
    run: Callable[[list[str]], int] = start,
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setpgid(0, 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    try:
        if not with_curves:
            framework.modes.train.draw_curves = lambda *_, **__: None
        framework.runs.provenance.git_state = lambda _: None  # it takes git a while
        os.fsync = lambda descriptor: None  # no test cuts the power but of a model of a disk (tests/torture/power_cut.py)
        if before is not None:
            before()
        code = run(overrides)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code)


def finished(*overrides: str, root: Path, **options: Any) -> Ended:
    """Run a command that must finish, and not find its run finished by another strategy, which is the same run."""
    ended = command(*overrides, root=root, **options)
    assert ended.code == 0, f"exit {ended.code}: {overrides}\n{ended.output}"
    if "finished already" in ended.output:
        strategy = compose_line([*overrides]).config["parallel"]
        assert recall(ended.directory)["parallel"] == strategy, f"another strategy has finished it: {overrides}"
    return ended


_ONCE: dict[tuple[Any, ...], Ended] = {}
_FOLDER = tempfile.TemporaryDirectory(prefix="steadfast_once_")


def once(*overrides: str, **options: Any) -> Ended:
    """Run a command that must finish, once in this process, for all tests that compare with it and change nothing of it."""
    key = (*overrides, *options.items())
    if key not in _ONCE:
        _ONCE[key] = finished(*overrides, root=Path(_FOLDER.name, str(len(_ONCE)), "runs"), **options)
    return _ONCE[key]


class Counting(TorchDispatchMode):
    """Counts torch's operations, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*args, **kwargs or {})


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Put `call` in the place of `owner.name`, which it is given before its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: call(original, *args, **kwargs))


def before_each(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let each call of `owner.name` begin with `act`, which is given its arguments."""
    around(owner, name, lambda original, *args, **kwargs: (act(*args, **kwargs), original(*args, **kwargs))[1])


def after_each(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let each call of `owner.name` end with `act`, which is given its arguments."""
    around(owner, name, lambda original, *args, **kwargs: (original(*args, **kwargs), act(*args, **kwargs))[0])


def signal_before(owner: Any, name: str) -> None:
    """Let a process send itself SIGTERM before a call of `owner.name`, and wait until the signal, which a thread may hear, is there."""

    def send(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: PREEMPTION.requested, what="the signal")

    before_each(owner, name, send)


def note_steps() -> None:
    """Let each Forward note as `latest` the step, from 0, that it was last seeded for in training."""
    from framework.engine.forward import Forward

    def seed_draws(forward: Any, *, step: int | None, **_: Any) -> None:
        if step is not None:
            forward.latest = step

    before_each(Forward, "seed_draws", seed_draws)


def split_of(run: Ended, split: str) -> tuple[Any, torch.Tensor]:
    """Return the inputs of a run's split, as its model takes them, and the targets."""
    dataset = components.dataset(recall(run.directory)["dataset"])
    source = dataset.load(split)
    inputs, targets = dataset.transform(*map(torch.from_numpy, source.gather(np.arange(len(source)))), keys=None)
    return inputs, targets


def model_of(run: Ended) -> torch.nn.Module:
    """Return the model of a run as its constructor makes it, with the first weights."""
    config = recall(run.directory)
    return components.model(config["model"], seed=config["seed"])


def outputs_of(run: Ended, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a run's final weights give for a split, the whole split at once, by torch alone; and the targets."""
    (inputs, targets), module = split_of(run, split), model_of(run)
    module.to(next(iter(run.weights.values())).dtype).load_state_dict(run.weights, strict=True)
    with torch.no_grad():
        return module.eval()(inputs.to(next(module.parameters()).dtype) if inputs.is_floating_point() else inputs), targets


def exact_rows(ended: Any) -> list[dict[str, Any]]:
    """Return the rows of a command (Ended), or of forked ranks (Trained), without what a clock or the machine has measured."""
    return [{key: value for key, value in row.items() if key not in MACHINE} for row in ended.rows]


def assert_same_bits(actual: Any, expected: Any) -> None:
    """The same rows and bit-identical parameters."""
    assert exact_rows(actual) == exact_rows(expected)
    mine, theirs = actual.weights, expected.weights
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), f"{name} differs by {(mine[name] - theirs[name]).abs().max()}"


def assert_close(actual: Any, expected: Any, *, tolerance: float = 1e-10) -> None:
    """The same rows and parameters, up to `tolerance` (relative to the larger of the value and 1)."""
    mine, theirs = exact_rows(actual), exact_rows(expected)
    assert [(row["step"], row["split"]) for row in mine] == [(row["step"], row["split"]) for row in theirs]
    for one, other in zip(mine, theirs):
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        for key in one:
            assert is_close(one[key], other[key], tolerance), (key, one, other)
    for name, tensor in expected.weights.items():
        difference = (actual.weights[name].double() - tensor.double()).abs() / tensor.double().abs().clamp(min=1.0)
        assert difference.max() <= tolerance, f"{name} differs by {difference.max()}"


def assert_computes_or_is_refused(
    line: Sequence[str], words: Sequence[str], said: str | None, *, root: Path, tolerance: float = 1e-10
) -> None:
    """With these words the line computes what it does alone, or is refused with what is said, and nothing is written."""
    ended = command(*line, *words, f"rehearse={str(said is not None).lower()}", root=root)
    if said is None:
        assert ended.code == 0, ended.output
        assert_close(ended, once(*line), tolerance=tolerance)
    else:
        assert ended.code == 78 and said in ended.output, ended.output
        assert not list(root.iterdir())


def is_close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two values, or lists of values, are equal up to `tolerance` (relative to the larger of the value and 1)."""
    if isinstance(other, list):
        return len(one) == len(other) and all(is_close(*pair, tolerance) for pair in zip(one, other))
    is_number = not isinstance(other, str | None) and one is not None
    return bool(abs(one - other) <= tolerance * max(1.0, abs(other)) if is_number else one == other)
