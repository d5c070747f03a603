"""model.init_from as a folder, an index or a list: where the weights are, how their names become the model's, what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from framework.config.init_from import init_identity
from framework.runtime.files import checksum
from tests.harness import Says, checked, command, finished
from tests.test_warm_start import RUN, STILL, assert_begun_with, first  # a fixture

Weights = dict[str, torch.Tensor]
LINE = [*RUN, *STILL, "parallel=fsdp", "launch.nproc_per_node=2"]


def sharded(weights: Weights, folder: Path) -> Path:
    """Write two files and an index, as save_pretrained does."""
    folder.mkdir()
    names = list(weights)
    parts = {f"model-0000{n}-of-00002.safetensors": part for n, part in ((1, names[::2]), (2, names[1::2]))}
    for file, part in parts.items():
        save_file({name: weights[name].contiguous() for name in part}, folder / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def init(value: Any, folder: Path) -> str:
    """Return the override that chooses an option of a user's own: `model.init_from` is this value."""
    (folder / "conf" / "experiment").mkdir(parents=True, exist_ok=True)
    recipe = {"model": {"init_from": value}}
    (folder / "conf" / "experiment" / "warm.yaml").write_text(f"# @package _global_\n{json.dumps(recipe)}\n")
    return "experiment=warm"


def own_conf(folder: Path) -> Callable[[], None]:
    return lambda: __import__("os").environ.update(STEADFAST_CONF=str(folder / "conf"))


# --- what is taken


@pytest.mark.slow
@pytest.mark.parametrize("named", ["folder", "index", "run"])
def test_a_folder_or_an_index_is_its_files(named: str, tmp_path: Path) -> None:
    folder = sharded(first().weights, tmp_path / "hub")
    path = {"folder": folder, "index": folder / "model.safetensors.index.json", "run": first().directory}[named]
    run = finished(*LINE, f"model.init_from={path}", root=tmp_path / "runs")
    assert_begun_with(run, first().weights)
    assert "24 of the model's 24 tensors" in run.output and "WARNING" not in run.output


@pytest.mark.slow
def test_entries_are_renamed_prefixed_and_transposed(tmp_path: Path) -> None:
    head = {"norm.weight": first().weights["norm.weight"], "norm.bias": first().weights["norm.bias"]}
    body = {name: value for name, value in first().weights.items() if name not in (*head, "head.weight")}
    # as another author has it: h_0.up.kernel, transposed; the layers without what is before them
    theirs = {re.sub(r"^layers\.(\d+)\.", r"h_\1.", name): value for name, value in body.items()}
    theirs = {name: value.t() if "mlp" in name and value.ndim == 2 else value for name, value in theirs.items()}
    save_file({name.removeprefix("norm."): value for name, value in head.items()}, tmp_path / "head.safetensors")
    value = [
        {
            "file": str(sharded(theirs, tmp_path / "body")),
            "rename": {"^h_": "layer_", r"^layer_(\d+)\.": r"layers.\1."},
            "transpose": ["layers.*.mlp.*weight"],
            "strict": True,
        },
        {"file": str(tmp_path / "head.safetensors"), "prefix": "norm."},
    ]
    assert any("mlp" in name and tensor.ndim == 2 for name, tensor in theirs.items())
    run = finished(*LINE, init(value, tmp_path), root=tmp_path / "runs", before=own_conf(tmp_path))
    assert_begun_with(run, first().weights)
    assert "WARNING" not in run.output


@pytest.mark.slow
def test_the_command_line_takes_a_list(tmp_path: Path) -> None:
    save_file({"weight": torch.full((16,), 3.0)}, tmp_path / "norm.safetensors")
    line = f"model.init_from=[{{file: {tmp_path / 'norm.safetensors'}, prefix: norm., strict: true}}]"
    run = finished(*LINE, line, root=tmp_path / "runs")
    assert_begun_with(run, {"norm.weight": torch.full((16,), 3.0)})


# --- what counts in the identity


def test_one_file_is_its_checksum_however_it_is_written(tmp_path: Path) -> None:
    file = first().directory / "model.safetensors"
    for value in (str(file), [str(file)], str(first().directory), [{"file": str(file), "prefix": ""}]):
        assert init_identity(value) == [{"content": [checksum(file)[1]]}], value


def test_the_content_of_all_files_and_the_options_count_and_no_path(tmp_path: Path) -> None:
    one, other = (sharded(first().weights, tmp_path / name) for name in ("one", "other"))
    assert init_identity(str(one)) == init_identity(str(other)) == init_identity(str(one / "model.safetensors.index.json"))
    changed = sharded(first().weights | {"norm.bias": torch.ones(16)}, tmp_path / "changed")
    values = [
        str(one), str(changed), [{"file": str(one), "strict": True}], [{"file": str(one), "prefix": "a."}],
        [str(one), str(other)],
    ]  # fmt: skip
    values += [[{"file": str(one), "rename": dict(pairs)}] for pairs in ((("a", "b"), ("b", "c")), (("b", "c"), ("a", "b")))]
    ids = [json.dumps(init_identity(value)) for value in values]
    assert len(set(ids)) == len(ids) and not any(str(tmp_path) in text for text in ids)


# --- what is refused


def says(value: Any, tmp_path: Path) -> str:
    refused = command(*RUN, init(value, tmp_path), root=tmp_path / "runs", before=own_conf(tmp_path))
    assert refused.code == 78, refused.output
    assert "Traceback" not in refused.output and not list((tmp_path / "runs").iterdir())
    return refused.output


FILE = {"file": "FILE"}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("value", "line"),
    [
        (3, "model.init_from: 3 text, a list of {file, prefix, rename, transpose, strict}, or null"),
        ([{}], "model.init_from[0].file: is missing"),
        ([FILE | {"prefx": "a"}], "model.init_from[0].prefx: unknown key did you mean model.init_from[0].prefix?"),
        ([FILE, FILE | {"strict": "yes"}], "model.init_from[1].strict: 'yes' is not valid true or false"),
        ([FILE | {"rename": {"(": "a"}}], "model.init_from[0].rename: {(: 'a'} missing ) regular expression"),
        ([FILE | {"rename": {"^layer_": "a"}}], "model.init_from: no name that matches '^layer_' rename embedding.weight"),
        ([FILE | {"transpose": ["norm.weight"]}], "model.init_from: norm.weight [16], which is not a matrix transpose"),
        ([FILE | {"rename": {"norm.*": "norm"}}], "model.init_from: would both be norm"),
        ([FILE, FILE], "model.init_from: which is in FILE too"),
        ([FILE | {"prefix": "a."}], "model.init_from: nothing in FILE fits this model prefix and rename missing in the file:"),
        ([FILE | {"rename": {r"^norm\.": "nrm."}, "strict": True}],
         "model.init_from: not all of it fits strict nrm.bias (is it norm.bias?), nrm.weight (is it norm.weight?)"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_a_line_before_the_start(value: Any, line: str, tmp_path: Path) -> None:
    file = str(first().directory / "model.safetensors")
    text = says(json.loads(json.dumps(value).replace("FILE", file)), tmp_path)
    (said,) = text.splitlines()
    assert said == Says(line.replace("FILE", "model.safetensors")), said


def damage_of(kind: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    if kind == "shard":
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif kind == "place":
        name = next(iter(places))
        index.write_text(json.dumps({"weight_map": places | {name: "model-00002-of-00002.safetensors"}}))
    elif kind == "escape":
        index.write_text(json.dumps({"weight_map": {name: f"../hub/{file}" for name, file in places.items()}}))
    else:
        for path in folder.iterdir():
            path.rename(folder / "pytorch_model.bin" if kind == "pickle" else folder / f"{path.name}.old")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("shard", "model.init_from: names model-00002-of-00002.safetensors, which cannot be read (No such file"),
        ("place", "model.init_from: is in model-00002-of-00002.safetensors, but ... is not there"),
        ("escape", "model.init_from: names '../hub/model-0000 which is not a safetensors file beside it"),
        ("nothing", "model.init_from: is a directory instead of a file, without a model.safetensors"),
        ("pickle", "model.init_from: without a model.safetensors `steadfast convert pytorch_model.bin` makes a safetensors file"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(kind: str, line: str, tmp_path: Path) -> None:
    folder = sharded(first().weights, tmp_path / "hub")
    damage_of(kind, folder)
    (said,) = says(str(folder), tmp_path).splitlines()
    assert said == Says(line), said


def test_the_configuration_of_a_run_holds_the_checksum_of_each_file(tmp_path: Path) -> None:
    folder = sharded(first().weights, tmp_path / "hub")
    digests = checked(*RUN, f"model.init_from={folder}").model["init_digest"]
    assert digests == {str(path): checksum(path)[1] for path in folder.iterdir()}
