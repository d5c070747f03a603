"""mode=export: by `run.dir` alone, files that are the model that training has evaluated."""

import importlib.util
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from framework.config.folders import options
from framework.modules.tensors import map_tensors
from tests.harness import Ended, around, command, finished, model_of, once, refused, split_of
from tests.test_conformance import IMAGES, MODELS, SMALL
from tests.test_unpickling import note_unpickling

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
RUN = ["global_batch_size=14", "trainer.max_epochs=null", "trainer.max_steps=2", "trainer.log_every=1",
       "checkpoint.every=null", "optimizer.lr=0.05", "trainer.ema_decay=0.8", "scheduler.warmup_steps=1"]  # fmt: skip
KINDS = {name: line for name, line in MODELS.items() if name != "torchvision's resnet18"}
KINDS |= {"resnet": [*SMALL, "model=resnet"], "torchvision": [*IMAGES, "dataset.image_size=32", "model=torchvision",
                                                             "model.name=resnet18"],
          "airbench": [*IMAGES, "dataset.image_size=32", "model=airbench", "model.widths=[4,8]"]}  # fmt: skip


def exported(run: Ended, *overrides: str, root: Path, **options: Any) -> Ended:
    return finished("mode=export", f"run.dir={run.directory}", *overrides, root=root, **options)


def test_every_kind_of_model_of_ours_is_among_these() -> None:
    named = {part.removeprefix("model=") for line in KINDS.values() for part in line if part.startswith("model=")}
    assert set(options("model")) <= named


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_is_the_model_that_was_evaluated(kind: str, tmp_path: Path) -> None:
    trained = once(*RUN, *KINDS[kind])
    formats = "[safetensors,pt2,onnx]" if HAS_ONNX else "[safetensors,pt2]"
    told = exported(trained, f"export.formats={formats}", root=tmp_path / "none").output
    folder = trained.directory / "export"
    # a program computes all experts of a token, and its sums round otherwise
    assert "bytes, outputs within 0 of the model's" in told or kind == "experts"

    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == trained.weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in trained.weights.items())  # the average's

    program = torch.export.load(folder / "model.pt2").module()
    (inputs, _), model = split_of(trained, "val"), model_of(trained).requires_grad_(False).eval()
    model.load_state_dict(trained.weights)
    for size in (1, 5, 11):  # of no size that it was traced with
        first = map_tensors(lambda tensor, size=size: tensor[:size], inputs)
        arguments, named = ((), first) if isinstance(first, dict) else ((first,), {})
        expected = model(*arguments, **named)
        with torch.no_grad():
            assert_alike(program(*arguments, **named), expected, tolerance=1e-6)
        if HAS_ONNX:
            values = list(named.values()) or list(arguments)
            assert_alike(through_onnx(folder / "model.onnx", values), expected, tolerance=1e-4)


def assert_alike(actual: Any, expected: Any, *, tolerance: float) -> None:
    lists = [list(v.values()) if isinstance(v, dict) else v if isinstance(v, list) else [v] for v in (actual, expected)]
    for ours, theirs in zip(*lists, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


def through_onnx(path: Path, values: list[torch.Tensor]) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    given = {node.name: value.numpy() for node, value in zip(session.get_inputs(), values, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, given)]


def test_the_file_of_weights_says_what_it_is(tmp_path: Path) -> None:
    trained = once(*RUN, *KINDS["two inputs"])
    exported(trained, "export.formats=[safetensors]", root=tmp_path / "none")
    config = yaml.safe_load((trained.directory / "config.yaml").read_text())
    with safe_open(trained.directory / "export" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "run_id": config["run"]["id"], "config_hash": config["hash"], "step": "2"}


@pytest.mark.slow
def test_no_pickle_is_written_and_nothing_is_unpickled(tmp_path: Path) -> None:
    trained = once(*RUN, *KINDS["gpt, tied"])
    exported(trained, "export.formats=[pt2]", root=tmp_path / "none", before=note_unpickling(tmp_path / "found"))
    assert not (tmp_path / "found").exists(), (tmp_path / "found").read_text()
    with zipfile.ZipFile(trained.directory / "export" / "model.pt2") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert contents.pop("archive/data/sample_inputs/model.pt") == b""
    configs = [
        json.loads(contents[f"archive/data/{kind}/model_{kind}_config.json"])["config"] for kind in ("weights", "constants")
    ]
    entries = [entry for config in configs for entry in config.values()]
    assert entries and not any(entry["use_pickle"] for entry in entries)
    raw = {f"archive/data/weights/{entry['path_name']}" for entry in entries}
    for name in contents.keys() - raw:
        assert contents[name].decode().replace("\n", "").isprintable(), name


# --- what is refused


def copied(run: Ended, folder: Path) -> Path:
    shutil.copytree(run.directory, folder / "copy", ignore=shutil.ignore_patterns("export"))
    return folder / "copy"


@pytest.mark.slow
def test_a_program_that_computes_something_else_is_not_kept(tmp_path: Path) -> None:
    copy = copied(once(*RUN, *KINDS["mlp"]), tmp_path)
    line = ["mode=export", f"run.dir={copy}", "export.formats=[pt2]"]
    refused = command(*line, root=tmp_path / "none", before=spoil_weights)
    assert refused.code == 78
    assert "export.formats: pt2: the outputs differ from the model's by " in refused.output
    assert not list((copy / "export").iterdir())


def spoil_weights() -> None:
    def load(plain: Any, *arguments: Any, **named: Any) -> Any:
        program = plain(*arguments, **named)
        with torch.no_grad():
            next(iter(program.state_dict.values())).mul_(float("nan"))
        return program

    around(torch.export, "load", load)


def hide_onnxruntime() -> None:
    sys.modules["onnxruntime"] = None  # as if it were not installed


def test_without_onnx_there_are_the_others_and_a_line(tmp_path: Path) -> None:
    copy = copied(once(*RUN, *KINDS["mlp"]), tmp_path)
    told = finished("mode=export", f"run.dir={copy}", root=tmp_path / "none", before=hide_onnxruntime).output
    assert "no ONNX: it needs " in told and "onnxruntime (pip install 'steadfast[export]'" in told
    assert {path.name for path in (copy / "export").iterdir()} == {"model.safetensors", "model.pt2"}
    line = ["mode=export", f"run.dir={copy}", "export.formats=[onnx]"]
    asked = command(*line, root=tmp_path / "none", before=hide_onnxruntime)
    assert asked.code == 78 and "export.formats: onnxruntime not installed" in asked.output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("parallel=ddp", "parallel: cannot be given to mode=export: the mode uses the run as it is (only run.dir, run.root, "),
        ("export.formats=[pt3]", "export.formats: ['pt3'] is not valid"),
        ("eval.split=val", "eval.split: cannot be given to mode=export"),
    ],
)
def test_what_is_wrong_is_said(line: str, said: str) -> None:
    assert said in refused("mode=export", f"run.dir={once(*RUN, *KINDS['mlp']).directory}", line)
