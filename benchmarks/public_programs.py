"""Public packages, unchanged, as runs: against a plain PyTorch loop, on two processes, and after a SIGKILL.

    python benchmarks/public_programs.py              all programs of benchmarks/public
    python benchmarks/public_programs.py flow ode     some of them
    python benchmarks/public_programs.py --kill all   each is killed under each strategy, not only under one of them
    python benchmarks/public_programs.py --lines      only count the lines
    python benchmarks/public_programs.py --lightning  only compare with the programs in benchmarks/public/with_lightning

Each program is a file in benchmarks/public/conf/experiment, with the Python that it names. It runs in float64, with its rehearsal:
alone, under five strategies on two processes, and again under one of them: all processes of this run are killed after step 7,
the last checkpoint is of step 5, and the same command continues. The plain loop is in benchmarks/public/plain, with its own model,
optimizer, schedule, loss and clipping. It gets the first weights, the batches and the random draws of the run. The table shows two
largest relative differences: of a tensor of the final weights (|difference| / |tensor|), and of a loss. A strategy that cannot run
a program refuses it before the start: then the table shows the reason.
"""

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "benchmarks" / "public"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from comparison import kill_run_after, num_lines  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from framework.cli.run import checked_line, start  # noqa: E402
from framework.modules.parts import repeated  # noqa: E402
from framework.runs.metrics_file import MACHINE  # noqa: E402

NUM_STEPS, SAVE_EVERY, KILL_AFTER = 12, 5, 7  # an epoch has 4 steps
COMMON = ["global_batch_size=12", "trainer.max_epochs=null", f"trainer.max_steps={NUM_STEPS}", "trainer.log_every=1",
          "trainer.eval_every=null", f"checkpoint.every={SAVE_EVERY}", "checkpoint.async_save=false"]  # fmt: skip
STRATEGIES = ("ddp", "zero", "fsdp", "tensor", "pipeline")


@dataclass(frozen=True)
class Program:
    """A program, and how it is not like the others.

    `refused`: strategies, with words of their reason. `idle`: the ends of the names of tensors that are not compared, because no
    loss depends on them: their gradient is zero but for rounding, and the optimizer divides it by its own size.
    """

    precision: str = "fp64"
    refused: dict[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()


OWN_STEP = "the task has its own step"
WHOLE = "this one needs whole tensors"
NO_LINEAR = "divides the features of no linear layer"
READS = "it reads the values of its tensors"


PROGRAMS = {
    "unet": Program(refused={"tensor": NO_LINEAR, "pipeline": OWN_STEP}),
    "navit": Program(refused={"pipeline": "the model does not take its samples without their numbers"}),
    "flow": Program(refused={"pipeline": OWN_STEP}),
    "ode": Program(refused={"tensor": "mixed torch.Tensor and DTensor", "pipeline": READS}),
    "speech": Program(),
    "llama": Program(),
    "bart": Program(refused={"fsdp": WHOLE, "tensor": WHOLE, "pipeline": OWN_STEP}, idle=("k_proj.bias",)),
    "mamba": Program(),
    "swin": Program(),
    "segresnet": Program(refused={"fsdp": WHOLE, "tensor": NO_LINEAR}),
    "molecules": Program(refused={"pipeline": "AttentiveFP has 1 block"}),
    "ppo": Program(precision="fp32", refused={"pipeline": OWN_STEP}),  # the package converts observations to float32
    "diffusion": Program(refused={"pipeline": OWN_STEP}),
    "tabular": Program(refused={"pipeline": "first in the output of backbone.blocks.0.ffn_normalization"}, idle=("W_k.bias",)),
    "transport": Program(refused={"pipeline": OWN_STEP}),
}


def loop_of(name: str, *, folder: str = "plain") -> ModuleType:
    """Import the plain loop of a program, and so the packages that the program needs; or another file that trains it."""
    if str(PROJECT) not in sys.path:
        sys.path.append(str(PROJECT))
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", PROJECT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    return loop


class UnderLightning:
    """A LightningModule and its Trainer, as a plain loop."""

    def __init__(self, name: str, *, batches_per_epoch: int) -> None:
        self._file, self._batches_per_epoch = loop_of(name, folder="with_lightning"), batches_per_epoch

    def build(self) -> nn.Module:
        self._lit = self._file.Lit()
        model: nn.Module = self._lit.model
        return model

    def train(self, model: nn.Module, batches: Iterator[Any]) -> Iterator[float]:
        import lightning as L

        losses: list[float] = []

        class Note(L.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
                if not outputs:  # a module with a loop of its own returns the loss of a step with its last batch
                    return
                if number % trainer.accumulate_grad_batches == 0:
                    losses.append(0.0)
                losses[-1] += float(outputs["loss"])  # Lightning has divided it by the number of batches in a step

        class Loader:
            """A batch is fetched just before its step, because this seeds the draws of the step."""

            def __iter__(_) -> Iterator[Any]:
                return islice(batches, self._batches_per_epoch)

            def __len__(_) -> int:
                return self._batches_per_epoch

        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        self._file.train(self._lit, Loader(), accelerator="cpu", callbacks=[Note()], **quiet)
        return iter(losses)


def plain(loop: Any, line: list[str], folder: Path) -> int:
    """Train a program in its plain loop, or in another that has `build` and `train`; write its weights and the loss of each step as a run does."""
    from framework.build.training import Builder
    from framework.distributed.world import World

    config = checked_line([*line, f"run.dir={folder}"]).config
    assert config is not None
    build = Builder(config, world=World.alone())
    model = loop.build().to(build.precision.parameters).train()
    model.load_state_dict(build.model().state_dict())
    losses = list(loop.train(model, batches(build, model)))
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )  # tied ones too
    rows = [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def batches(build: Any, model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batches of a run. When one is fetched, and in the model, torch's generator is seeded as in the run."""
    draws = build.forward()
    draws.key_draws(repeated(model))
    steps = build.loader(build.source("train"), "train", dp_rank=0, dp_size=1).train(0)
    for index, step in zip(range(NUM_STEPS), steps):
        for micro_batch in step.micro_batches:
            draws.seed_draws(step=index, micro_batch=micro_batch.number)
            yield micro_batch.inputs, micro_batch.targets


class Result(NamedTuple):
    weights: dict[str, Tensor]
    rows: list[dict[str, Any]]  # without what a clock measured

    @classmethod
    def of(cls, folder: Path) -> "Result":
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        kept = [{key: value for key, value in row.items() if key not in MACHINE} for row in rows]
        return cls(load_file(folder / "model.safetensors"), kept)


class Difference(NamedTuple):
    weights: float
    losses: float

    def __str__(self) -> str:
        return "; ".join(f"{value:.0e}" if value else "0" for value in self)


def difference(one: Result, two: Result, *, idle: tuple[str, ...]) -> Difference:
    """Return the largest relative differences of a tensor of the weights, and of a loss that both have."""
    assert one.weights.keys() == two.weights.keys()
    names = [name for name in one.weights if not name.endswith(idle)]
    pairs = [(one.weights[name].double(), two.weights[name].double()) for name in names]
    losses = [{(row["split"], row["step"]): row["loss"] for row in result.rows} for result in (one, two)]
    both = losses[0].keys() & losses[1].keys()
    assert len(both) >= NUM_STEPS
    return Difference(
        max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs),
        max(abs(losses[0][key] - losses[1][key]) / abs(losses[0][key]) for key in both),
    )


def is_same(one: Result, two: Result) -> bool:
    """Return whether two runs have the same rows and the same bits."""
    bits = (torch.equal(tensor, two.weights[name]) for name, tensor in one.weights.items())
    return one.rows == two.rows and one.weights.keys() == two.weights.keys() and all(bits)


def _child(act: Callable[[], int], output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setpgid(0, 0)  # the run's processes are killed together
    os.chdir(PROJECT)
    sys.path.insert(0, str(PROJECT))
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    code = act()
    sys.stdout.flush()
    os._exit(code)


def child(act: Callable[[], int], *, folder: Path, code: int = 0) -> str:
    """Call a function in a forked process, and return its output. Raise RuntimeError if it ends with another exit code."""
    output = folder.with_suffix(".output")
    output.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # so that the child's collector does not copy what it inherits
    process = multiprocessing.get_context("fork").Process(target=_child, args=(act, output))
    process.start()
    process.join()
    if process.exitcode != code:
        raise RuntimeError(f"exit {process.exitcode} in {folder.name}\n{output.read_text()[-4000:]}")
    return output.read_text()


def run(line: list[str], folder: Path, *, kill_after: int = 0, code: int = 0) -> str:
    def act() -> int:
        kill_run_after(kill_after)
        return start([*line, f"run.dir={folder}"])

    return child(act, folder=folder, code=-9 if kill_after else code)


class Measured(NamedTuple):
    from_plain: Difference  # the difference of `single` from the plain loop
    from_single: dict[str, Difference | str]  # the difference of each other strategy from `single`, or why it is refused
    survives: dict[str, bool]  # whether the run that was killed under a strategy has the same bits as the run that was not


def measure(name: str, *, folder: Path, strategies: Sequence[str], killed: Sequence[str]) -> Measured:
    """Run a program in every way. `folder` exists. This process may not have computed on several threads: it is forked."""
    program, loop = PROGRAMS[name], loop_of(name)
    line = [f"experiment={name}", f"precision={program.precision}", *COMMON]
    child(lambda: plain(loop, line, folder / "plain"), folder=folder / "plain")
    run(line, folder / "single")
    single = Result.of(folder / "single")
    from_single, survives = dict[str, Difference | str](), dict[str, bool]()
    for how in strategies:
        many = [*line, f"parallel={how}", "launch.nproc_per_node=2"]
        if (words := program.refused.get(how)) is not None:
            if words not in (output := run(many, folder / how, code=78)):
                raise RuntimeError(f"{name}: {how} refuses it for another reason\n{output}")
            from_single[how] = words
            continue
        run(many, folder / how)
        from_single[how] = difference(single, Result.of(folder / how), idle=program.idle)
        if how in killed:
            run(many, folder / "killed" / how, kill_after=KILL_AFTER)
            if f"{SAVE_EVERY + 1} to {NUM_STEPS}" not in run(many, folder / "killed" / how):
                raise RuntimeError(f"{name}: the run does not continue from the checkpoint of step {SAVE_EVERY}")
            survives[how] = is_same(Result.of(folder / how), Result.of(folder / "killed" / how))
    return Measured(difference(Result.of(folder / "plain"), single, idle=program.idle), from_single, survives)


def difference_from_lightning(name: str, *, folder: Path) -> Difference:
    """Return the difference of a program from what Lightning computes. `folder` exists."""
    line = [f"experiment={name}", f"precision={PROGRAMS[name].precision}", *COMMON]

    def under_lightning() -> int:
        config = checked_line(line).config
        assert config is not None
        batches_per_step = config.global_batch_size // (config.known_micro_batch_size or config.global_batch_size)
        return plain(UnderLightning(name, batches_per_epoch=4 * batches_per_step), line, folder / "lightning")

    child(under_lightning, folder=folder / "lightning")
    run(line, folder / "single")
    return difference(Result.of(folder / "lightning"), Result.of(folder / "single"), idle=PROGRAMS[name].idle)


def lines_of(name: str) -> list[int]:
    """Count the lines of a program here (YAML and Python), in a plain loop and with Lightning, with a model that all need."""
    own = [PROJECT / "conf" / "experiment" / f"{name}.yaml", PROJECT / f"{name}.py"]
    ways = [own, *([PROJECT / folder / own[1].name] for folder in ("plain", "with_lightning"))]
    model = PROJECT / f"{name}_model.py"
    return [sum(num_lines(file) for file in (*files, model) if file.exists()) for files in ways]


def strategies_to_kill(name: str) -> list[str]:
    """Return a strategy that runs the program, another for each program, and the pipeline, which runs few of them."""
    able = [how for how in STRATEGIES if how not in PROGRAMS[name].refused]
    return [able[[*PROGRAMS].index(name) % len(able)], *(["pipeline"] if "pipeline" in able else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*PROGRAMS], metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--kill", choices=["one", "all"], default="one")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--lightning", action="store_true")
    options = parser.parse_args()
    if options.lines:
        print("| program | lines here | lines of the plain loop | lines with Lightning |\n| --- | --- | --- | --- |")
        for name in options.names:
            print(f"| {name} | {' | '.join(map(str, lines_of(name)))} |")
        return
    torch.set_num_threads(1)  # before the forks
    if options.lightning:
        for name in options.names:
            with tempfile.TemporaryDirectory() as folder:
                print(f"| {name} | {difference_from_lightning(name, folder=Path(folder))} |", flush=True)
        return
    print("Each cell: the largest relative difference of a tensor of the weights; of a loss. 0 = the same bits.")
    print(f"| program | single to plain | {' | '.join(f'{how} to single' for how in STRATEGIES)} | killed |")
    print(f"| --- | --- |{' --- |' * len(STRATEGIES)} --- |")
    for name in options.names:
        killed = STRATEGIES if options.kill == "all" else strategies_to_kill(name)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, folder=Path(folder), strategies=STRATEGIES, killed=killed)
        ends = ", ".join(f"{how}: {'the same bits' if same else 'OTHER BITS'}" for how, same in found.survives.items())
        apart = " | ".join(map(str, [found.from_plain, *found.from_single.values()]))
        print(f"| {name} | {apart} | {ends} |", flush=True)


if __name__ == "__main__":
    main()
