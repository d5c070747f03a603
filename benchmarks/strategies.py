"""The time of an optimizer step under each strategy for the same work, compared with one process.

    python benchmarks/strategies.py [processes]          every strategy, compared with one process
    python benchmarks/strategies.py [processes] bare     compared with handwritten torch (comparison/bare_strategies.py)

Every side trains the same GPT, or the same GPT with experts, on the same batches on this machine, in turn. Its processes share
the cores. A figure is the median over the later rows of `metrics.jsonl`. On one machine there is no network to wait for, and
no gain from a second machine: the figures show only the cost of a strategy.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16
WORK = ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.seq_len=64", "dataset.num_train=512",
        "dataset.num_val=1", "dataset.num_test=1", "model=gpt", "model.dim=128", "model.num_layers=4",
        f"global_batch_size={BATCH}", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=40",
        "trainer.log_every=5", "trainer.eval_every=null", "checkpoint.every=null"]  # fmt: skip

NUM_ROUNDS = 7
BARE = {"single": "single", "ddp": "ddp", "fsdp": "fsdp", "tensor": "tensor", "pipeline": "pipeline, 1f1b"}


def strategies(count: int) -> dict[str, list[str]]:
    half = count // 2
    return {
        "single": [],
        "ddp": ["parallel=ddp"],
        "ddp, fp16 sums": ["parallel=ddp", "parallel.compression=fp16"],
        "ddp, int8": ["parallel=ddp", "parallel.compression=int8"],
        "ddp, top_k": ["parallel=ddp", "parallel.compression=top_k"],
        "zero": ["parallel=zero"],
        "fsdp": ["parallel=fsdp"],
        "hsdp": ["parallel=hsdp", f"parallel.replicate={half}", "parallel.shard=2"],
        "tensor": ["parallel=tensor", "parallel.sequence=false"],
        "tensor, sequence": ["parallel=tensor", "parallel.sequence=true"],
        "fsdp+tp": ["parallel=fsdp+tp", f"parallel.shard={half}", "parallel.tensor=2"],
        "pipeline, gpipe": ["parallel=pipeline", "parallel.schedule=gpipe"],
        "pipeline, 1f1b": ["parallel=pipeline", "parallel.schedule=1f1b"],
        **({"pipeline, interleaved": ["parallel=pipeline", "parallel.schedule=interleaved"],
            "pipeline, zero-bubble": ["parallel=pipeline", "parallel.schedule=zero-bubble"],
            "pipeline, zbv": ["parallel=pipeline", "parallel.schedule=zbv"]} if count == 2 else {}),
        "ddp+pp": ["parallel=ddp+pp", f"parallel.replicate={half}", "parallel.pipeline=2"],
        "pp+fsdp+tp": ["parallel=pp+fsdp+tp", "parallel.pipeline=2", f"parallel.shard={half}", "parallel.tensor=1"],
        "context": ["parallel=context", f"parallel.replicate={half}", "parallel.context=2"],
        "context, ring": ["parallel=context", f"parallel.replicate={half}", "parallel.context=2", "parallel.attention=ring"],
        "fsdp+context": ["parallel=fsdp+context", f"parallel.shard={half}", "parallel.context=2"],
        "local-sgd": ["parallel=local-sgd"],
        "diloco": ["parallel=diloco"],
        "gossip": ["parallel=gossip"],
        "parameter-server, sync": ["parallel=parameter-server"],
        "parameter-server, async": ["parallel=parameter-server", "parallel.mode=async"],
        "single, experts": ["model=moe"],
        "ddp, experts": ["parallel=ddp", "model=moe"],
        "expert": ["parallel=expert", f"parallel.replicate={half}", "parallel.expert=2", "model=moe"],
    }  # fmt: skip


def step_ms(overrides: list[str], *, count: int) -> float:
    """Return the milliseconds per step, from the later half of the rows."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [f"launch.nproc_per_node={count}"] if any(word.startswith("parallel=") for word in overrides) else []
        line = [sys.executable, str(ROOT / "train.py"), *WORK, *overrides, *processes, f"run.root={folder}"]
        subprocess.run(line, capture_output=True, check=True)
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        rows = [json.loads(text) for text in metrics.read_text().splitlines()]
    rates = [row["samples_per_s"] for row in rows if row["split"] == "train"]
    return 1000 * BATCH / statistics.median(rates[len(rates) // 2 :])


def bare_step_ms(name: str, *, count: int) -> float:
    """Return the milliseconds per step of a torch script, with torchrun and with as many threads per process as our side."""
    script = str(ROOT / "benchmarks" / "comparison" / "bare_strategies.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // (1 if name == "single" else count)))
    line = [sys.executable, script, name] if name == "single" else [*torchrun, script, name]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": threads})
    return float(done.stdout)


def beside_bare(count: int) -> None:
    print(
        f"{count} processes, {NUM_ROUNDS} rounds\n{'strategy':12} {'torch ms':>9} {'ours ms':>9}  ours / torch, median [quartiles]"
    )
    for name, key in BARE.items():
        pairs = [(bare_step_ms(name, count=count), step_ms(strategies(count)[key], count=count)) for _ in range(NUM_ROUNDS)]
        low, middle, high = statistics.quantiles([ours / bare for bare, ours in pairs], n=4)
        bare, ours = (statistics.median(side) for side in zip(*pairs))
        print(f"{name:12} {bare:9.1f} {ours:9.1f}  {middle:.2f} [{low:.2f}..{high:.2f}]", flush=True)


def main() -> None:
    count = next((int(word) for word in sys.argv[1:] if word.isdigit()), 2)
    beside_bare(count) if "bare" in sys.argv else all_strategies(count)


def all_strategies(count: int) -> None:
    print(f"{count} processes\n{'strategy':24} {'ms a step':>10} {'against single':>15}")
    single = 0.0
    for name, overrides in strategies(count).items():
        taken = step_ms(overrides, count=count)
        single = taken if name.startswith("single") else single  # each row is compared with the single process of its own model
        print(f"{name:24} {taken:10.1f} {taken / single:15.2f}", flush=True)


if __name__ == "__main__":
    main()
