"""Preflight: every problem of a configuration, found before any process or directory exists."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from framework.build import components
from framework.checkpoint.header import read_header
from framework.checkpoint.manifest import candidates, checkpoints_of, step_of
from framework.checkpoint.plain import Invalid
from framework.config.frozen_file import frozen_run_id
from framework.config.modes import MODES
from framework.config.schema import COMPONENTS
from framework.config.signatures import metrics_of
from framework.config.spelling import did_you_mean
from framework.config.validation import schema_problems
from framework.preflight.processes import check_backend, check_processes, most_processes
from framework.runs.directory import RunDirectory
from framework.runtime.problem import Problem, shown
from framework.runtime.secrets import REMEDY, is_secret_key, secrets_in

Config = dict[str, Any]


def check(config: Config, problems: list[Problem], *, world_size: int | None) -> tuple[Config, list[Problem]]:
    """Return the configuration completed by what follows from the data and the machine, and every problem with it.

    `problems` are those found in composing it; `world_size` is what a launcher has fixed, None where the choice is
    ours. torch is not imported: this takes a second.
    """
    problems = problems + (schema_problems(config) if config else [])  # empty: it could not be composed
    problems = _check_secrets(config, problems)
    if not _has_sections(config):
        return config, problems
    if not any(problem.key.startswith("dataset") for problem in problems):
        config, found = _check_data(config)
        problems += found
    config, found = check_processes(config, world_size=world_size)
    if any(problem.key == "parallel" for problem in problems):
        found = []  # it would be about another strategy than the one that was meant
    problems += found + check_backend(config)
    if config.get("mode") in MODES:
        problems += _check_writable(Path(config["run"]["dir"]))
    else:
        problems += _check_batch(config) + _check_run(config)
    seen: dict[str, Problem] = {}
    for problem in problems:
        seen.setdefault(problem.key.partition("[")[0], problem)  # the first of a key is the cause of the others
    return config, list(seen.values())


def _check_secrets(config: Config, problems: list[Problem]) -> list[Problem]:
    """Return the problems with those of secrets first, and without those that would show one."""
    found = secrets_in(config)
    found |= {problem.key: "has the name of a secret" for problem in problems if is_secret_key(problem.key)}
    others = [problem for problem in problems if problem.key not in found]
    return [Problem(key, what, REMEDY) for key, what in found.items()] + others


def _has_sections(config: Config) -> bool:
    sections = (*COMPONENTS, "trainer", "checkpoint", "run", "launch", "backend", "precision")
    return all(isinstance(config.get(name), dict) for name in sections)


def _check_data(config: Config) -> tuple[Config, list[Problem]]:
    try:
        dataset = components.dataset(config)
        problems = [_from_line(line) for line in dataset.problems()]
        config, unfilled = components.complete_model(config, dict(dataset.info))
        config = components.complete_task(config, dataset)
    except Exception as error:  # a constructor refuses its arguments
        return config, [from_error("dataset", error)]
    problems = problems or unfilled  # with the data missing, what it would give is not known either
    return config, problems + _task_problems(config, getattr(dataset, "task", None))


_OWN_TASKS = ("classification", "language_modeling", "regression")


def _task_problems(config: Config, made_for: str | None) -> list[Problem]:
    """Refuse another of our own tasks than the one that the data's targets are for; a task of the user's may be any."""
    chosen = str(config["task"].get("_target_")).split(".")[-2:][0]
    if made_for is None or chosen == made_for or chosen not in _OWN_TASKS:
        return []
    return [Problem("task", f"{chosen} does not go with this dataset", f"task={made_for}")]


def _from_line(line: str) -> Problem:
    key, _, what = line.partition(": ")
    return Problem(key, what)


def from_error(group: str, error: Exception) -> Problem:
    """Tell a component's refusal under the key that it names (`seq_len=0: ...`), else under its group's."""
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    named = re.match(rf"(?:{group}\.)?(\w+)=(.*)", text)
    return Problem(f"{group}.{named[1]}", named[2]) if named else Problem(group, text)


def _check_batch(config: Config) -> list[Problem]:
    problems = []
    whole, micro = config.get("global_batch_size"), config.get("micro_batch_size")
    if isinstance(whole, int) and isinstance(micro, int) and micro > whole:
        problems.append(Problem("micro_batch_size", f"{micro} is more than global_batch_size={whole}",
                                f"at most {whole}"))  # fmt: skip
    trainer = config["trainer"]
    if config["backend"].get("name") == "mpi" and config["checkpoint"].get("async_save") is True:
        what = "true, but over MPI no thread may talk beside the steps"
        problems.append(Problem("checkpoint.async_save", what, "null or false, or backend=gloo"))
    if trainer.get("max_steps", 0) is None and trainer.get("max_epochs", 0) is None:
        what = "null, as is trainer.max_epochs: the run would never end"
        problems.append(Problem("trainer.max_steps", what, "a number for one of them"))
    problems += _check_sync(config) + _check_async(config) + _check_bitwise(config) + _check_divergence(config)
    if trainer.get("sync_batchnorm") is True and (
        axes := {"tensor", "pipeline", "context"} & config["parallel"].keys()
    ):
        what = f"true, but processes along the {sorted(axes)[0]} axis have no samples of their own"
        problems.append(Problem("trainer.sync_batchnorm", what, "false, or parallel=ddp, zero, fsdp or hsdp"))
    stopping = trainer.get("early_stopping", {})
    is_evaluated = not str(stopping.get("monitor")).startswith("train/")
    if stopping.get("patience") is not None and is_evaluated and trainer.get("eval_every", 0) is None:
        what = "is counted in evaluations, but with trainer.eval_every=null there is one, at the end"
        problems.append(Problem("trainer.early_stopping.patience", what, "a number for trainer.eval_every"))
    for key in ("checkpoint.monitor", "trainer.early_stopping.monitor"):
        problems += _check_monitor(config, key)
    model = config["model"]
    dim, heads = model.get("dim"), model.get("num_heads")
    if isinstance(dim, int) and isinstance(heads, int) and heads > 0 and dim % heads:
        problems.append(Problem("model.num_heads", f"{heads} does not divide model.dim={dim}", _divisors(dim)))
    return problems


def _check_sync(config: Config) -> list[Problem]:
    """Refuse evaluations and checkpoints between the steps after which the processes agree."""
    sync_every = config["parallel"].get("sync_every")
    if not isinstance(sync_every, int) or sync_every < 1:
        return []
    periods = {
        "trainer.eval_every": config["trainer"].get("eval_every"),
        "checkpoint.every": config["checkpoint"].get("every"),
    }
    return [Problem(key, f"{every} is not a multiple of parallel.sync_every={sync_every}", "the processes agree only then")
            for key, every in periods.items() if isinstance(every, int) and every % sync_every]  # fmt: skip


def _check_bitwise(config: Config) -> list[Problem]:
    """Refuse what couples micro-batches, or leaves open what they are."""
    if config.get("invariance") != "bitwise":
        return []
    problems = []
    if config.get("micro_batch_size", 0) is None:
        what = "null, but invariance=bitwise is about sums over micro-batches"
        problems.append(Problem("micro_batch_size", what, "a number; any world size up to global_batch_size / "
                                "micro_batch_size then gives the same bits"))  # fmt: skip
    if config["trainer"].get("sync_batchnorm") is True:
        what = (
            "true, but invariance=bitwise takes statistics over a micro-batch: others depend on who runs what beside it"
        )
        problems.append(Problem("trainer.sync_batchnorm", what, "false"))
    if config["parallel"].get("compression") is not None:
        what = (
            f"{config['parallel']['compression']}, which depends on how many processes there are (invariance=bitwise)"
        )
        problems.append(Problem("parallel.compression", what, "null"))
    return problems


def _check_async(config: Config) -> list[Problem]:
    """Refuse what needs the ranks to stand at the same parameters after each step."""
    if config["parallel"].get("mode") != "async" or most_processes(config) == 1:
        return []
    trainer, expected = config["trainer"], "parallel.mode=sync for that"
    at_odds = {
        "trainer.ema_decay": trainer.get("ema_decay"),
        "trainer.grad_noise.eta": isinstance(noise := trainer.get("grad_noise"), dict) and noise.get("eta"),
        "trainer.sync_batchnorm": trainer.get("sync_batchnorm"),
        "precision": config["precision"].get("name") == "fp16"
        and "fp16, whose loss scale follows every step's global norm",
    }
    return [Problem(key, f"{str(value).lower() if value is True else value}, but under parallel.mode=async "
                    "each process is at a point of its own", expected) for key, value in at_odds.items() if value]  # fmt: skip


def _check_divergence(config: Config) -> list[Problem]:
    """Refuse to get over a step where more than parameters, buffers and optimizer has seen it; and to look back too far."""
    policy, parallel = config["trainer"].get("divergence"), config["parallel"]
    if not isinstance(policy, dict) or policy.get("action") not in ("skip", "rollback"):
        return []
    problems, key = [], "trainer.divergence.action"
    if parallel.get("compression") in ("int8", "top_k", "powersgd"):
        what = f"{policy['action']}, but parallel.compression={parallel['compression']} keeps what was not finite for later steps"
        problems.append(Problem(key, what, "raise, or parallel.compression=null, fp16 or bf16"))
    if parallel.get("mode") == "async" and config["launch"].get("nproc_per_node") != 1:
        what = f"{policy['action']}, but under parallel.mode=async each process is at a point of its own"
        problems.append(Problem(key, what, "raise, or parallel.mode=sync"))
    back, kept = policy.get("back"), config["checkpoint"].get("keep_last")
    if policy["action"] == "rollback" and isinstance(back, int) and isinstance(kept, int) and back > kept:
        what = f"{back}, but checkpoint.keep_last={kept} keeps fewer"
        problems.append(Problem("trainer.divergence.back", what, f"at most {kept}"))
    return problems


def _divisors(number: int) -> str:
    return "one of " + ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)


def _check_monitor(config: Config, key: str) -> list[Problem]:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, str):
        return []  # the schema has said so
    metrics = metrics_of(str(config["task"].get("_target_")))
    choices = [f"{split}/{metric}" for split in ("val", "train") for metric in ["loss", *(metrics or ["METRIC"])]]
    if node in choices or (metrics is None and re.fullmatch("(val|train)/.+", node)):
        return []
    close = did_you_mean(node, choices)
    return [Problem(key, f"{node!r} is not valid", "one of " + ", ".join(choices) + (f"; {close}" if close else ""))]


def _check_run(config: Config) -> list[Problem]:
    run, name = config["run"], config.get("name")
    if not isinstance(name, str) or not all(isinstance(run.get(key), str) for key in ("root", "dir", "resume")):
        return []  # the schema has said so
    problems = []
    if "/" in name or name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 200:
        what = f"{shown(name)} is not valid"
        problems.append(Problem("name", what, "a directory's name: no slash, at most 200 bytes"))
    for key in ("root", "dir"):
        if not run[key] or run[key].startswith("~"):
            expected = "a directory; ~ is not replaced: use $HOME"
            return [*problems, Problem(f"run.{key}", f"{run[key]!r} is not valid", expected)]
    problems += _check_init(config["model"].get("init_from"), resume=run["resume"])
    directory = RunDirectory(Path(run["dir"]))
    if problems or (problems := _check_writable(directory.path)):
        return problems
    return _check_contents(directory) or _check_identity(config, directory) + _check_resume(run["resume"], directory)


def _check_init(init_from: Any, *, resume: str) -> list[Problem]:
    """Refuse a file to begin with that is none, or was made to do harm."""
    if not isinstance(init_from, str):
        return []
    if resume not in ("auto", "never", "must"):
        return [
            Problem(
                "model.init_from", "is given, and so is run.resume: each says where the weights are from", "one of them"
            )
        ]
    try:
        read_header(Path(init_from))
    except (Invalid, ValueError) as error:
        return [Problem("model.init_from", f"{shown(init_from)} {error}", "the path of a safetensors file")]
    return []


def _check_writable(path: Path) -> list[Problem]:
    if max(map(len, map(os.fsencode, path.parts))) > 255 or len(os.fsencode(path.absolute())) > 3000:
        return [Problem("run.dir", "is too long for a path", "255 bytes between slashes, 3000 in all")]
    # os.path: a Path would raise where a directory above may not be entered
    nearest = next(str(parent) for parent in [path, *path.absolute().parents] if os.path.lexists(parent))
    key = "run.dir" if os.path.exists(path) else "run.root"
    if not os.path.isdir(nearest):
        return [Problem(key, f"{nearest} is not a directory", "a directory, or a path where one can be made")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [Problem(key, f"{nearest} cannot be written", "a directory that can")]
    if shutil.disk_usage(nearest).total == 0:
        return [Problem(key, f"{nearest} cannot hold files", "a directory on a disk")]
    return []


def _check_contents(directory: RunDirectory) -> list[Problem]:
    """Refuse a directory with files that are no run's: a run would mix its own with them."""
    if odd := directory.odd_files():
        return [
            Problem(
                "run.dir",
                f"{directory.path / odd[0]} is not a plain file",
                "a run writes to none that is a link or a pipe",
            )
        ]
    strangers = directory.strangers()
    if not strangers:
        return []
    what = f"{directory.path} is not a run's: it holds {shown(strangers[0])}"
    return [Problem("run.dir", what, "a directory of its own, which the run makes")]


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
    if not resume or not os.path.isdir(path):
        return [Problem("run.resume", f"no run or checkpoint at {resume!r}", "auto, never, must, or a path")]
    if step_of(path) is None and not candidates(checkpoints_of(path)):
        return [Problem("run.resume", f"{resume!r} has no checkpoint", "the path of a run or of a checkpoint")]
    return []
