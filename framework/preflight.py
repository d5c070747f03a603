"""Preflight: every problem of a configuration, found before any process or directory exists."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from framework import build
from framework.checkpoint.manifest import candidates, checkpoints_of, step_of
from framework.config import frozen_run_id
from framework.run_directory import RunDirectory
from framework.schema import COMPONENTS, MESH_AXES, Problem, schema_problems

Config = dict[str, Any]
_SPLITS = ("train", "val", "test")


def check(config: Config, problems: list[Problem], *, world_size: int | None) -> tuple[Config, list[Problem]]:
    """Return the configuration completed by what follows from the data and the machine, and every problem with it.

    `problems` are those found in composing it; `world_size` is what a launcher has fixed, None where the choice is
    ours. torch is not imported: this takes a second.
    """
    problems = problems + schema_problems(config)
    if not _has_sections(config):
        return config, problems
    if not any(problem.key.startswith("dataset") for problem in problems):
        config, found = _check_data(config)
        problems += found
    config, found = _check_world(config, world_size=world_size)
    problems += found + _check_backend(config) + _check_batch(config) + _check_run(config)
    seen: dict[str, Problem] = {}
    for problem in problems:
        seen.setdefault(problem.key, problem)
    problems = list(seen.values())
    return config, problems


def _has_sections(config: Config) -> bool:
    sections = (*COMPONENTS, "trainer", "checkpoint", "run", "launch", "backend", "precision")
    return all(isinstance(config.get(name), dict) for name in sections)


def _check_data(config: Config) -> tuple[Config, list[Problem]]:
    try:
        dataset = build.dataset(config)
        problems = [_from_line(line) for line in dataset.problems()]
        config, unfilled = build.complete_model(config, dict(dataset.info))
    except Exception as error:  # a constructor refuses its arguments
        return config, [_from_error("dataset", error)]
    return config, problems or unfilled  # with the data missing, what it would give is not known either


def _from_line(line: str) -> Problem:
    key, _, what = line.partition(": ")
    return Problem(key, what)


def _from_error(key: str, error: Exception) -> Problem:
    """Tell a component's refusal under the key it names (`dataset.seq_len=0: ...`), else under its group's."""
    cause = error.__cause__ or error  # Hydra wraps what a constructor raises
    text = " ".join(str(cause).split("\n")[0].split()) or type(cause).__name__
    return Problem(key, text)


def _check_world(config: Config, *, world_size: int | None) -> tuple[Config, list[Problem]]:
    """Check the mesh against the number of processes, and fill that number in."""
    launch, parallel = dict(config["launch"]), config["parallel"]
    if world_size is not None:
        asked = launch.get("nproc_per_node")
        launch["nproc_per_node"] = world_size
        source = f"the launcher started {world_size}"
    else:
        asked = None
        if launch.get("nnodes") not in (1, "1"):
            return config, [Problem("launch.nnodes", f"{launch.get('nnodes')} with launch=local",
                                    "1; start several nodes with torchrun --nnodes")]  # fmt: skip
        if launch.get("nproc_per_node") is None:
            launch["nproc_per_node"] = _default_processes(parallel)
        source = f"launch.nproc_per_node gives {launch['nproc_per_node']}"
    config = config | {"launch": launch}
    count = launch["nproc_per_node"]
    axes = {name: parallel[name] for name in MESH_AXES if name in parallel}
    problems = []
    if asked is not None and asked != world_size and world_size is not None and asked > world_size:
        problems.append(Problem("launch.nproc_per_node", f"{asked}, but {source}", "leave it to the launcher"))
    if not isinstance(count, int) or any(not isinstance(size, (int, type(None))) for size in axes.values()):
        return config, problems  # the schema has said so
    problems += _mesh_problems(axes, count=count, source=source, option=_option(parallel))
    return config, problems


def _option(parallel: Config) -> str:
    return str(parallel.get("_target_", "")).rpartition(".")[2]


def _mesh_problems(axes: dict[str, int | None], *, count: int, source: str, option: str) -> list[Problem]:
    if not axes:
        what = f"{count} processes, but parallel={option} is one"
        return [Problem("launch.nproc_per_node", what, "1, or parallel=ddp, parallel=fsdp")] if count != 1 else []
    product = 1
    for size in axes.values():
        product *= size or 1
    open_axes = [name for name, size in axes.items() if size is None]
    if len(open_axes) > 1:
        return [Problem(f"parallel.{open_axes[-1]}", "null, as is another axis", "at most one axis is left open")]
    if product < 1 or (count % product if open_axes else count != product):
        arithmetic = " x ".join(f"parallel.{name}={size}" for name, size in axes.items() if size is not None)
        name = next(name for name, size in axes.items() if size is not None)
        return [Problem(f"parallel.{name}", f"{arithmetic} = {product}, but {source} processes",
                        f"launch.nproc_per_node={product}, or null for what is left")]  # fmt: skip
    return []


def _default_processes(parallel: Config) -> int:
    """Return the number of CUDA devices for a strategy that has mesh axes, 1 for any other and on a CPU."""
    axes = [parallel[name] for name in MESH_AXES if name in parallel]
    if not axes or torch_build("cuda") is None:
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def torch_build(fact: str) -> Any:
    """Return a fact of the installed torch's build (`cuda`, `hip`, ...) without importing torch, which costs seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = importlib.util.spec_from_file_location("torch_version", Path(spec.origin).with_name("version.py"))
    assert version is not None and version.loader is not None
    module = importlib.util.module_from_spec(version)
    version.loader.exec_module(module)
    return getattr(module, fact, None)


def _check_backend(config: Config) -> list[Problem]:
    backend, precision = config["backend"].get("name"), config["precision"].get("name")
    problems = []
    if backend == "nccl" and torch_build("cuda") is None:
        problems.append(Problem("backend", "nccl is not in this PyTorch build", "gloo or auto; nccl needs a CUDA build"))
    if backend in ("mpi", "ucc"):
        problems.append(Problem("backend", f"{backend} is not in this PyTorch build", "gloo, or auto"))
    if backend not in ("auto", "gloo", "nccl", "mpi", "ucc"):
        problems.append(Problem("backend.name", f"{backend!r} is not valid", "one of auto, gloo, nccl, mpi, ucc"))
    if precision not in ("fp32", "bf16", "fp16", "tf32", "fp64"):
        problems.append(Problem("precision.name", f"{precision!r} is not valid", "one of fp32, bf16, fp16, tf32, fp64"))
    return problems


def _check_batch(config: Config) -> list[Problem]:
    problems = []
    whole, micro = config.get("global_batch_size"), config.get("micro_batch_size")
    if isinstance(whole, int) and isinstance(micro, int) and micro > whole:
        problems.append(Problem("micro_batch_size", f"{micro} is more than global_batch_size={whole}",
                                f"at most {whole}"))  # fmt: skip
    trainer = config["trainer"]
    if trainer.get("max_steps", 0) is None and trainer.get("max_epochs", 0) is None:
        problems.append(Problem("trainer.max_steps", "neither it nor trainer.max_epochs ends the run", "set one"))
    for key in ("checkpoint.monitor", "trainer.early_stopping.monitor"):
        problems += _check_monitor(config, key)
    model = config["model"]
    dim, heads = model.get("dim"), model.get("num_heads")
    if isinstance(dim, int) and isinstance(heads, int) and heads > 0 and dim % heads:
        problems.append(Problem("model.num_heads", f"{heads} does not divide model.dim={dim}", _divisors(dim)))
    return problems


def _divisors(number: int) -> str:
    return "one of " + ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)


def _check_monitor(config: Config, key: str) -> list[Problem]:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    split, slash, metric = str(node).partition("/")
    if split not in _SPLITS[:2] or not slash or not metric:
        return [Problem(key, f"{node!r} is not valid", "SPLIT/METRIC, as in val/loss or val/accuracy")]
    return []


def _check_run(config: Config) -> list[Problem]:
    run = config["run"]
    if not all(isinstance(run.get(key), str) for key in ("root", "dir", "resume")):
        return []
    problems = []
    if "/" in str(config.get("name")) or str(config.get("name")) in ("", ".", ".."):
        problems.append(Problem("name", f"{config.get('name')!r} is not valid", "a name for a directory"))
    path = Path(run["dir"])
    nearest = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
    key = "run.root" if not path.exists() else "run.dir"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        problems.append(Problem(key, f"{nearest} cannot be written", "a directory that can"))
    elif shutil.disk_usage(nearest).free < 1 << 20:
        problems.append(Problem(key, f"the disk of {nearest} is full", "a disk with room"))
    return problems + _check_identity(config, RunDirectory(path)) + _check_resume(run["resume"], RunDirectory(path))


def _check_identity(config: Config, directory: RunDirectory) -> list[Problem]:
    there = frozen_run_id(directory.path)
    if there is None or there == config["run"].get("id"):
        return []
    return [Problem("run.dir", f"{directory.path} holds another run ({there}, this is {config['run'].get('id')})",
                    "another directory, or that run's own command")]  # fmt: skip


def _check_resume(resume: str, directory: RunDirectory) -> list[Problem]:
    if resume == "must" and not candidates(directory.checkpoints):
        return [Problem("run.resume", f"must, but {directory.path} has no checkpoint", "auto, or the path of a run")]
    if resume in ("auto", "never", "must"):
        return []
    path = Path(resume)
    if not path.is_dir():
        return [Problem("run.resume", f"no run or checkpoint at {resume!r}", "auto, never, must, or a path")]
    if step_of(path) is None and not candidates(checkpoints_of(path)):
        return [Problem("run.resume", f"{resume} has no checkpoint", "the path of a run or of a checkpoint")]
    return []


def check_objects(config: Config) -> list[Problem]:
    """Build the model (without storage) and the optimizer, for what only their constructors know. Imports torch."""
    import torch

    problems = []
    try:
        with torch.device("meta"):
            model = build.model(config)
    except Exception as error:
        return [_from_error("model", error)]
    try:
        build.component(config["optimizer"])([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    except Exception as error:
        problems.append(_from_error("optimizer", error))
    return problems
