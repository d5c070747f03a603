"""The cost of the framework before the first step and after the last step, compared with a bare PyTorch script.

    python benchmarks/start.py           one command
    python benchmarks/start.py sweep [jobs]     the cost of each job in a sweep of a hundred: the first ten and the last ten
    python benchmarks/start.py again [jobs]     commands that train nothing: help, a finished run, a finished sweep of a hundred jobs

The benchmark measures from the command to the end of the first step, and from the end of the last step to the prompt. Both
sides are measured in this run, in turn, several times. The medians are compared.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_ROUNDS = 5

BARE_FIRST_STEP = """
import os
import time
import torch
imported = time.time()
import torch.nn.functional as F
torch.manual_seed(0)
def layer(i, o, stride): return torch.nn.Sequential(torch.nn.Conv2d(i, o, 3, stride, 1), torch.nn.GroupNorm(8, o), torch.nn.ReLU())
model = torch.nn.Sequential(layer(1, 32, 1), layer(32, 32, 2), layer(32, 64, 1), layer(64, 64, 1),
                            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
images, labels = torch.rand(1258, 1, 8, 8), torch.randint(10, (1258,))
F.cross_entropy(model(images[:64]), labels[:64]).backward()
optimizer.step()
if os.environ.get("RANK", "0") == "0":
    print(imported, time.time())
"""

FRAMEWORK_FIRST_STEP = """
import os, sys, time
PARENT = os.getpid()
marks = [("interpreter", time.time())]
sys.path.insert(0, ROOT)
from framework.cli import run
marks.append(("import hydra, pydantic, numpy", time.time()))
def mark_after(owner, attribute, name):
    original = getattr(owner, attribute)
    def call(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            marks.append((name, time.time()))
    setattr(owner, attribute, call)
mark_after(run, "compose_line", "compose")
def import_torch(composed, world_size):
    from framework.runtime.torch_compiler import import_dynamo
    import_dynamo()
    marks.append(("import torch, with its compiler", time.time()))
    return check(composed, world_size=world_size)
def check_components(composed, world_size):
    try:
        return import_torch(composed, world_size)
    finally:
        marks.append(("components checked", time.time()))
        import_rest()
def import_rest():
    import framework.modes.train
    from framework.preflight import dry_build
    from framework.build.training import Builder
    from framework.preflight import rehearsal
    from framework.training.loop import Trainer
    mark_after(dry_build, "build_problems", "model and optimizer checked, in a process of its own")
    mark_after(rehearsal, "rehearse", "rehearsal")
    mark_after(Builder, "trainer", "data, model, optimizer")
    original = Trainer.train_step
    def first_step(*args, **kwargs):  # in a forked worker: its marks would be lost
        result = original(*args, **kwargs)
        if "rehearse=false" not in OVERRIDES and "rehearsal" not in dict(marks):
            return result  # a step of the rehearsal
        with open(FOLDER + "/marks", "a") as file:
            print(*(f"{name}={when}" for name, when in [*marks, ("first step", time.time())]), sep=chr(10), file=file)
        os._exit(0) if os.environ.get("WORLD_SIZE", "1") == "1" else os.kill(PARENT, 9)
    Trainer.train_step = first_step
    marks.append(("import the rest", time.time()))
check, run.check = run.check, check_components
run.start(["run.root=" + FOLDER, *OVERRIDES])
"""


BARE_END = """
import sys, time
import torch
import torch.nn.functional as F
from framework import compose
from framework.build import components
config = compose()
dataset = components.dataset(config.dataset)
def load(split):
    source = dataset.load(split)
    return dataset.transform(torch.from_numpy(source.inputs), torch.from_numpy(source.targets), keys=None)
images, labels = load("train")
model = components.model(config.model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
for step in range(20):
    samples = torch.randperm(len(images))[:64]
    optimizer.zero_grad()
    F.cross_entropy(model(images[samples]), labels[samples]).backward()
    optimizer.step()
print(time.time(), flush=True)
with torch.no_grad():
    for split in ("val", "test"):
        images, labels = load(split)
        logits = model.eval()(images)
        print(split, F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER + "/checkpoint.pt")
torch.save(model.state_dict(), FOLDER + "/model.pt")
"""

FRAMEWORK_END = """
import sys, time
sys.argv = ["train.py", "run.root=" + FOLDER, "trainer.max_epochs=null", "trainer.max_steps=20"]
from framework.training.loop import Trainer
original = Trainer.train_step
def train_step(self, *args, **kwargs):
    result = original(self, *args, **kwargs)
    if self.progress.step == 20:
        print(time.time(), flush=True)
    return result
Trainer.train_step = train_step
import framework.runtime.program
framework.runtime.program._is_whole_process = lambda: True  # as `python train.py` is
from framework.main import entry
entry()
"""


def from_last_step_to_prompt(program: str) -> float:
    """Return the seconds from the end of a program's last step to the end of the program."""
    with tempfile.TemporaryDirectory() as folder:
        header = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nFOLDER = {folder!r}\n"
        with subprocess.Popen(
            [sys.executable, "-c", header + program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            told = process.stdout.read()
            process.wait()
            ended = time.time()
    return ended - next(float(line) for line in told.splitlines() if line.replace(".", "").isdigit())


def report_end() -> None:
    pairs = [(from_last_step_to_prompt(BARE_END), from_last_step_to_prompt(FRAMEWORK_END)) for _ in range(2 * NUM_ROUNDS)]
    bare, ours = (statistics.median(side) for side in zip(*pairs))
    extra = statistics.median(one - other for other, one in pairs)
    print(f"\nfrom the last step to the prompt, with two evaluations and the weights: bare {bare:.2f} s, ours {ours:.2f} s, "
          f"{extra:+.2f} s")  # fmt: skip


def bare_first_step(count: int) -> dict[str, float]:
    """Return the seconds until rank 0 of a bare script (DDP under torchrun) has imported torch, and has taken a first step."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bare.py")
        script.write_text(BARE_FIRST_STEP)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
        start = time.time()
        done = subprocess.run([sys.executable, *torchrun, str(script)], capture_output=True, text=True, check=True)
    imported, ended = map(float, done.stdout.splitlines()[0].split())
    return {"import torch": imported - start, "to its first step": ended - start}


def framework_first_step(overrides: list[str]) -> dict[str, float]:
    """Return the seconds of each phase from the command to rank 0's first step, and their sum."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"ROOT": str(ROOT), "FOLDER": folder, "OVERRIDES": overrides}
        header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        start = before = time.time()
        subprocess.run([sys.executable, "-c", header + FRAMEWORK_FIRST_STEP], capture_output=True)
        lines = Path(folder, "marks").read_text().splitlines()
    causes = {}
    for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("first step")) + 1]:
        name, _, when = line.rpartition("=")
        causes["  " + name] = float(when) - before
        before = float(when)
    return causes | {"to its first step": before - start}


def report_start() -> None:
    print(f"\nfrom the command to the end of the first step, seconds (medians of {NUM_ROUNDS} rounds)")
    for count in (1, 2, 4):
        overrides = ["parallel=ddp", f"launch.nproc_per_node={count}"] if count > 1 else []
        rounds = [(bare_first_step(count), framework_first_step(overrides)) for _ in range(NUM_ROUNDS)]
        for name, side in zip((f"bare, {count} processes", " ".join(["python train.py", *overrides])), zip(*rounds)):
            print(f"\n{name}")
            for cause in side[0]:
                print(f"  {cause:55} {statistics.median(one[cause] for one in side):6.2f}")
        ratios = [ours["to its first step"] / bare["to its first step"] for bare, ours in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {'ratio [quartiles]':55} {middle:6.2f} [{low:.2f}..{high:.2f}]", flush=True)


def report_sweep(num_jobs: int = 100) -> None:
    """Print the seconds from the end of one job to the end of the next, for the first and the last ten jobs, and the processor's."""
    with tempfile.TemporaryDirectory() as folder:
        short = ["trainer.max_epochs=null", "trainer.max_steps=5", "trainer.eval_every=null", "model=mlp"]
        line = [sys.executable, str(ROOT / "train.py"), "-m", f"seed=range({num_jobs})", *short, f"run.root={folder}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(line, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        ends = sorted(path.stat().st_mtime for path in Path(folder).glob("**/summary.json"))
    assert len(ends) == num_jobs
    spans = [after - before for before, after in pairwise(ends)]
    print(f"  {'processor time of each job, start and end included':55} {busy_s / num_jobs:6.2f}")
    for name, some in (("first ten", spans[:10]), ("last ten", spans[-10:])):
        low, middle, high = statistics.quantiles(some, n=4)
        print(f"  {name:55} {middle:6.2f} [{low:.2f}..{high:.2f}]")


def report_again(num_jobs: int = 100) -> None:
    """Print the seconds, and those of the processor, of commands that train nothing, because there is nothing left to train."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["trainer.max_epochs=null", "trainer.max_steps=5", "trainer.eval_every=null", "model=mlp", f"run.root={folder}"]
        train = str(ROOT / "train.py")
        commands = {
            "import framework": ["-c", "import framework"],
            "--help": [train, "--help"],
            "a finished run": [train, *run],
            f"a finished sweep of {num_jobs} jobs": [train, "-m", f"seed=range({num_jobs})", *run],
        }
        for name, line in commands.items():
            took = [seconds_of(line) for _ in range(1 + NUM_ROUNDS)][1:]  # the first trains
            wall_s, busy_s = (statistics.median(side) for side in zip(*took))
            print(f"  {name:55} {wall_s:6.2f} {busy_s:6.2f}", flush=True)


def seconds_of(line: list[str]) -> tuple[float, float]:
    """Return the seconds that a program of Python takes, and the seconds of the processor."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, check=True)
    took, after = time.time() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        report_sweep(*map(int, sys.argv[2:]))
    elif sys.argv[1:2] == ["again"]:
        report_again(*map(int, sys.argv[2:]))
    else:
        report_start()
        report_end()
