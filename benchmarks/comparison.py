"""The same five tasks in this framework and in Lightning: lines of code, and the effects of two processes or a SIGKILL.

    python benchmarks/comparison.py --peer PATH_OF_PYTHON_WITH_LIGHTNING            both sides
    python benchmarks/comparison.py                                                 only this framework
    python benchmarks/comparison.py --tasks gan,simclr --peer ...                   some of the tasks
    python benchmarks/comparison.py --variants --peer ...                           Lightning without some causes of
    differences

Each side runs three times, in float64: on one process, on two processes with the same global batch, and on one process that
kills itself with SIGKILL. The kill comes within an epoch, between two checkpoints; then the same command starts the process
again. The second and the third run are compared with the first run: the validation loss, and the weights, as |difference| /
|weights|.
"""

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks" / "comparison"
sys.path.insert(0, str(ROOT))

# An epoch has 20 steps, so that the kill, and the checkpoint of step 24 before it, are in the second epoch.
NUM_STEPS = 34
SAVE_EVERY = 8
KILL_AFTER = 30
SEQ_LEN = 128

DIGITS = ["model.dropout=0.1", "micro_batch_size=16"]
TEXTS = [
    f"dataset.collate={{_target_: framework.data.text.TokenizedRecords, _partial_: false, tokenizer: tokenizer.json, "
    f"length: {SEQ_LEN}, field: txt}}"
]


@dataclass(frozen=True)
class Task:
    """A task: its folder in examples/ (None = the default configuration), and additional overrides."""

    example: str | None
    overrides: list[str] = field(default_factory=list)


TASKS = {
    "digits": Task(None, DIGITS),
    "gan": Task("gan"),
    "simclr": Task("simclr"),
    "self_distillation": Task("self_distillation"),
    "streamed_lm": Task("streamed_lm", TEXTS),
}
COMMON = [
    "precision=fp64",
    "trainer.max_epochs=null",
    f"trainer.max_steps={NUM_STEPS}",
    f"checkpoint.every={SAVE_EVERY}",
    "rehearse=false",
]

OURS = """
import sys
import tarfile
sys.path[:0] = [ROOT, ROOT + "/benchmarks"]
from comparison import kill_run_after
from framework.cli.run import start
kill_run_after(KILL_AFTER)
sys.exit(start(OVERRIDES))
"""


def kill_run_after(step: int) -> None:
    """Make the run kill all its processes with SIGKILL after a step; 0 = never."""
    from framework.training.loop import Trainer

    original = Trainer.train_step

    def train_step(trainer, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = original(trainer, *args, **kwargs)
        parts = trainer.recorder.directory.path.parts
        is_rehearsed = any(part.startswith(("steadfast-", "rehearsal_")) for part in parts)
        if trainer.progress.step == step and not is_rehearsed:
            os.kill(0, signal.SIGKILL)  # the run's process group
        return result

    Trainer.train_step = train_step  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Result:
    val_loss: float
    weights: dict[str, np.ndarray]


def num_lines(path: Path) -> int:
    """Count the lines of a Python or YAML file, without blank lines, comments, docstrings, and lines for the benchmark."""
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        import ast

        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                first = node.body[0]
                lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or first.lineno) - first.lineno + 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and not line.endswith("# benchmark") for line in lines)


def our_lines(task: Task) -> int:
    """Count the lines of an example's files, and the overrides that the benchmark adds to its command."""
    folder = ROOT / "examples" / (task.example or "none")
    return len(task.overrides) + sum(map(num_lines, chain(folder.rglob("*.py"), folder.rglob("*.yaml"))))


def peer_file(name: str) -> Path:
    return PEER / f"lightning_{name}.py"


def write_texts(folder: Path) -> None:
    """Write shards with texts of different lengths (paragraphs of Python's standard library), and a tokenizer of bytes."""
    import sysconfig

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = (part for path in files for part in path.read_bytes().decode("ascii", "ignore").split("\n\n") if len(part) > 1)
    (folder / "shards").mkdir()
    for split, num_shards in {"train": 10, "val": 1, "test": 1}.items():
        for number in range(num_shards):
            with tarfile.open(folder / "shards" / f"{split}-{number:03d}.tar", "w") as archive:
                for place, text in enumerate(islice(texts, 64)):
                    member = tarfile.TarInfo(f"{place:08d}.txt")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def call(command: list[str], *, folder: Path, environment: dict[str, str], is_killed: bool) -> str:
    """Run a command in its own process group, and return its output. Raise RuntimeError if it ends in an unexpected way."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{PEER}", **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, start_new_session=True)
    if done.returncode != (-signal.SIGKILL if is_killed else 0):
        raise RuntimeError(f"exit {done.returncode}: {' '.join(command[:4])}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def ours(
    name: str, *, folder: Path, num_processes: int, kill_after: int = 0, overrides: list[str] | None = None
) -> Result | None:
    """Run a task in a folder, or continue it. Return None if the run is killed."""
    from safetensors.numpy import load_file

    task = TASKS[name]
    line = [*([f"experiment={task.example}"] if task.example else []), *task.overrides, *COMMON, *(overrides or [])]
    line += [f"run.dir={folder / 'run'}"]
    if num_processes > 1:
        line += ["parallel=ddp", f"launch.nproc_per_node={num_processes}"]
    values = {"ROOT": str(ROOT), "KILL_AFTER": kill_after, "OVERRIDES": line}
    header = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    call([sys.executable, "-c", header + OURS], folder=folder, environment={}, is_killed=kill_after > 0)
    if kill_after:
        return None
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return Result(summary["metrics"]["val"]["last"]["loss"], load_file(folder / "run" / "model.safetensors"))


def peer(script: str, *, python: str, folder: Path, num_processes: int, kill_after: int = 0) -> Result | None:
    """Run Lightning's side of a task, which is a program, in a folder, or continue it. Return None if it is killed."""
    options = [f"--devices={num_processes}", f"--steps={NUM_STEPS}", f"--every={SAVE_EVERY}", f"--folder={folder}"]
    environment = {"KILL_AFTER": str(kill_after)}
    (folder / "peer.py").write_text(script)
    command = [python, "peer.py", *options]
    output = call(command, folder=folder, environment=environment, is_killed=kill_after > 0)
    if kill_after:
        return None
    row = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    with np.load(folder / "weights.npz") as file:
        return Result(row["val_loss"], dict(file))


def prepared(name: str, folder: Path) -> Path:
    """Make a copy of a task's folder, with the task's data."""
    example = TASKS[name].example
    if example is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(ROOT / "examples" / example, folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "shards"))
    if name == "streamed_lm":
        write_texts(folder)
    return folder


def difference(one: Result, two: Result) -> tuple[str, str]:
    """Return the relative differences of two results: of the losses and of the weights. 0 means the same bits."""
    squares = [(np.sum((one.weights[key] - two.weights[key]) ** 2), np.sum(one.weights[key] ** 2)) for key in one.weights]
    apart = float(np.sqrt(sum(square for square, _ in squares) / sum(square for _, square in squares)))
    losses = abs(one.val_loss - two.val_loss) / abs(one.val_loss)
    return tuple("0" if value == 0 else f"{value:.0e}" for value in (losses, apart))  # type: ignore[return-value]


def measure(name: str, *, folder: Path, python: str | None = None, script: str = "") -> list[str]:
    """Return the cells of one side of a task: ours, or Lightning's, which is a program for a Python with Lightning."""

    def run(where: str, *, num_processes: int = 1, kill_after: int = 0) -> Any:
        here = folder / where
        if not here.exists():
            prepared(name, here)
        if python is None:
            return ours(name, folder=here, num_processes=num_processes, kill_after=kill_after)
        return peer(script, python=python, folder=here, num_processes=num_processes, kill_after=kill_after)

    alone, together = run("alone"), run("together", num_processes=2)
    run("killed", kill_after=KILL_AFTER)
    continued = run("killed")
    return [*difference(alone, together), *difference(alone, continued)]


def variants() -> Iterator[tuple[str, str, str]]:
    """Yield the task, the name and the program of each variant of Lightning's files."""
    for variant in yaml.safe_load((PEER / "variants.yaml").read_text()):
        script = peer_file(variant["task"]).read_text()
        for old, new in variant["replace"].items():
            if old not in script:
                raise ValueError(f"variants.yaml: {peer_file(variant['task']).name} has no {old!r}")
            script = script.replace(old, new)
        yield variant["task"], variant["name"], script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the Python that has Lightning (benchmarks/comparison/requirements.txt)")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    if options.variants and options.peer is None:
        parser.error("--variants needs --peer")
    tasks = options.tasks.split(",")
    sides: list[tuple[str, str, int | str, dict[str, Any]]] = []
    if options.variants:
        sides = [
            (name, what, "", {"python": options.peer, "script": script}) for name, what, script in variants() if name in tasks
        ]
    else:
        for name in tasks:
            sides.append((name, "here", our_lines(TASKS[name]), {}))
            if options.peer is not None:
                script = peer_file(name).read_text()
                sides.append((name, "Lightning", num_lines(peer_file(name)), {"python": options.peer, "script": script}))
    print("| task | | lines | 2 processes: val loss | weights | after SIGKILL: val loss | weights |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, what, lines, side in sides:
        with tempfile.TemporaryDirectory() as folder:
            cells = measure(name, folder=Path(folder), **side)
        print(f"| {name} | {what} | {lines} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
