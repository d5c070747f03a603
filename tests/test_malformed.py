"""Malformed command lines: each ends with exit 78, its own line on stderr, no traceback, and nothing made."""

import ctypes
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from extras.mpi import mpi
from framework.cli.run import admit, checked_line
from framework.config.folders import options
from framework.config.schema import RunConfig
from framework.runtime.exits import Exit
from tests.harness import Says, command, typed

REPOSITORY = Path(__file__).resolve().parent.parent


def one_of(group: str) -> str:
    return "one of " + ", ".join(options(group))


def choices(key: str) -> str:
    """What the schema says of a key with a fixed choice."""
    return "one of " + ", ".join(get_args(RunConfig.model_fields[key].annotation))


CNN = "model has num_classes, in_channels, image_size, channels, norm, dropout, init_from, parts"
SECTION = "a section, whose keys are set as in {0}.KEY=VALUE"
SWEEP = "several values make a sweep (add -m; a list is written [1,2], a text with a comma \"'a,b'\")"
HYDRA = "is a key of Hydra that does nothing here (run.root and run.dir choose the run's directory)"
MONITOR = "one of val/loss, val/accuracy, val/top5, train/loss, train/accuracy, train/top5"
GIVES_IMAGES = "needs a value, and the dataset does not give one (it gives in_channels, image_size, num_classes, which fits model=airbench, model=cnn, model=mlp, model=resnet, model=torchvision, model=vit)"
GIVES_TOKENS = (
    "needs a value, and the dataset does not give one (it gives vocab_size, seq_len, which fits model=gpt, model=moe)"
)
NO_CLASS = "(the dotted path of a class or function)"

# A command line and its lines on stderr.
MALFORMED: dict[str, list[str]] = {
    # what a hurried person types
    "lr=1e-3": ["lr: unknown key (did you mean optimizer.lr?)"],
    "gpus=2": ["gpus: unknown key (did you mean launch.nproc_per_node?)"],
    "trainer.compile=true trainer.activation_checkpointing=operations": [
        "trainer.activation_checkpointing: operations, but the operations of a compiled block (trainer.compile) are not visible "
        "(true, or a number of blocks)"
    ],
    "model=resnet18": [f"model: no option 'resnet18' ({one_of('model')}; did you mean model=torchvision model.name=resnet18?)"],
    "precision=16": [f"precision: no option 16 ({one_of('precision')}; did you mean fp16?)"],
    "parallel.name=ddp": ["parallel.name: unknown key (did you mean parallel=ddp?)"],
    "seed=1.5": ["seed: 1.5 is not valid (an integer)"],
    "device=cuda": ["device: cuda, but PyTorch sees no CUDA device here (nvidia-smi shows the driver; or device=auto)"],
    "trainer.max_steps=1e5": ["trainer.max_steps: 100000.0 is not valid (an integer, or null; did you mean 100000?)"],
    "trainer.clip_grad_norm=None": ["trainer.clip_grad_norm: 'None' is not valid (a number, or null; did you mean null?)"],
    "name=3": ["name: 3 is not valid (text; did you mean \"name='3'\"?)"],
    # misspelt keys
    "traner.max_steps=3": ["traner.max_steps: unknown key (did you mean trainer.max_steps?)"],
    "model.hiden=3": ["model.hiden: unknown key (did you mean model.channels?)"],  # a misspelt word of other programs
    "trainer.accelerator=gpu": [Says("trainer.accelerator: unknown key ... the device is chosen automatically ... launch.nproc_per_node")],
    "model.dimm=3": [f"model.dimm: unknown key ({CNN})"],
    "optimizer=sgd optimizer.betas=[0.9,0.9]": ["optimizer.betas: unknown key (optimizer has lr, momentum, nesterov, weight_decay, groups, turns)"],
    "logger.wandb.project=a": ["logger.wandb.project: unknown key (only with logger=wandb)"],
    "model.foo.bar=1 model.foo.baz=2": ["model.foo.bar: unknown key (--help lists the keys)", "model.foo.baz: unknown key (--help lists the keys)"],
    # a value where a section is expected, and the other way round
    "trainer=3": [f"trainer: 3 is not valid ({SECTION.format('trainer')})"],
    "trainer.early_stopping=5": [f"trainer.early_stopping: 5 is not valid ({SECTION.format('trainer.early_stopping')})"],
    "logger.tensorboard=3": ["logger.tensorboard: 3 is not valid (keys, as in logger=tensorboard)"],
    "seed={a:1}": ["seed: {a: 1} is not valid (an integer)"],
    "seed.x=1": ["seed.x: unknown key (seed holds a value, not keys)"],
    "dataset=map_style dataset.train._target_=tests.faulty_data.Points dataset.val.noisy=my.Points": ["dataset.val.noisy: unknown key (dataset.val holds a value, not keys; did you mean dataset.val.noisy._target_=my.Points?)"],
    # wrong types
    "seed=abc": ["seed: 'abc' is not valid (an integer)"],
    "global_batch_size=12.0": ["global_batch_size: 12.0 is not valid (an integer; did you mean 12?)"],
    "optimizer.lr=fast": ["optimizer.lr: 'fast' is not valid (a number)"],
    "optimizer.betas=[0.9,a]": ["optimizer.betas: [0.9, 'a'] is not valid (a list of numbers, as in [0.9, 0.99])"],
    "model.channels=32": ["model.channels: 32 is not valid (a list of integers, as in [1, 2])"],
    "trainer.compile=1": ["trainer.compile: 1 is not valid (true or false, or one of reduce-overhead, max-autotune)"],
    "dataset=text dataset.pattern=3": ["dataset.pattern: 3 is not valid (text, or a list of texts, as in [a, b]; did you mean \"dataset.pattern='3'\"?)"],
    # out of range
    "seed=-1": ["seed: -1 is out of range (at least 0)"],
    "seed=99999999999999999999999999": ["seed: 99999999999999999999999999 is out of range (at most 9223372036854775807, the limit of 64 bits)"],
    "seed=" + "9" * 5000: ["seed: an integer of 5000 digits (at most 19 digits, the limit of 64 bits)"],
    "optimizer.lr=1e400": ["optimizer.lr: inf is out of range (a finite number)"],
    "trainer.max_steps=0": ["trainer.max_steps: 0 is out of range (at least 1)"],
    "model.dropout=1": ["model.dropout: 1: is out of range (at least 0 and below 1)"],
    "dataset=mnist dataset.num_val=0 dataset.download=true": ["dataset.num_val: 0 is out of range (at least 1)"],
    # choices
    "mode=trian": [f"mode: 'trian' is not valid ({choices('mode')}; did you mean train?)"],
    "model=resnet model.depth=20": ["model.depth: 20 is not valid (one of 18, 34, 50, 101)"],
    "backend.name=nvlink": ["backend.name: nvlink is not one of auto, gloo, nccl and ucc (of another package: backend=other backend.name=NAME backend.module=PACKAGE)"],
    # group options
    **{f"{group}=no-such": [f"{group}: no option 'no-such' ({one_of(group)})"] for group in ("task", "scheduler")},
    "model=null": [f"model: no option null ({one_of('model')})"],
    "model=../model/cnn": [f"model: no option '../model/cnn' ({one_of('model')}; did you mean cnn?)"],
    "logger=[tensorboard,wand]": [f"logger: no option 'wand' ({one_of('logger')}; did you mean wandb?)"],
    "model/cnn=1": ["model/cnn: unknown group (did you mean model?)"],
    "model@x=cnn": [Says("model@x=cnn: ... Did you mean to override model ... +model@x=cnn")],
    # syntax
    "resnet": ["resnet: is not key=value (did you mean model=resnet?)"],
    "=1": ["=1: has no key (key=value, or group=option)"],
    "optimizer.betas=[0.9,": ["optimizer.betas: [0.9, cannot be read (a [ is not closed)"],
    'name="abc': ['name: "abc cannot be read (a quote " is not closed)'],
    "name=a=b": ["name: a=b cannot be read (quoted for the shell and for Hydra: \"name='a=b'\")"],
    'name=["a(b)",精]': ["""name: ["a(b)",精] cannot be read (quoted for the shell and for Hydra: 'name=["a(b)","精"]')"""],
    "🦊=1": ["🦊: unknown key (a key is words with dots between them)"],
    "trainer..x=1": ["trainer..x: unknown key (a key is words with dots between them)"],
    "seed=1,2": [f"seed: {SWEEP}"],
    "~seed": ["~seed: a key cannot be deleted (null switches off an optional part)"],
    "+model.foo=1": [f"model.foo: unknown key ({CNN})"],
    "hydra.run.dir=x": [f"hydra.run.dir: {HYDRA}"],
    "hydra/launcher=basic": ["hydra/launcher: is about the jobs of a sweep (add -m; a single run has launch=local or launch=slurm)"],
    "name=${nope}": ["name: its interpolation does not resolve (Interpolation key 'nope' not found)"],
    "optimizer.lr=${optimizer.lr}": ["optimizer.lr: its interpolation does not resolve (it refers to itself)"],
    "name=${nope": ["name: ${nope cannot be read (a { is not closed)"],
    "seed=???": ["seed: ??? is not valid (a value)"],
    # numbers that do not fit each other
    "micro_batch_size=128": ["micro_batch_size: 128 is more than global_batch_size=64 (at most 64)"],
    "trainer.max_epochs=null": ["trainer.max_steps: null, and trainer.max_epochs is null too: the run would never end (a number for one of them)"],
    "model=gpt dataset=text model.dim=30": ["model.dim: 30 is not a multiple of 2 * num_heads=8: every head gets an equal share, and rotary positions turn its dims in pairs; set dim to a multiple of 8"],
    "checkpoint.monitor=loss": [f"checkpoint.monitor: 'loss' is not valid ({MONITOR}; did you mean val/loss?)"],
    "launch.nproc_per_node=2": ["parallel: single is one process, but launch.nproc_per_node gives 2 processes (try launch.nproc_per_node=1, or parallel=ddp, parallel=fsdp)"],
    "export.formats=[torchscript]": ["export.formats: ['torchscript'] is not valid (a list of safetensors, pt2, onnx, huggingface, as in [safetensors], or null)"],
    "trainer.early_stopping.patience=2 trainer.eval_every=null": ["trainer.early_stopping.patience: is counted in evaluations, but with trainer.eval_every=null there is only one evaluation, at the end (a number for trainer.eval_every)"],
    "model=vit model.dim=30 model.num_heads=5 parallel=tensor launch.nproc_per_node=2": ["parallel.tensor: 2: does not divide the 5 heads of the model; take a divisor, or ddp, zero, fsdp or hsdp, which take any number"],
    "parallel=ddp parallel.replicate=3 launch.nproc_per_node=2": ["parallel.replicate: 3, but launch.nproc_per_node gives 2 processes (try launch.nproc_per_node=3, or null for one axis, which takes the rest)"],
    # what a strategy, a schedule or a cluster cannot do
    "trainer.freeze=[head]": [Says("trainer.freeze: 'head' ... mean")],
    "trainer.freeze=[head.wieght]": [Says("trainer.freeze: 'head.wieght' ... mean head.weight")],
    "trainer.freeze=['*']": [Says("trainer.freeze: ... frozen ... nothing")],
    "trainer.freeze=stem.*": [Says("trainer.freeze: 'stem.*'")],
    "trainer.profile=everyone": [Says("trainer.profile: 'everyone' ... true ... false")],
    "trainer.limit_batches=0": [Says("trainer.limit_batches: 0 is ...")],
    "trainer.limit_batches=1 trainer.overfit_batches=1": [Says("trainer.limit_batches: cannot be given together with trainer.overfit_batches ...")],
    "invariance=bitwise micro_batch_size=null": [Says("micro_batch_size: null ... invariance=bitwise")],
    "invariance=bitwise micro_batch_size=2 parallel=fsdp": [Says("invariance: bitwise ... parallel=single")],
    "invariance=bitwise micro_batch_size=2 trainer.sync_batchnorm=true": [Says("trainer.sync_batchnorm: true ... invariance=bitwise")],
    "invariance=bitwise micro_batch_size=2 checkpoint.every=null parallel=ddp parallel.compression=int8": [Says("parallel.hook: extras.compression.hooks.Int8")],
    "trainer.divergence.action=rollback checkpoint.every=null parallel=ddp parallel.compression=top_k": [Says("trainer.divergence.action: rollback ... parallel.hook (extras.compression.hooks.TopK)")],
    "trainer.divergence.action=rollback checkpoint.every=10min": [Says("checkpoint.every: 10min, but a rollback ... (steps ...")],
    "trainer.eval_every=10min trainer.early_stopping.patience=2": [Says("trainer.eval_every: 10min, but early stopping ... (steps ...")],
    "trainer.divergence.action=rollback trainer.divergence.back=3": [Says("trainer.divergence.back: 3 ... checkpoint.keep_last=2 ... 2")],
    "trainer.divergence.action=rollback parallel=parameter-server parallel.mode=async launch.nproc_per_node=2": [Says("trainer.divergence.action: rollback, but under ")],
    "scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=2": [Says("scheduler.every: is missing (epoch or step ...")],
    "scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=2 +scheduler.every=batch": [Says("scheduler.every: 'batch' is not valid (epoch or step)")],
    "scheduler=cosine +scheduler.every=epoch": [Says("scheduler.every: this schedule is a function of the step ...")],
    "scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=2 +scheduler.every=step optimizer=sgd optimizer._target_=torch.optim.SGD +optimizer.lr=0.0": [Says("optimizer.lr: 0, but a scheduler of torch multiplies it ...")],
    "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau +scheduler.every=epoch": [Says("scheduler: ReduceLROnPlateau uses a metric ... scheduler=cosine ...")],
    "parallel=ddp launch.nproc_per_node=1 launch.nnodes=0:2": [Says("launch.nnodes: '0:2' ... MIN:MAX")],
    "parallel=ddp launch.nproc_per_node=1 launch.nnodes=x": [Says("launch.nnodes: 'x' is not valid (")],
    "launch.nproc_per_node=1 launch.nnodes=1:2 parallel=single": [Says("parallel: ... 2 ... launch.nproc_per_node=1 ... 2")],
    "launch.nproc_per_node=1 launch.nnodes=1:2 parallel=fsdp parallel.shard=2": [Says("parallel.shard: 2 ... 1 ... launch.nproc_per_node=1 ... 1")],
    "model.norm=batch trainer.sync_batchnorm=true parallel=ddp+pp launch.nproc_per_node=4": [Says("trainer.sync_batchnorm: true, but processes along the pipeline axis do not have their own samples (false, or parallel=ddp, zero, fsdp or hsdp)")],
    "parallel=fsdp launch.nproc_per_node=2 parallel.prefetch=0": [Says("parallel.prefetch: 0 ... null")],
    "model=mlp parallel=tensor launch.nproc_per_node=2 parallel.sequence=true": [Says("parallel.sequence: true MLP ... blocks() ... tensor_plan()")],
    "model=mlp optimizer._target_=schedulefree.AdamWScheduleFree optimizer.lr=0.01 precision.optimizer_state=bf16": [Says("precision.optimizer_state: bf16, but AdamWScheduleFree needs its states outside of its steps too ...")],
    "model=mlp optimizer._target_=schedulefree.AdamWScheduleFree optimizer.lr=0.01 parallel=zero launch.nproc_per_node=2": [Says("parallel: ... averages the weights itself ... ddp ...")],
    "model=gpt dataset=synthetic dataset.kind=tokens task=language_modeling dataset.vocab_size=5 model.dim=16 model.num_heads=4 parallel=tensor launch.nproc_per_node=4": [Says("parallel.tensor: 4 ... embedding ... 5 rows ... ddp, zero")],
    "part=swa trainer.ema_decay=0.9": [Says("trainer.ema_decay: 0.9, but part.swa averages the weights too (one of them)")],
    "part=unfreeze": [Says("part.unfreeze.groups: ...")],
    "part=unfreeze part.unfreeze.groups=[[nothing.*]]": [Says("part.unfreeze.groups=nothing.*: matches no parameter ...")],
    "part=swa part.swa.start=2": [Says("part.swa: start=2 is out of range (from 0 to below 1)")],
    "part=swa part.swa.begin=2": [Says("part.swa.begin: unknown key ...")],
    "part=nothing": [Says("part: no option nothing ...")],
    "part=swa parallel=local-sgd launch.nproc_per_node=2 trainer.eval_every=null checkpoint.every=null": [Says("part: swa, but between two averages ...")],
    "part=text_samples model=gpt dataset=synthetic dataset.kind=tokens task=language_modeling": [Says("part.text_samples.tokenizer: a Synthetic has no encode(text) and decode(tokens) ...")],
    "part=predictions part.predictions.count=0": [Says("part.predictions: count=0 is out of range (at least 1) ...")],
    "part=predictions part.predictions.split=train": [Says("part.predictions.split: 'train' is not valid (one of val, test) ...")],
    "metric=f2": [Says("metric: no option 'f2' ...")],
    "metric=f1 metric.f1.avrage=micro": [Says("metric.f1: ... Unexpected keyword arguments: `avrage`")],
    "metric=f1 metric.f1.average=none_of_them": [Says("metric.f1.average: 'none_of_them' is not valid ...")],
    # data, machine
    "model=gpt": [f"model.vocab_size: {GIVES_IMAGES}", f"model.seq_len: {GIVES_IMAGES}"],
    "dataset=text": [f"model.{key}: {GIVES_TOKENS}" for key in ("num_classes", "in_channels", "image_size")],
    "dataset=mnist dataset.root=/nowhere": ["dataset.root: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte not in /nowhere/MNIST/raw (dataset.download=true)"],
    "dataset=image_folder dataset.root=/nowhere": ["dataset.root: /nowhere/train has no class folders (expected /nowhere/train/<class>/*.png)"],
    "dataset=tokens dataset.root=/nowhere": ["dataset.vocab_size: is null (the number of the tokenizer's tokens)", "dataset.root: /nowhere/train.bin, /nowhere/val.bin not found (train.bin and val.bin, or one file)"],
    "dataset=text dataset.root=/nowhere model=gpt": ["dataset.root: /nowhere is not a folder (give one with text files)"],
    "dataset=synthetic dataset.kind=tokens dataset.augment=true": ["dataset.augment: true: there is no augmentation of tokens (dataset.kind=images has one)"],
    "backend=ucc": ["backend: ucc is not in this PyTorch build, but in builds from source with USE_UCC=1 (gloo, or auto for the best available)"],
    # the run's own keys
    "name=a/b": ["name: 'a/b' is not valid (a directory's name: no slash, at most 200 bytes)"],
    "run.id=mine": ["run.id: cannot be set: it is a hash of the keys that decide the result (set name or run.dir)"],
    "run.dir=/etc/hostname/x": ["run.root: /etc/hostname is not a directory (a directory, or a path where one can be made)"],
    "run.dir=" + "x" * 300: ["run.dir: is too long for a path (255 bytes between slashes, 3000 in all)"],
    "run.resume=/nowhere": ["run.resume: no run or checkpoint at '/nowhere' (auto, never, must, or a path)"],
    # what only a constructor knows
    "model._target_=models.nope.X": [f"model._target_: models.nope.X cannot be imported (ModuleNotFoundError: No module named 'models.nope') {NO_CLASS}"],
    "model.channels=[]": ["model.channels: []: a CNN needs at least one block; give one width per block, e.g. [32, 64]"],
    "model=torchvision model.name=resnet19": [Says("model.name: 'resnet19' is not a torchvision classification model; choose")],
    "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0": ["optimizer.nesterov: true: needs momentum above 0"],
}  # fmt: skip


def lines(output: str) -> list[str]:
    return output.splitlines()


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[:60])
def test_is_refused_with_its_line(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = admit([*line.split(" "), f"run.root={tmp_path}/runs"], world_size=None)  # `start`, but for what would follow
    assert lines(capsys.readouterr().err) == MALFORMED[line]
    assert code == Exit.CONFIGURATION
    assert not list(tmp_path.iterdir())


def test_a_backend_that_this_build_lacks_is_refused() -> None:
    has = {
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": not mpi.is_missing(),
        "ucc": torch.distributed.is_ucc_available(),
    }
    for name, is_available in has.items():
        problems = checked_line([f"backend={name}"]).problems
        assert [problem.key.split(".")[0] for problem in problems] == ([] if is_available else ["backend"])


def test_every_problem_of_a_command_is_in_one_report(tmp_path: Path) -> None:
    ended = command(
        "nonsense", "lr=1", "task=nope", "seed=x", "trainer.max_steps=0", "micro_batch_size=99", "parallel=ddp",
        "parallel.replicate=2", "backend=ucc", "dataset=mnist", "dataset.root=/nowhere", "run.resume=must",
        "optimizer.lr=${nope}", "logger.wandb.x=1", "name=a/b", root=tmp_path / "runs",
    )  # fmt: skip
    keys = [line.partition(":")[0] for line in lines(ended.output)]
    assert sorted(keys) == sorted([
        "nonsense", "lr", "task", "seed", "trainer.max_steps", "micro_batch_size", "parallel.replicate", "backend",
        "dataset.root", "optimizer.lr", "logger.wandb.x", "name",
    ])  # fmt: skip
    assert ended.code == Exit.CONFIGURATION
    assert not list(ended.root.iterdir())


def test_resume_must_needs_a_checkpoint(tmp_path: Path) -> None:
    ended = command("run.resume=must", "run.dir=" + str(tmp_path / "there"), root=tmp_path / "runs")
    assert lines(ended.output) == [f"run.resume: must, but {tmp_path}/there has no checkpoint (auto, or the path of a run)"]
    ended = command(f"run.resume={tmp_path}", root=tmp_path / "runs")
    assert lines(ended.output) == [f"run.resume: '{tmp_path}' has no checkpoint (the path of a run or of a checkpoint)"]


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)

    def obey_modes() -> None:
        """Give up root's right to write anywhere (CAP_DAC_OVERRIDE); anybody else has none to give up."""
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None)
        assert libc.capget(header, sets) == 0
        sets[:3] = [mask & ~(1 << 1) for mask in sets[:3]]  # effective, permitted, inheritable
        assert libc.capset(header, sets) == 0

    ended = command(f"run.dir={tmp_path}/closed/runs", root=tmp_path / "runs", before=obey_modes)
    assert re.fullmatch(r"run\.root: /\S+ cannot be written \(a writable directory\)\n", ended.output)
    assert ended.code == Exit.CONFIGURATION


def python(*arguments: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    path = {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *arguments], cwd=directory, capture_output=True, text=True, env=os.environ | path)


def test_a_malformed_command_ends_in_three_seconds(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = python(str(REPOSITORY / "train.py"), "lr=1", "trainer.max_steps=0", directory=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (ended.returncode, ended.stdout) == (Exit.CONFIGURATION, "")
    assert lines(ended.stderr) == ["lr: unknown key (did you mean optimizer.lr?)", *MALFORMED["trainer.max_steps=0"]]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # of a processor: the machine is shared
    assert not list(tmp_path.iterdir())


def test_what_can_be_checked_without_torch_is() -> None:
    program = "import sys; from framework.cli.run import checked_line; checked_line({}); print('torch' in sys.modules)"
    ended = python("-c", program.format(["seed=x", "backend=gloo", "dataset=mnist", "model=vit"]), directory=REPOSITORY)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


SHELLS = "one of " + ", ".join(
    f"{what}={shell}" for shell in ("bash", "zsh", "fish") for what in ("install", "uninstall", "query")
)
FLAGS = {
    "--lr 0.1": ["--lr: unknown flag (did you mean optimizer.lr=0.1?)"],
    "-m --cfg job seed=1,2": [Says("--cfg: ... -m ... mode=plan -m"), f"seed: {SWEEP}"],
    "--multrun seed=1,2": ["--multrun: unknown flag (did you mean --multirun?)", f"seed: {SWEEP}"],
    "-x": ["-x: unknown flag (a key is set without dashes: key=value; --help lists keys and flags)"],
    "--mode eval": ["--mode: unknown flag (did you mean mode=eval?)"],
    # words
    "help": ["help: is not key=value (did you mean --help?)"],
    "seed=1 plan": ["plan: is not key=value (did you mean mode=plan?)"],
    # a forgotten =, and one with spaces
    "evl X": ["evl: is not key=value (did you mean eval?)", "X: is not key=value (key=value, or group=option)"],
    "seed=1 show": ["show: is not key=value (show must be the first word)"],
    "launch.nnodes=1:2": [
        "parallel: single is one process, but 2 nodes of launch.nproc_per_node=1 give 2 processes (try launch.nnodes=1 launch.nproc_per_node=1, or parallel=ddp, parallel=fsdp)"
    ],
    "lr 0.1": ["lr: is not key=value (did you mean optimizer.lr=VALUE?)", "0.1: is not key=value (key=value, or group=option)"],
    "seed==1": ["seed: two = signs (did you mean seed=1?)"],
    # Hydra's flags
    **{
        f"{flag} nowhere": ["--config-dir: nowhere is not a directory (a folder that holds groups, as conf/ does)"]
        for flag in ("--config-path", "-cd")
    },
    "-cd": ["--config-dir: has no value (--config-dir DIR)"],
    "--package x": ["--package: is a flag of Hydra that does not work here (--cfg job prints the whole)"],
    "--experimental-rerun x": [
        "--experimental-rerun: is a flag of Hydra that does not work here (the same command continues a run)"
    ],
    "--fast-dev-run": ["--fast-dev-run: unknown flag (trainer.max_steps=3 makes a short run)"],
    "--info no": ["--info: 'no' is not valid (one of all, config, defaults, defaults-tree, plugins, searchpath)"],
    "-sc": [f"--shell-completion: '' is not valid ({SHELLS})"],
    "--cfg nonsense": ["--cfg: 'nonsense' is not valid (one of job, hydra, all)"],
    "--resolve": ["--resolve: works only together with --cfg (--cfg job --resolve)"],
    "--cfg job lr=1": ["lr: unknown key (did you mean optimizer.lr?)"],
    "-m seed=1,2,x model=cnn,cnnn": [
        f"model: no option 'cnnn' ({one_of('model')}; did you mean cnn?)",
        "seed: 'x' is not valid (an integer)",
    ],
}


@pytest.mark.parametrize("line", FLAGS)
def test_flags_are_checked_too(line: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    ended = typed(*line.split(" "), directory=folder)
    assert (ended.code, lines(ended.output)) == (Exit.CONFIGURATION, FLAGS[line])
    assert not [path for path in folder.iterdir() if path.name != "runs.output"]
