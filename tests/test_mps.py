"""`device=mps`: a whole run on an emulated device without float64, collectives and streams. No Mac has run it."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.cli.run import checked_line
from framework.distributed import devices
from framework.engine.engine import Engine
from tests.emulated_tensors import Emulated
from tests.fake_cuda import call_mps
from tests.harness import MACHINE, before_each

RUN = ["trainer.max_epochs=null", "trainer.max_steps=8", "trainer.log_every=1", "trainer.eval_every=4", "checkpoint.every=2", "micro_batch_size=4",
       "global_batch_size=8", "trainer.clip_grad_norm=1", "trainer.ema_decay=0.9", "rehearse=false", "trainer.divergence.action=rollback"]  # fmt: skip
IMAGES = ["model=cnn", "model.channels=[4,8]", "model.dropout=0", "dataset=synthetic", "dataset.image_size=8", "dataset.num_train=80",
          "dataset.num_val=16", "dataset.num_test=16", "+part=gradient_norms"]  # fmt: skip
TOKENS = ["model=gpt", "model.dim=16", "model.num_layers=2", "model.dropout=0", "dataset=synthetic", "dataset.kind=tokens",
          "task=language_modeling", "dataset.num_train=80", "dataset.num_val=16", "dataset.num_test=16"]  # fmt: skip
_BROKEN_AT = 5


def float64_on_the_device() -> str:
    try:
        torch.ones(2, device="mps").double()
    except TypeError as error:
        return str(error)
    return f"{Emulated} has it"


def found(line: list[str]) -> dict[str, Any]:
    """Return the rows of a run on the device, of one there that is broken and continued, and of one on the CPU."""
    ways = {"whole": ("mps", False), "broken": ("mps", True), "cpu": ("cpu", False)}
    return {"float64": float64_on_the_device()} | {name: rows_of(line, *way) for name, way in ways.items()}


def rows_of(line: list[str], device: str, breaks: bool) -> list[dict[str, Any]]:
    """Return the rows of a run, which ends with an error in its sixth step and is continued if it `breaks`."""
    from train import main

    seen, plain = set[str](), Engine.train

    def look(engine: Engine, step: Any, *, index: int, **_: Any) -> None:
        seen.update(str(parameter.device) for parameter in engine.module.parameters())
        if breaks and index == _BROKEN_AT:
            raise LookupError("the planted fault")

    with tempfile.TemporaryDirectory() as folder:
        words = [*RUN, *line, f"device={device}", f"run.dir={folder}/run"]
        before_each(Engine, "train", look)
        assert main(words) == int(breaks)
        breaks, was = False, breaks
        assert not was or main(words) == 0
        Engine.train = plain
        assert seen == {"mps:0" if device == "mps" else "cpu"}, seen
        rows = [json.loads(text) for text in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in row.items() if name not in MACHINE} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("line", [IMAGES, TOKENS, [*TOKENS, "precision=bf16"]], ids=["images", "tokens", "bf16"])
def test_a_run_computes_what_the_cpu_does_and_continues_to_the_bit(line: list[str]) -> None:
    runs = call_mps(found, line=line)
    assert "doesn't support float64" in runs["float64"]
    assert runs["broken"] == runs["whole"]
    for mine, other in zip(runs["whole"], runs["cpu"], strict=True):
        assert mine.keys() == other.keys()
        if "precision=bf16" in line:  # attention of the two devices rounds elsewhere
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3)
            continue
        for name, value in other.items():
            assert mine[name] == (pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value), (
                name,
                mine,
                other,
            )


@pytest.mark.parametrize(("line", "key"), [
    (["parallel=ddp", "launch.nproc_per_node=2"], "device"), (["parallel=fsdp"], "device"), (["precision=fp64"], "precision"),
    (["dataset.num_workers=2"], "dataset.num_workers"), ([], None),
])  # fmt: skip
def test_what_the_device_cannot_do_is_refused_before_the_start(
    line: list[str], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_mps", lambda: True)
    assert [problem.key for problem in checked_line(["device=mps", *line]).problems] == [key] * (key is not None)


def test_a_machine_without_the_device_says_so() -> None:
    assert [str(problem) for problem in checked_line(["device=mps"]).problems] == [
        "device: mps, but PyTorch sees no GPU of Apple's here (cpu)"
    ]
