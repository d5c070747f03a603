"""Public packages, unchanged, as runs: against a plain PyTorch loop, on two processes, and after a SIGKILL.

    python benchmarks/public_programs.py              all programs of benchmarks/public
    python benchmarks/public_programs.py flow ode     some of them
    python benchmarks/public_programs.py --kill both  each is killed under ddp and under fsdp, not only under one of them

Each program is a file in benchmarks/public/conf/experiment, with the Python that it names. It runs in float64, with its rehearsal:
alone, under ddp and under fsdp on two processes, and again under one of them: all processes of this run are killed after step 7,
the last checkpoint is of step 5, and the same command continues. The plain loop has its own optimizer, schedule, loss and
clipping. It gets the first weights and the batches of the run. The table shows two largest relative differences: of a tensor of
the final weights (|difference| / |tensor|), and of a loss.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "benchmarks" / "public"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from comparison import kill_run_after, num_lines  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from framework.cli.run import checked_line, start  # noqa: E402
from framework.config.targets import locate  # noqa: E402
from framework.runs.metrics_file import MACHINE  # noqa: E402

NUM_STEPS, SAVE_EVERY, KILL_AFTER = 12, 5, 7  # an epoch has 4 steps
COMMON = ["precision=fp64", "global_batch_size=12", "trainer.max_epochs=null", f"trainer.max_steps={NUM_STEPS}", "trainer.log_every=1",
          "trainer.eval_every=null", f"checkpoint.every={SAVE_EVERY}", "checkpoint.async_save=false"]  # fmt: skip
STRATEGIES = {name: [f"parallel={name}", "launch.nproc_per_node=2"] for name in ("ddp", "fsdp")}


@dataclass(frozen=True)
class Program:
    """A program's plain loop: the mean loss of a batch, the optimizer, and the scheduler, which is stepped each step or epoch.

    `files` are the Python that a user writes, `alike` are overrides for the comparison with the plain loop.
    """

    loss: Callable[[nn.Module, Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any]
    needs: tuple[str, ...]  # of packages: imported once, before the runs are forked
    every_steps: int = 1
    clip: float | None = None
    files: tuple[str, ...] = ()
    alike: list[str] = field(default_factory=list)


def _of(target: str) -> Callable[..., Any]:
    """Return a function that calls what the name names, which is imported when it is called."""
    return lambda *args, **named: locate(target)(*args, **named)


def _dice(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    dice: Callable[..., Tensor] = locate("segmentation_models_pytorch.losses.DiceLoss")(mode="multiclass")
    return dice(model(images), classes)


def _kld(model: Any, points: Tensor, _: Tensor) -> Tensor:
    kld: Tensor = model.forward_kld(points)
    return kld


def _ctc(model: nn.Module, sound: Tensor, said: dict[str, Tensor]) -> Tensor:
    log_probabilities: Tensor = model(sound).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probabilities, said["text"], said["num_frames"], said["num_letters"])


PROGRAMS = {
    "unet": Program(
        needs=("segmentation_models_pytorch.Unet",),
        loss=_dice,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        scheduler=partial(lr_scheduler.PolynomialLR, total_iters=6, power=0.9),
        every_steps=4,
        files=("of_the_batch.py",),
    ),
    "navit": Program(
        needs=("vit_pytorch.na_vit.NaViT", "lion_pytorch.Lion", "transformers.get_cosine_schedule_with_warmup"),
        loss=lambda model, images, kinds: F.cross_entropy(model(**images), kinds),
        optimizer=partial(_of("lion_pytorch.Lion"), lr=1e-3, weight_decay=0.01),
        scheduler=partial(
            _of("transformers.get_cosine_schedule_with_warmup"), num_warmup_steps=3, num_training_steps=NUM_STEPS
        ),
        clip=1.0,
        alike=["model.dropout=0", "model.token_dropout_prob=null"],  # a plain loop has other random draws
    ),
    "flow": Program(
        needs=("normflows.NormalizingFlow",),
        loss=_kld,
        optimizer=partial(torch.optim.Adamax, lr=5e-3),
        scheduler=partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
        every_steps=4,
        files=("flow.py",),
    ),
    "ode": Program(
        needs=("torchdiffeq.odeint_adjoint",),
        loss=lambda model, starts, paths: (model(starts) - paths).abs().mean(),
        optimizer=partial(torch.optim.RMSprop, lr=1e-2),
        scheduler=partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=NUM_STEPS),
        files=("ode.py",),
    ),
    "speech": Program(
        needs=("conformer.Conformer", "transformers.get_linear_schedule_with_warmup"),
        loss=_ctc,
        optimizer=partial(torch.optim.NAdam, lr=2e-3, betas=(0.9, 0.98)),
        scheduler=partial(
            _of("transformers.get_linear_schedule_with_warmup"), num_warmup_steps=4, num_training_steps=NUM_STEPS
        ),
        clip=1.0,
        files=("speech.py",),
    ),
}


def plain(name: str, line: list[str], folder: Path) -> int:
    """Train a program in a plain loop; write its weights and the loss of each step as a run does."""
    from framework.build.training import Builder
    from framework.distributed.world import World

    config = checked_line([*line, f"run.dir={folder}"]).config
    assert config is not None
    program, build, rows = PROGRAMS[name], Builder(config, world=World.alone()), list[dict[str, Any]]()
    model = build.model().train()
    optimizer = program.optimizer(model.parameters())
    scheduler = program.scheduler(optimizer)
    batches = build.loader(build.source("train"), "train", dp_rank=0, dp_size=1).train(0)
    for number, step in zip(range(1, NUM_STEPS + 1), batches):
        optimizer.zero_grad()
        loss = 0.0
        for part in step.micro_batches:
            of_part = program.loss(model, part.inputs, part.targets) / len(step.micro_batches)
            of_part.backward()
            loss += of_part.item()
        if program.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        optimizer.step()
        if number % program.every_steps == 0:
            scheduler.step()
        rows.append({"split": "train", "step": number, "loss": loss})
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


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


def difference(one: Result, two: Result) -> Difference:
    """Return the largest relative differences of a tensor of the weights, and of a loss that both have."""
    assert one.weights.keys() == two.weights.keys()
    pairs = [(tensor.double(), two.weights[name].double()) for name, tensor in one.weights.items()]
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


def child(act: Callable[[], int], *, folder: Path, is_killed: bool = False) -> str:
    """Call a function in a forked process, and return its output. Raise RuntimeError if it ends in an unexpected way."""
    output = folder.with_suffix(".output")
    output.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # so that the child's collector does not copy what it inherits
    process = multiprocessing.get_context("fork").Process(target=_child, args=(act, output))
    process.start()
    process.join()
    if process.exitcode != (-9 if is_killed else 0):
        raise RuntimeError(f"exit {process.exitcode} in {folder.name}\n{output.read_text()[-4000:]}")
    return output.read_text()


def run(line: list[str], folder: Path, *, kill_after: int = 0) -> str:
    def act() -> int:
        kill_run_after(kill_after)
        return start([*line, f"run.dir={folder}"])

    return child(act, folder=folder, is_killed=kill_after > 0)


class Measured(NamedTuple):
    lines: int  # of YAML and Python
    from_plain: Difference  # the difference of `single` from the plain loop
    from_single: dict[str, Difference]  # the difference of each other strategy from `single`
    survives: dict[str, bool]  # whether the run that was killed under a strategy has the same bits as the run that was not


def measure(name: str, *, folder: Path, strategies: Sequence[str], killed: Sequence[str]) -> Measured:
    """Run a program in every way. `folder` exists. This process may not have computed on several threads: it is forked."""
    program, line = PROGRAMS[name], [f"experiment={name}", *COMMON]
    for target in program.needs:
        locate(target)
    alike = [*line, *program.alike]
    child(lambda: plain(name, alike, folder / "plain"), folder=folder / "plain")
    run(alike, folder / "alike")
    if program.alike:
        run(line, folder / "single")
    single = Result.of(folder / ("single" if program.alike else "alike"))
    from_single, survives = dict[str, Difference](), dict[str, bool]()
    for how in strategies:
        run([*line, *STRATEGIES[how]], folder / how)
        from_single[how] = difference(single, Result.of(folder / how))
    for how in killed:
        run([*line, *STRATEGIES[how]], folder / "killed" / how, kill_after=KILL_AFTER)
        if f"{SAVE_EVERY + 1} to {NUM_STEPS}" not in run([*line, *STRATEGIES[how]], folder / "killed" / how):
            raise RuntimeError(f"{name}: the run does not continue from the checkpoint of step {SAVE_EVERY}")
        survives[how] = is_same(Result.of(folder / how), Result.of(folder / "killed" / how))
    files = [PROJECT / "conf" / "experiment" / f"{name}.yaml", *(PROJECT / file for file in program.files)]
    from_plain = difference(Result.of(folder / "plain"), Result.of(folder / "alike"))
    return Measured(sum(map(num_lines, files)), from_plain, from_single, survives)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*PROGRAMS], metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--kill", choices=["one", "both"], default="one")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before the forks
    print("Each cell: the largest relative difference of a tensor of the weights; of a loss. 0 = the same bits.")
    print("| program | lines | single to plain | ddp to single | fsdp to single | killed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, name in enumerate(options.names):
        killed = [*STRATEGIES] if options.kill == "both" else [*STRATEGIES][number % 2 :][:1]
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, folder=Path(folder), strategies=[*STRATEGIES], killed=killed)
        ends = ", ".join(f"{how}: {'the same bits' if same else 'OTHER BITS'}" for how, same in found.survives.items())
        apart = " | ".join(map(str, [found.from_plain, *found.from_single.values()]))
        print(f"| {name} | {found.lines} | {apart} | {ends} |", flush=True)


if __name__ == "__main__":
    main()
