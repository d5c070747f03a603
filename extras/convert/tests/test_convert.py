"""steadfast convert: the weights of a file that torch.save has written, as safetensors; nothing in the file is run."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.test_hostile import Payload
from tests.harness import Says, finished, typed

NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
STATE = {name: value.clone() for name, value in NET.state_dict().items()}


def wrapped(prefix: str) -> "OrderedDict[str, torch.Tensor]":
    return OrderedDict((prefix + name, value) for name, value in STATE.items())


def of_training() -> dict[str, Any]:
    """What many projects save: the model among much else, of which the optimizer has more tensors, though not by name."""
    optimizer = torch.optim.Adam(NET.parameters())
    NET(torch.zeros(2, 3)).sum().backward()
    optimizer.step()
    return {"epoch": 3, "net_g": wrapped("module."), "optimizer": optimizer.state_dict(), "args": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (lambda: STATE, ["theirs.safetensors: 9 tensors, 176 bytes"]),
        (lambda: {"state_dict": STATE, "epoch": 3}, ["theirs.safetensors: 9 tensors, 176 bytes: state_dict of the file", "left out: epoch (int)"]),
        (lambda: {"a": {"weights": dict(STATE), "n": 1}}, ["theirs.safetensors: 9 tensors a > weights of the file"]),
        (of_training, ["theirs.safetensors: 9 tensors net_g of the file", "'module.' DistributedDataParallel adds ... removed", "left out: epoch (int), optimizer (dict), args (dict)"]),
        (lambda: wrapped("_orig_mod.module."), ["theirs.safetensors: 9 tensors, 176 bytes", "'_orig_mod.' torch.compile adds ... removed", "'module.' ... removed"]),
        (lambda: {name.replace("0.", "0._orig_mod."): value for name, value in STATE.items()}, ["theirs.safetensors: 9 tensors, 176 bytes", "'_orig_mod.' ... removed"]),
        (lambda: wrapped("module.encoder.module.") | wrapped("module."), ["theirs.safetensors: 18 tensors", "'module.' ... removed"]),
        (lambda: {**STATE, "version": "1.0"}, ["theirs.safetensors: 9 tensors, 176 bytes", "left out: version (str)"]),
        (lambda: {name: nn.Parameter(value, requires_grad=False) for name, value in STATE.items()}, ["theirs.safetensors: 9 tensors, 176 bytes"]),
        (lambda: {"model": dict(STATE), "ema": {name: value + 1 for name, value in STATE.items()}}, ["theirs.safetensors: 9 tensors model of the file", "left out: ema (9 tensors)"]),
    ],
)  # fmt: skip
def test_the_weights_are_found_by_their_structure(data: Callable[[], Any], lines: list[str], tmp_path: Path) -> None:
    torch.save(data(), tmp_path / "theirs.pth")
    ended = typed("convert", "theirs.pth", directory=tmp_path)
    assert ended.code == 0, ended.output
    said = ended.output.splitlines()
    assert said[0].startswith("theirs.safetensors: ") and len(said) == len(lines)
    for line, words in zip(said, lines):
        assert line == Says(words), line
    weights = load_file(tmp_path / "theirs.safetensors")
    inner = {f"encoder.module.{name}" for name in STATE} if len(weights) > len(STATE) else set()
    assert weights.keys() == STATE.keys() | inner
    assert all(torch.equal(weights[name], value) and weights[name].dtype == value.dtype for name, value in STATE.items())


def test_tied_strided_and_old_files_are_written_whole(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    data = {
        "a": matrix, "b": matrix, "part": matrix[1:, ::2], "turned": matrix.t(), "half": matrix.bfloat16(),
        "count": torch.tensor(3),
    }  # fmt: skip
    for number, options in enumerate([{}, {"_use_new_zipfile_serialization": False}]):
        torch.save(data, tmp_path / f"{number}.bin", **options)
        out = f"out_{number}.safetensors"
        ended = typed("convert", f"{number}.bin", out, directory=tmp_path)
        assert ended.code == 0, ended.output
        weights = load_file(tmp_path / out)
        assert weights.keys() == data.keys() and all(torch.equal(weights[name], value) for name, value in data.items())


def test_a_run_begins_with_what_was_converted(tmp_path: Path) -> None:
    line = ["dataset=synthetic", "dataset.num_train=8", "model=mlp", "trainer.max_steps=1", "optimizer.lr=1e-15"]
    first = finished(*line, "seed=3", root=tmp_path / "runs")
    torch.save({"model_state_dict": {f"module.{name}": value for name, value in first.weights.items()}}, tmp_path / "net.pth")
    assert typed("convert", "net.pth", directory=tmp_path).code == 0
    run = finished(*line, f"model.init_from={tmp_path / 'net.safetensors'}", root=tmp_path / "again")
    assert all((run.weights[name] - value).abs().max() <= 1e-6 for name, value in first.weights.items())


# --- what is refused


class Own(nn.Module):
    pass


def payload(path: Path) -> Payload:
    return Payload(path.with_name("touched"))


def truncated(path: Path) -> None:
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:700])


CODE = "needs more than weights: posix.system nothing was"
DAMAGED = "is not a file of torch.save, or is damaged"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: torch.save({"weight": torch.zeros(2), "more": payload(path)}, path), CODE),
        (lambda path: torch.save({"more": payload(path)}, path, _use_new_zipfile_serialization=False), CODE),
        (lambda path: path.write_bytes(pickle.dumps(payload(path), protocol=2)), CODE),
        (lambda path: torch.save(Own(), path), "needs more than weights: Own torch.save() its state_dict()"),
        (lambda path: torch.save({"weight": torch.zeros(1).expand(1 << 40)}, path), "has weight, which has more values than the file"),
        (lambda path: torch.jit.script(nn.Linear(2, 2)).save(path), "is a TorchScript program"),
        (lambda path: path.write_text("hello"), DAMAGED),
        (truncated, DAMAGED),
        (lambda path: torch.save([torch.zeros(2)], path), "has no named tensors"),
        (lambda path: torch.save({"a": torch.zeros(2).to_sparse()}, path), "has a, which is torch.sparse_coo, quantized or without storage"),
        (lambda path: None, "cannot be read (No such file or directory)"),
        (lambda path: path.mkdir(), "is a directory instead of a file"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning", "ignore:`torch.jit.save:DeprecationWarning")
def test_what_is_no_file_of_weights_is_refused_and_not_run(make: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    make(tmp_path / "theirs.pth")
    ended = typed("convert", "theirs.pth", directory=tmp_path)
    assert ended.code == 78, ended.output
    (line,) = ended.output.splitlines()
    assert line == Says(f"convert: theirs.pth: {said}"), line
    assert {path.name for path in tmp_path.iterdir()} <= {"theirs.pth", "runs.output"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a file of torch.save"),
        (["a.pth", "b.safetensors", "c"], "needs a file of torch.save"),
        (["a.pth", "b.pth"], "b.pth does not end with .safetensors"),
        (["a.pth", "there.safetensors"], "there.safetensors exists already"),
    ],
)
def test_a_wrong_line_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "there.safetensors").touch()
    torch.save(STATE, tmp_path / "a.pth")
    ended = typed("convert", *words, directory=tmp_path)
    assert ended.code == 78 and ended.output == Says(f"convert: {said}")
