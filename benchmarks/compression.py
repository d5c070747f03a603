"""Compressed gradients: the cost in accuracy and the saving in bytes, compared with plain ddp in the same run.

    python benchmarks/compression.py

Two processes train the default CNN on digits with each hook, with three seeds. The bytes are those of the arguments of every
collective of the gradients, per parameter and step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOOKS = [None, "fp16", "bf16", "int8", "top_k", "powersgd"]
SEEDS = (0, 1, 2)
LINE = ["parallel=ddp", "launch.nproc_per_node=2", "trainer.max_epochs=20", "trainer.eval_every=null", "checkpoint.every=null"]

RUN = """
import sys
sys.path[:0] = [ROOT, ROOT + "/benchmarks"]
from compression import count_bytes
from framework.cli.run import start
count_bytes(FOLDER)
sys.exit(start(OVERRIDES))
"""


def count_bytes(folder: str) -> None:
    """Make rank 0 record the bytes that its gradients' collectives send, by counting before each call."""
    import torch.distributed as dist

    from extras.compression import hooks
    from framework.training.loop import Trainer

    sent = {"bytes": 0, "plain": 0}

    def counted(module: Any, name: str, position: int) -> None:
        original = getattr(module, name)

        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            tensor = args[position]
            if tensor.numel() > 64:  # not a flag and not a metric
                sent["bytes"] += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        setattr(module, name, call)

    counted(dist, "all_reduce", 0)
    counted(hooks, "all_gather_single", 1)
    original = Trainer.fit

    def fit(trainer: Trainer) -> bool:
        sent["bytes"] = 0
        is_finished = original(trainer)
        if trainer.world.rank == 0:
            num_parameters = sum(p.numel() for p in trainer.parameters)
            Path(folder, "sent").write_text(str(sent["bytes"] / num_parameters / trainer.progress.step))
        return is_finished

    Trainer.fit = fit  # type: ignore[method-assign, assignment]


def measure(hook: str | None, *, seed: int) -> tuple[float, float, float]:
    """Return the test accuracy, the test loss, and the bytes per parameter and step."""
    with tempfile.TemporaryDirectory() as folder:
        compression = [] if hook is None else [f"parallel.compression={hook}"]
        overrides = [*LINE, *compression, f"seed={seed}", f"run.root={folder}/runs"]
        values = {"ROOT": str(ROOT), "FOLDER": folder, "OVERRIDES": overrides}
        header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        subprocess.run([sys.executable, "-c", header + RUN], capture_output=True, check=True)
        (summary,) = Path(folder).glob("runs/*/*/summary.json")
        test = json.loads(summary.read_text())["metrics"]["test"]["last"]
        # plain DDP sums in C++, which this counter does not see: four bytes of float32
        return test["accuracy"], test["loss"], 4.0 if hook is None else float(Path(folder, "sent").read_text())


def main() -> None:
    print(f"{'hook':10} {'test accuracy':>14} {'test loss':>10} {'bytes a parameter':>18} {'of plain':>9}")
    for hook in HOOKS:
        found = [measure(hook, seed=seed) for seed in SEEDS]
        accuracy, loss, size = (statistics.mean(values) for values in zip(*found))
        print(f"{hook or 'none':10} {accuracy:14.4f} {loss:10.4f} {size:18.3f} {size / 4:9.3f}", flush=True)


if __name__ == "__main__":
    main()
