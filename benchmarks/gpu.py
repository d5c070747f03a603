"""The checks of benchmarks/gpu.sh: runs of the real command on one device, compared with each other and with bare scripts."""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOOP = ["trainer.max_epochs=null", "trainer.max_steps=24", "trainer.log_every=1", "trainer.eval_every=null",
        "checkpoint.every=6", "rehearse=false"]  # fmt: skip
CONVOLUTIONS = ["dataset=digits", "model=cnn", "global_batch_size=64", *LOOP]
SMALL = ["dataset=synthetic", "dataset.kind=tokens", "dataset.num_train=512", "dataset.num_val=8", "dataset.num_test=8",
         "dataset.seq_len=64", "task=language_modeling", "model=gpt", "model.dim=128", "model.num_layers=4", "model.num_heads=4",
         "global_batch_size=16", *LOOP]  # fmt: skip
ON_CPU_ALSO = ["dataset.seq_len=16", "model.dim=32"]  # a CPU takes minutes for each run otherwise
ALONE = ["parallel=single", "trainer.max_epochs=null", "checkpoint.every=null", "rehearse=false", "trainer.max_steps=60",
         "trainer.log_every=10", "trainer.eval_every=null"]  # fmt: skip
RECIPES = {  # as in conf/experiment, on one device, one micro-batch per step, with random tokens and artificial images
    "gpt2": ["experiment=gpt2_124m", "global_batch_size=12", "micro_batch_size=12"],
    "resnet50": ["model=resnet", "model.depth=50", "model.stem=imagenet", "model.norm=batch", "model.zero_init_last_norm=true",
                 "dataset=synthetic", "dataset.image_size=224", "dataset.num_classes=1000", "dataset.num_train=2048",
                 "dataset.augment=true", "dataset.num_val=8", "dataset.num_test=8", "trainer.channels_last=true",
                 "optimizer=sgd", "optimizer.lr=0.4", "optimizer.momentum=0.9", "optimizer.nesterov=true", "optimizer.weight_decay=1e-4", "precision=bf16",
                 "global_batch_size=256", "micro_batch_size=256"],
}  # fmt: skip
# after these calls, the host has waited for the device
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass
class Ended:
    """A finished process of a run."""

    code: int
    output: str
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def rows(self) -> list[dict[str, Any]]:
        text = (self.folder / "metrics.jsonl").read_text()
        return [row for row in map(json.loads, text.splitlines()) if row["split"] == "train"]

    @property
    def weights(self) -> bytes:
        return (self.folder / "model.safetensors").read_bytes()


class Failed(Exception):
    """A check has failed."""


class Checks:
    """The checks. Each public method is a check, which returns a text or raises `Failed`."""

    def __init__(self, folder: Path, *, device: str) -> None:
        self._folder, self._device = folder, device
        self._numbers = itertools.count()

    def run(self, *overrides: str, kill_after: int | None = None, may_fail: bool = False, folder: Path | None = None,
            base: Sequence[str] = SMALL, launcher: Sequence[str] = (), imports: Path = ROOT) -> Ended:  # fmt: skip
        """Run the command. If `kill_after` is given, kill all its processes as soon as it has a checkpoint of this step."""
        folder = folder or self._folder / str(next(self._numbers))
        sizes = ON_CPU_ALSO if base is SMALL and self._device == "cpu" else []
        words = ["train.py", *base, *sizes, f"device={self._device}", *overrides, f"run.dir={folder}"]
        command = [sys.executable, *launcher, *words]
        environment = {**os.environ, "PYTHONPATH": f"{imports}:{os.environ.get('PYTHONPATH', '')}"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   start_new_session=True)  # fmt: skip
        if kill_after is not None:
            while process.poll() is None and not (folder / f"checkpoints/step_{kill_after:08d}/manifest.json").exists():
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        if process.returncode and kill_after is None and not may_fail:
            raise Failed(f"{' '.join(overrides)}: exit code {process.returncode}: {output.strip()[-2000:]}")
        return Ended(process.returncode, output, folder)

    def bits(self) -> str:
        """Check that the same command gives the same bits twice, and after a kill -9."""
        first, second = (self.run("trainer.deterministic=true") for _ in range(2))
        self._same(first, second, what="twice")
        lines = EXACT if self._device == "cuda" else EXACT[:3]  # all of them take ten minutes on a CPU
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._repeats, lines))
        return "equal twice; and after kill -9: " + ", ".join(" ".join(line) for line in lines)

    def _repeats(self, line: Sequence[str]) -> None:
        exact, base = ["trainer.deterministic=true", *line], CONVOLUTIONS if "trainer.channels_last=true" in line else SMALL
        whole, killed = self.run(*exact, base=base), self.run(*exact, base=base, kill_after=6)
        after = self.run(*exact, base=base, folder=killed.folder)
        if "continuing from" not in after.output:
            raise Failed(f"{' '.join(line)}: the killed run was over before it was killed")
        self._same(whole, after, what=f"{' '.join(line)}, killed and continued")

    @staticmethod
    def _same(one: Ended, other: Ended, *, what: str) -> None:
        if one.losses != other.losses[-len(one.losses) :]:
            raise Failed(f"{what}: losses differ: {one.losses[-1]} and {other.losses[-1]}")
        if one.weights != other.weights:
            raise Failed(f"{what}: the weights differ")

    def strategies(self) -> str:
        """Check that each strategy, with a group of one process, computes the same as no strategy."""
        return self._compare("single", {name: [f"parallel={name}", "checkpoint.every=null"] for name in STRATEGIES})

    def processes(self) -> str:
        """Check that two processes on one device compute the same as one, with gloo: NCCL needs a device per process."""
        two = ["-m", "torch.distributed.run", "--nproc-per-node=2"]  # our own launcher also needs a device for each process
        lines = {name: [f"parallel={name}", "backend=gloo"] for name in TWO_PROCESSES}
        return self._compare("one process", lines, launcher=two)

    def options(self) -> str:
        """Check the options that change how a step is computed, but not its result."""
        return self._compare("the step without", {option: ["parallel=single", option] for option in OPTIONS})

    def precisions(self) -> str:
        """Check that training with 16 bits, and with 8 bits, learns as with 32 bits.

        The check compares the ends: fp16 skips the first steps, whose gradients overflow until the loss scale has decreased.
        """
        lines = {f"{name} {parallel}": [f"precision={name}", f"parallel={parallel}"] for name, parallel in PRECISIONS}
        return self._compare("fp32", lines, at_most=0.05, last=1)

    def _compare(self, base: str, lines: dict[str, list[str]], *, at_most: float = 1e-3, last: int = 0,
                 launcher: Sequence[str] = ()) -> str:  # fmt: skip
        """Compare the losses of runs with those of a run of one process: all losses, or the last losses."""
        expected = self.run("parallel=single").losses[-last:]
        found, is_well = [], True
        for name, overrides in lines.items():
            try:
                difference = _difference(expected, self.run(*overrides, launcher=launcher).losses[-last:])
                is_well &= difference <= at_most
                found.append(f"{name} {difference:.0e}")
            except Failed as fault:
                is_well = False
                found.append(f"{name}: {fault}")
        if not is_well:
            raise Failed(f"losses differ from those of {base} by " + "\n    ".join(found))
        return f"losses differ from those of {base} by " + ", ".join(found)

    def compile(self) -> str:
        """Check that compiled blocks compute the same, and that they are used."""
        run = self.run("trainer.compile=true", "trainer.max_steps=8")
        if "trainer.compile is off" in run.output:
            raise Failed("no C++ compiler was found")
        difference = _difference(self.run("trainer.max_steps=8").losses, run.losses)
        if difference > 1e-3:
            raise Failed(f"losses differ by {difference:.1e}")
        return f"losses differ from those without by {difference:.0e}"

    def memory(self) -> str:
        """Check that a run without enough memory ends with a reason, and with advice that needs less memory."""
        run = self.run("dataset.seq_len=2048", "global_batch_size=512", "model.dim=1024", "model.num_layers=24", may_fail=True)
        if run.code == 0 or "out of memory" not in run.output.lower():
            raise Failed(f"exit code {run.code}: {run.output.strip()[-300:]}")
        return next(line for line in run.output.splitlines() if "out of memory" in line.lower())[:160]

    def waits(self) -> str:
        """Check that a step never waits for the device, in traces of three steps without a row."""
        found = {" ".join(line): self._waits(line) for line in WAITING}
        said = "; ".join(f"{line}: {waits or 'none'}" for line, waits in found.items())
        if any(found.values()):
            raise Failed(said)
        return said

    def _waits(self, line: Sequence[str]) -> dict[str, int]:
        run = self.run("trainer.profile=true", "trainer.log_every=100", "checkpoint.every=null", *line)
        (trace,) = (run.folder / "profile").glob("*.json")
        events = json.loads(trace.read_text())["traceEvents"]
        steps = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep") and "dur" in event
                 and event.get("cat") != "gpu_user_annotation"]  # the host's  # fmt: skip
        begin, end = min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)
        found: dict[str, int] = {}
        for event in events:
            if event.get("cat") == "cuda_runtime" and begin <= event["ts"] <= end and event["name"].split("_v")[0] in WAITS:
                found[event["name"]] = found.get(event["name"], 0) + 1
        return found

    def rehearsal(self) -> str:
        """Check that a rehearsed start refuses nothing, finds no warning, and computes what the start without computes."""
        expected, found = [], []
        for line in REHEARSED:
            base = CONVOLUTIONS if "model=cnn" in line else SMALL
            plain, rehearsed = self.run(*line, base=base), self.run(*line, "rehearse=true", base=base)
            warned = [text for text in rehearsed.output.splitlines() if "warning" in text.lower()]
            if plain.losses != rehearsed.losses or warned:
                found.append(f"{' '.join(line)}: losses differ by {_difference(plain.losses, rehearsed.losses):.0e}; {warned}")
            expected.append(f"{' '.join(line)} {len(rehearsed.losses)} steps")
        if found:
            raise Failed("; ".join(found))
        return ", ".join(expected)

    def lengths(self) -> str:
        """Check that inputs which stay on the CPU do so under each strategy that allows it, for a model that packs its sequences."""
        (self._folder / "packed.py").write_text(PACKED)
        base = [
            "dataset=map_style",
            "dataset.train={_target_: packed.Data}",
            "dataset.keep_on_cpu=[lengths]",
            "model._target_=packed.Net",
            "global_batch_size=16",
            *LOOP,
        ]
        runs = [self.run(f"parallel={name}", base=base, imports=self._folder).losses for name in ("single", "ddp", "zero")]
        if any(_difference(runs[0], run) > 1e-6 for run in runs):
            raise Failed(f"losses differ: {[run[-1] for run in runs]}")
        return "single, ddp, zero: the same losses"

    def gpt2(self) -> str:
        """Compare the GPT-2 recipe with a bare script."""
        return self._beside_bare("gpt2")

    def resnet50(self) -> str:
        """Compare the ResNet-50 recipe with a bare script."""
        return self._beside_bare("resnet50")

    def airbench(self) -> str:
        """Kill and continue the airbench recipe, and compare it with a bare script of the same method, on synthetic images."""
        from benchmarks.airbench import write_images

        data = self._folder / "airbench"
        write_images(data / "cifar-10-batches-bin", num_train=50_000)
        line = ["experiment=airbench", f"dataset.root={data}", *LOOP, "trainer.deterministic=true"]
        whole, killed = self.run(base=line), self.run(base=line, kill_after=6)
        self._same(whole, self.run(base=line, folder=killed.folder), what="killed and continued")
        command = [sys.executable, "benchmarks/airbench.py", "--device", self._device]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"beside the bare script: {done.stderr.strip()[-500:]}")
        return f"the same bits after kill -9; {done.stdout.strip()}"

    def _beside_bare(self, name: str) -> str:
        plain, exact = self._recipe(name), self._recipe(name, "trainer.deterministic=true")
        rows = plain.rows[3:]
        ours, mfu = statistics.median(row["samples_per_s"] for row in rows), rows[-1].get("mfu")
        command = [sys.executable, "benchmarks/comparison/bare_recipes.py", name, self._device]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"the bare script: {done.stderr.strip()[-500:]}")
        bare = float(done.stdout.split()[-1])
        shown = f", MFU {mfu:.1%}" if mfu is not None else ""
        price = statistics.median(row["step_s"] for row in exact.rows[3:]) / statistics.median(row["step_s"] for row in rows)
        return (f"{ours:.1f} samples a second{shown}; the bare script {bare:.1f}: {ours / bare:.2f}; trainer.deterministic takes "
                f"{price:.2f} of a step without")  # fmt: skip

    def _recipe(self, name: str, *overrides: str) -> Ended:
        """Run a recipe of this repository for a few steps."""
        tokens = self._folder / "tokens"
        if name == "gpt2" and not tokens.is_dir():
            tokens.mkdir()
            for split, count in (("train", 2**21), ("val", 2**15)):
                np.random.default_rng(0).integers(50304, size=count, dtype=np.uint16).tofile(tokens / f"{split}.bin")
        data = [f"dataset.root={tokens}"] if name == "gpt2" else []
        return self.run(*ALONE, *data, *overrides, base=RECIPES[name])


CHECKS = (
    "bits",
    "strategies",
    "processes",
    "options",
    "precisions",
    "compile",
    "rehearsal",
    "lengths",
    "memory",
    "waits",
    "gpt2",
    "resnet50",
    "airbench",
)
ON_CPU = ("bits", "strategies", "processes", "options", "rehearsal", "lengths")  # checks that a CPU can do
TIMED = ("memory", "gpt2", "resnet50", "airbench")  # checks that need the device for themselves
EXACT = (["parallel=single"], ["parallel=fsdp", "precision=bf16"], ["parallel=ddp", "precision=fp16"], ["optimizer=muon"],
         ["precision=bf16", "trainer.compile=true"], ["invariance=bitwise", "micro_batch_size=4"],
         ["parallel=ddp", "precision=bf16", "trainer.channels_last=true"])  # fmt: skip
STRATEGIES = ("ddp", "fsdp", "zero", "tensor", "pipeline", "local-sgd", "diloco", "gossip")
TWO_PROCESSES = ("ddp", "zero")  # gloo can sum and broadcast CUDA memory, but nothing else
OPTIONS = ("trainer.activation_checkpointing=true", "trainer.activation_offload=true", "dataset.num_workers=2")
WAITING = (["parallel=single"], ["parallel=single", "precision=bf16", "trainer.compile=true"], ["parallel=fsdp", "precision=bf16"],
           ["parallel=tensor"], ["parallel=pipeline"], ["parallel=zero"], ["parallel=ddp"])  # fmt: skip
REHEARSED = (["parallel=single"], ["parallel=fsdp", "precision=bf16"], ["parallel=ddp", "trainer.deterministic=true"], ["parallel=tensor"],
             ["model=cnn", "precision=bf16"])  # fmt: skip
PACKED = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        words = torch.randint(1, 50, (12,), generator=draws)
        length = 1 + index % 12
        words[length:] = 0
        return {"words": words, "lengths": torch.tensor(length)}, words.sum() % 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(50, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, words, lengths):
        assert lengths.device.type == "cpu"
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])
"""
PRECISIONS = (("bf16", "single"), ("bf16", "fsdp"), ("fp16", "single"), ("float8", "single"))


def _difference(expected: list[float], found: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", choices=CHECKS)
    given = parser.parse_args()
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu.sh: torch sees no CUDA device here (--device cpu runs what a CPU can show)", file=sys.stderr)
        return 69
    where = torch.cuda.get_device_name() if given.device == "cuda" else "this CPU"
    print(f"torch {torch.__version__} on {where}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(Path(folder), device=given.device)

        def is_well(name: str) -> bool:
            begin, result = time.monotonic(), "ok"
            try:
                said: str = getattr(checks, name)()
            except Failed as fault:
                result, said = "FAILED", str(fault)
            print(f"{name:11} {time.monotonic() - begin:4.0f} s  {result:7} {said}", flush=True)
            return result == "ok"

        names = given.only or (CHECKS if given.device == "cuda" else ON_CPU)
        with ThreadPoolExecutor(8 if given.device == "cuda" else 1) as pool:
            found = list(pool.map(is_well, [name for name in names if name not in TIMED]))
        found += [is_well(name) for name in names if name in TIMED]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
