"""FSDP's options of memory against traffic: gradients reduced in each micro-batch, blocks gathered ahead."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from framework.engine.forward import Forward
from models.gpt import Block
from tests.harness import assert_close, assert_same_bits, before_each, finished, once

LINE = ["precision=fp64", "global_batch_size=16", "micro_batch_size=2", "trainer.max_epochs=null", "trainer.max_steps=3",
        "trainer.log_every=1", "trainer.eval_every=null", "dataset=synthetic", "dataset.num_train=66", "dataset.kind=tokens",
        "task=language_modeling", "dataset.seq_len=13", "dataset.vocab_size=16", "model=gpt", "model.dim=64", "model.num_layers=4",
        "model.num_heads=4", "checkpoint.every=null", "rehearse=false"]  # fmt: skip
TWO = ["parallel=fsdp", "launch.nproc_per_node=2"]


def held_bytes() -> int:
    """Return the bytes of all tensors of this process, and of their gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn of being asked what they are
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    plain = [
        getattr(t, "_local_tensor", t) for one in tensors for t in (one, one.grad if one.is_leaf else None) if t is not None
    ]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in plain)}
    return sum(storages.values())


def noting_memory(file: Path) -> Callable[[], None]:
    """Return what lets rank 0 note, before each micro-batch of the first step, the bytes that it holds."""

    def note(forward: Forward, *, step: int | None, **_: Any) -> None:
        if step == 0 and dist.get_rank() == 0:
            with file.open("a") as lines:
                lines.write(f"{held_bytes()}\n")

    return lambda: before_each(Forward, "seed_draws", note)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_gradients_reduced_in_each_micro_batch_are_the_same_and_shards(strategy: str, tmp_path: Path) -> None:
    is_fsdp = strategy == "fsdp"
    line = [*LINE, f"parallel={strategy}", f"launch.nproc_per_node={2 if is_fsdp else 4}"]
    held = {}
    for name, more in (("step", []), ("micro_batch", ["parallel.reduce_every=micro_batch"])):
        run = finished(*line, *more, root=tmp_path / name, before=noting_memory(tmp_path / f"{name}.txt"))
        assert_close(run, once(*LINE))
        held[name] = list(map(int, (tmp_path / f"{name}.txt").read_text().split()))[1]  # after the first micro-batch
    weights = sum(tensor.numel() * 8 for tensor in once(*LINE).weights.values())
    # all gradients whole, or only the half that this process keeps
    assert held["step"] - held["micro_batch"] == pytest.approx(weights / 2, rel=0.15), (held, weights)


def noting_gathers(file: Path) -> Callable[[], None]:
    """Return what lets rank 0 note its gathers and the forwards of the blocks, in their order."""

    def note(word: str) -> None:
        if dist.get_rank() == 0 and torch.is_grad_enabled() | (word == "gather"):
            with file.open("a") as lines:
                lines.write(f"{word}\n")

    def plant() -> None:
        for name in {"all_gather_single", "all_gather_into_tensor"} & set(dir(dist)):  # FSDP's, by release of torch
            before_each(dist, name, lambda *_, **__: note("gather"))
        before_each(Block, "forward", lambda *_, **__: note("block"))

    return plant


@pytest.mark.slow
def test_blocks_are_gathered_ahead_and_no_bit_changes(tmp_path: Path) -> None:
    ahead, runs = [], []
    for name, more in (("torch", []), ("two", ["parallel.prefetch=2"])):
        runs.append(finished(*LINE, *TWO, *more, root=tmp_path / name, before=noting_gathers(tmp_path / f"{name}.txt")))
        words = (tmp_path / f"{name}.txt").read_text().split()
        ahead.append(words.index("block"))  # gathers before the first block
    assert ahead[1] - ahead[0] == 2, ahead
    assert_same_bits(*runs)
