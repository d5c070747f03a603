"""mode=export: write a run's model for other uses: safetensors, a torch.export program, ONNX, or a folder of its library."""

import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from framework.build.training import Builder
from framework.checkpoint.canonical import state_of
from framework.data.loader import as_tensors
from framework.data.source import Dataset, Source
from framework.modes.load_run import LoadedModel, load_run
from framework.modules.pretrained import pretrained_part, write_pretrained
from framework.modules.structure import batch_norms, freeze_parameters
from framework.modules.tensors import Tree, call, map_tensors
from framework.runtime.exits import Exit, Interrupted, Unfit
from framework.runtime.files import flush_to_disk, make_directory, replacing, replacing_directory
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import install_command, missing

_NUM_SAMPLES = 8
_TOLERANCES = {torch.float64: 1e-10}  # relative to the largest output
_TOLERANCE = 1e-4

Made = TypeVar("Made")
Program: TypeAlias = Callable[[Tree], list[Tensor]]  # an exported program: it returns the outputs for inputs


def export(build: Builder) -> Exit:
    """Write the formats of `export.formats` into the run's `export/`, each after it has been compared. One process."""
    directory, world = build.directory, build.world
    model = load_run(build)
    model.module.eval()
    formats = build.config.export.formats or _possible()
    if "huggingface" in formats:
        _require_pretrained(model.module, freeze=build.config.trainer.freeze)
    samples = _samples(build.dataset, build.source("test"), dtype=build.precision.parameters)
    world.agreement.all_or_fail(lambda: make_directory(directory.export), what=f"{directory.export} not made")
    for name in formats:
        if PREEMPTION.requested:
            raise Interrupted("stopped; the earlier exports are complete")
        path = directory.export / ("huggingface" if name == "huggingface" else f"model.{name}")
        if name == "huggingface":
            write = partial(_write_folder, path, model.module, samples)
        else:
            content, remark = _made(name, model, samples=samples, build=build)
            write = partial(_write, path, content, remark)
        result = world.agreement.all_or_fail(write, what=f"{path} not written")
        print(f"{name:11}  {path}  {result}", flush=True)
    return Exit.FINISHED


def _require_pretrained(module: nn.Module, *, freeze: list[str]) -> None:
    """Refuse, before anything is written, a model whose library cannot save it, or cannot save all that was trained."""
    freeze_parameters(module, freeze)
    try:
        path = pretrained_part(module)
    except ValueError as error:
        raise Unfit(f"export.formats: huggingface: {error}") from None
    kinds = sorted({type(layer).__name__ for layer in batch_norms(module)})
    if kinds and hasattr(module.get_submodule(path), "peft_config"):
        LOGGER.warning("export.formats: huggingface: training changes the statistics of %s, and no adapter contains them",
                       " and ".join(kinds))  # fmt: skip


def _possible() -> list[str]:
    """Return the formats with installed packages, and log which packages the other formats need."""
    if names := missing("export"):
        LOGGER.info("no ONNX: it needs %s (%s)", " and ".join(names), install_command("export"))
    return ["safetensors", "pt2", *(["onnx"] if not names else [])]


def _write(path: Path, content: bytes, remark: str) -> str:
    with replacing(path) as beside:
        beside.write_bytes(content)
    flush_to_disk(path.parent)
    return f"{len(content):,} bytes{remark}"


def _write_folder(path: Path, module: nn.Module, samples: Tree) -> str:
    """Write the folder that the model's library reads, after the loaded model has been compared."""
    with replacing_directory(path) as beside:

        def write() -> tuple[None, Program]:
            again = write_pretrained(module, beside)
            return None, lambda inputs: _tensors(call(again, inputs))

        _, remark = _compared("huggingface", write, module, samples)
        names = sorted(file.name for file in beside.iterdir())
    flush_to_disk(path.parent)
    return f"{', '.join(names)}{remark}"


def _samples(dataset: Dataset, source: Source, *, dtype: torch.dtype) -> Tree:
    if len(source) < 2:
        raise Unfit("dataset: one test sample is not enough to export a model of any batch size; at least 2 are")
    stored = map(as_tensors, source.gather(np.arange(min(_NUM_SAMPLES, len(source)))))
    inputs, _ = dataset.transform(*stored, keys=None)
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def _made(name: str, model: LoadedModel, *, samples: Tree, build: Builder) -> tuple[bytes, str]:
    """Return the file's content, and a text about its outputs. Unfit if the model cannot be exported exactly."""
    if name == "safetensors":
        return _safetensors(model, build), ""
    make = {"pt2": _pt2, "onnx": _onnx}[name]
    return _compared(name, partial(make, model.module, samples), model.module, samples)


def _compared(name: str, make: Callable[[], tuple[Made, Program]], module: nn.Module, samples: Tree) -> tuple[Made, str]:
    """Return what is exported, and a text about how equal its outputs are. Unfit if it fails, or they are not equal."""
    try:
        content, run = make()
        difference, allowed = _compare(run, module, samples)
    except OSError:
        raise
    except Exception as error:  # tracing a user's model can raise any error
        text = " ".join(str(error).split())[:300]
        raise Unfit(f"export.formats: {name}: {type(module).__name__} cannot be exported "
                    f"({type(error).__name__}: {text})") from error  # fmt: skip
    if not difference <= allowed:  # also if the difference is not a number
        raise Unfit(f"export.formats: {name}: the outputs differ from the model's by {difference:.2g}, which is more "
                    f"than {allowed:.2g}; nothing is written")  # fmt: skip
    return content, f", outputs within {difference:.2g} of the model's"


def _safetensors(model: LoadedModel, build: Builder) -> bytes:
    weights = {name: value.clone() for name, value in state_of(model.module).items()}  # tied weights must not share memory
    return save(weights, metadata={"format": "pt"} | model.facts(build))


def _pt2(module: nn.Module, samples: Tree) -> tuple[bytes, Program]:
    program = _traced(module, samples)
    program.example_inputs = None  # they would be pickled
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    # from memory, not from a file that another program may have written
    again = torch.export.load(buffer).module()
    return buffer.getvalue(), lambda inputs: _tensors(call(again, inputs))


def _onnx(module: nn.Module, samples: Tree) -> tuple[bytes, Program]:
    import onnxruntime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter uses deprecated parts of torch
        program = torch.onnx.export(_traced(module, samples), dynamo=True, verbose=False)
    assert program is not None  # because no file was given
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(inputs: Tree) -> list[Tensor]:
        given = dict(zip(names, (tensor.numpy() for tensor in _tensors(inputs)), strict=True))
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return content, run


def _traced(module: nn.Module, samples: Tree) -> torch.export.ExportedProgram:
    """Return the model as a program for batches of any size."""
    batch = torch.export.Dim("batch")
    is_named = isinstance(samples, dict)
    arguments = () if is_named else samples if isinstance(samples, tuple) else (samples,)
    shapes = map_tensors(lambda _: {0: batch}, samples if is_named else arguments)  # type: ignore[arg-type, return-value]  # a tree of no tensors
    return torch.export.export(module, arguments, samples if is_named else None, dynamic_shapes=shapes)


def _compare(run: Program, module: nn.Module, samples: Tree) -> tuple[float, float]:
    """Return a program's largest difference from the model's outputs, and the allowed difference, for two batch sizes."""
    differences, largest, dtype = [], 1.0, torch.float32
    for inputs in (samples, map_tensors(lambda tensor: tensor[:1], samples)):
        with torch.no_grad():
            expected, actual = _tensors(call(module, inputs)), run(inputs)
        for ours, theirs in zip(expected, actual, strict=True):
            differences.append((theirs - ours).abs().max())
            largest, dtype = max(largest, float(ours.abs().max())), ours.dtype
    return float(torch.stack(differences).max()), largest * _TOLERANCES.get(dtype, _TOLERANCE)


def _tensors(tree: Tree) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)  # type: ignore[arg-type]  # only its calls count, not its result
    return found
