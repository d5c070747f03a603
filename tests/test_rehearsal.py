"""The rehearsal: what would break the promise is found before the start, with its cure; what keeps it is left alone."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from framework.build.training import Builder
from framework.distributed.world import World
from framework.preflight import child, ranks
from framework.preflight.rehearsal import perform
from framework.runtime.problem import Problem
from tests.harness import Says, assert_close, assert_same_bits, checked, command, finished, refused
from tests.test_resume import after_step, assert_survives_a_kill, crash, killed_and_continued
from tests.test_zoo import line as zoo_line

RUN = ["dataset=synthetic", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8",
       "global_batch_size=8", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.log_every=1", "optimizer.lr=0.01"]  # fmt: skip


def model(name: str) -> list[str]:
    return [*RUN, f"model._target_=tests.faulty.{name}"]


def counts(kind: str) -> list[str]:
    return [*model("Counts"), f"+model.kind={kind}"]


def task(name: str) -> list[str]:
    return [*model("Net"), f"task._target_=tests.faulty.{name}", "task.label_smoothing=0.0"]


def optimizer(name: str) -> list[str]:
    return [*model("Net"), f"optimizer._target_=tests.faulty.{name}"]


def dataset(name: str) -> list[str]:
    return [*model("Net"), f"dataset._target_=tests.faulty.{name}"]


def points(name: str) -> list[str]:
    line = [word for word in model("Net") if not word.startswith("dataset")]
    return [*line, "dataset=map_style", f"dataset.train._target_=tests.faulty.{name}", "dataset.facts={num_classes:10}"]


TWO = "launch.nproc_per_node=2"


def users(train: str, *words: str) -> list[str]:
    """The line of a run on a user's data: `tests.faulty_data.TRAIN`, with its arguments as YAML, if it has any."""
    name, _, arguments = train.partition(" ")
    node = f"{{_target_: tests.faulty_data.{name}{', ' * bool(arguments)}{arguments}}}"
    return ["dataset=map_style", f"dataset.train={node}", "dataset.val={_target_: tests.faulty_data.Points, n: 12}",
            "dataset.test={_target_: tests.faulty_data.Points, n: 12}", "dataset.facts={num_classes: 4}",
            "model._target_=tests.faulty_data.Net", "global_batch_size=10", "trainer.max_epochs=null", "trainer.max_steps=20",
            *words]  # fmt: skip


UNWEIGHTED = "task={_target_: tests.faulty.OnlyLoss}"
DROP = "dataset.collate={_target_: tests.faulty_data.drop, _partial_: true}"
COUPLED = "optimizer: 2 processes compute different results ... after ... more updates by the same gradients: ..."
LATER = (
    "model: restored from a checkpoint, it computes different results ... it keeps something outside ... register_buffer() ..."
)
IN_AN_OBJECT = "model: restored from a checkpoint, it computes different results ... {} changes, and no checkpoint holds it (register_buffer() ..."
FOUND = {
    "a counter": (model("Counter"), "model: ... num_calls ... register_buffer()"),
    "an average": (model("Average"), "model: ... mean ... register_buffer()"),
    "a generator of its own": (model("OwnGenerator"), "model: ... different results each time ... draw from torch"),
    "the time": (model("Clock"), "model: ... different results each time ... draw from torch"),
    "a buffer that is not saved": (model("Forgotten"), "model: ... outside its parameters and persistent buffers"),
    "a parameter made late": (model("Late"), "model: ... makes a parameter (weight) ... constructor"),
    "a teacher, on two": ([*model("Teacher"), "parallel=ddp", TWO], "model: ... changes teacher.weight ... register_buffer()"),
    "an odd extra state": (model("Odd"), "optimizer: ... extra state ... of type object"),
    "means": (task("Means"), "task: ... mean ... reduction='sum'"),
    "a matrix of a metric": (task("Confusion"), "task: ... confusion is of shape [10, 10] ... shape ()"),
    "a hidden momentum": (optimizer("Hidden"), "optimizer: ... Hidden takes a different step ... optimizer.state"),
    "a set": (optimizer("Unkept"), "optimizer: ... of type set"),
    "a weight that is replaced, on two": ([*model("Replaced"), "parallel=ddp", TWO], "model: ... changes last.weight ... parametrize ..."),
    "a clamp, on two": ([*model("Clamped"), "parallel=ddp", TWO], "model: ... changes last.weight ... parametrize ..."),
    "a shift that is set by the first samples, on two": ([*model("Initialised"), "parallel=ddp", TWO], "model: its forward changes shift, a parameter ..."),
    "a part that changes weights when the run saves": ([*model("Net"), "+part.saves={_target_: tests.faulty.Saving, what: weights}"], "part.saves: saving() changes the weights ..."),
    "a part that changes the rate when the run saves": ([*model("Net"), "+part.saves={_target_: tests.faulty.Saving, what: rate}"], "part.saves: saving() changes the weights or the learning rate ..."),
    "a state with a number as a key": ([*model("Net"), "+part.keyed={_target_: tests.faulty.OddKeys, key: 3, is_inner: true}"], "part.keyed: state_dict() has the key 3 (a text without /)"),
    "a state with a key that is a path": ([*model("Net"), "+part.keyed={_target_: tests.faulty.OddKeys, key: a/b, is_inner: false}"], "part.keyed: state_dict() has the key 'a/b' (a text without /)"),
    "a plateau of evaluations by the clock": ([*RUN, "model=mlp", "part=plateau", "trainer.eval_every=1min"], "part.plateau: keeps ... trainer.eval_every is a time ... (steps ..."),
    "a buffer made late": (model("LateBuffer"), "model: ... makes a parameter or buffer (mean) ... constructor"),
    "SyncBatchNorm": ([*model("Synchronised"), "parallel=ddp", TWO], "model: ... trainer.sync_batchnorm=true"),
    "a sparse gradient": (model("Sparse"), "model: table.weight ... sparse=False"),
    "a metric called step": ([*task("NamedMetric"), "+task.metric=step"], "task: its column step has the name of another column (use a new name)"),
    "a metric called lr": ([*task("NamedMetric"), "+task.metric=lr"], "task: its column lr has the name of another column ..."),
    "a metric called loss": ([*task("NamedMetric"), "+task.metric=loss"], "task: its metrics() returns a value with the name of the loss (use a new name)"),
    "two metrics of one name": ([*task("NamedMetric"), "+task.metric=one", "metric={mae: {_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}}"], "metric: its column mae has the name of another column ..."),
    "a metric called as a turn's loss": ([*task("NamedMetric"), "+task.metric=all_loss", "+optimizer.turns={all: {match: ['*']}}"], "task: its value all_loss has the name of the loss of a turn ..."),
    "a task with a parameter": (task("Weighted"), "task: ... log_variance would not be trained ..."),
    "an optimizer that cannot be restored": (optimizer("Stubborn"), "optimizer: its state cannot be restored: ValueError: the state of a stranger ..."),
    "a counting optimizer": (optimizer("Lookahead"), "optimizer: restored from a checkpoint, Lookahead takes a different step ... count changes ... optimizer.state ..."),
    "data from an own generator": ([*dataset("Shuffled"), "dataset.own=true"], "dataset: ... its own generator ... keys ..."),
    "a type that no checkpoint supports": ([*model("ComplexWeight"), "precision=fp64"], "model: turn is torch.complex128, a type that no checkpoint supports ..."),
    "data that count": (dataset("Progressive"), "dataset: the same samples differ each time ..."),
    "data that evaluations cannot have": ([*dataset("Keyed"), "dataset.augment=true"], "dataset: its split val ..."),
    "what is drawn once for all": (model("Cached"), "model: restored from a checkpoint, it computes different results ..."),
    "what is drawn once for all, on two": ([*model("Cached"), "parallel=ddp", TWO, "micro_batch_size=4"], "..."),
    "a hook": (counts("hook"), LATER),
    "a default": (counts("default"), LATER),
    "a counter behind much": (counts("much"), IN_AN_OBJECT.format("count.num_calls")),
    "a number of C": (counts("c"), LATER),
    "a hidden model": (model("Hidden2"), "model: restored from a checkpoint, an evaluation gives a different loss ... register_buffer() ..."),
    "an evaluation that moves a buffer": ([*model("Calibrated"), "parallel=ddp", TWO], "model: an evaluation changes its buffer largest ..."),
    "an evaluation that trains": (model("TrainsOn"), "model: an evaluation puts the model into training mode ..."),
    "a rank": ([*model("OfRank"), "parallel=ddp", TWO], "parallel: 2 processes compute different results ..."),
    "an average in an array": (task("InAnArray"), "task: mean changes from step to step, and no checkpoint holds it ... register_buffer() ..."),
    "a threshold for all that a rank has, zero": ([*optimizer("Threshold"), "parallel=zero", TWO], COUPLED),
    "deep within": (model("Deep"), "model: ... different results ... register_buffer() ..."),
    "a sum not taken, fsdp": ([*optimizer("NormOfShards"), "parallel=fsdp", TWO], "optimizer: ... norm is a sum over the processes ... full_tensor() ... with optimizer=sgd they compute the same ..."),
    "one state for all": (optimizer("OneForAll"), "optimizer: ... share their memory ..."),
    "tied by its data": (model("TiedByData"), "model: last.weight and again.weight share their memory ..."),
    "late for all that a rank has, zero": ([*optimizer("CouplesLate"), "parallel=zero", TWO], COUPLED),
    "late for all that a rank has, pipeline": ([*RUN, "model=mlp", "optimizer._target_=tests.faulty.CouplesLate", "parallel=pipeline", TWO], COUPLED),
    "rounding that grows": ([*optimizer("Amplifies"), "parallel=ddp", TWO], "optimizer: 2 processes compute different results ... with optimizer=sgd they compute the same: ... or amplifies rounding (launch.nproc_per_node=1 ..."),
    "a number of all that a rank has, zero": ([*optimizer("Estimates"), "parallel=zero", TWO], "optimizer: ... its norm is another number on each process, which has only some of the parameters ... (parallel=ddp)"),
    "a constructor with a generator of its own": (model("OtherEachTime"), "model: its constructor makes another last.bias each time ... seeds ..."),
    "samples drawn once for all": (points("PointsDrawnOnce"), "dataset: a sample depends on the samples before ..."),
    "samples that count": (points("PointsThatCount"), "dataset: samples.num_fetched changes when samples are fetched ..."),
    "numbers of a state, fsdp": ([*optimizer("Drifting"), "parallel=fsdp", TWO], "optimizer: ... its state of first.weight differs between the processes: ... norms ..."),
    "a monitor of no column": ([*RUN, "model=mlp", "metric=f1", "checkpoint.monitor=val/f1_macro", "checkpoint.mode=max"], "checkpoint.monitor: val/f1_macro is not measured (one of val/loss, ... val/f1)"),
    "a misspelt monitor": ([*RUN, "model=mlp", "checkpoint.monitor=val/acuracy", "checkpoint.mode=max"], "checkpoint.monitor: val/acuracy is not measured (one of val/loss, ... did you mean val/accuracy?)"),
    "a metric with a memory": ([*RUN, "model=mlp", "metric=f1", "metric.f1._target_=tests.own_metrics.Best"], "metric.f1: restored from a checkpoint, an evaluation gives a different f1 ... reset() ..."),
    "a view, channels last": ([*model("Viewing"), "trainer.channels_last=true"], "model: ... view size ... trainer.channels_last=false ... `reshape`"),
    "channels first": (model("ChannelsLast"), "model: ... AssertionError"),
    "a kernel for the run's own precision": ([*model("OnlyWholeIn16Bits"), "precision=bf16", "parallel=tensor", TWO], "parallel: a step in bf16 on 2 processes fails: ... plain tensors ... (parallel=ddp)"),
    "a wrong plan": ([*model("WrongPlan"), "parallel=tensor", TWO], "parallel: ..."),
    "statistics behind the blocks": ([*model("Statistics"), "parallel=pipeline", TWO, "micro_batch_size=4"], "parallel: 2 processes compute different results ... after two steps: the buffer mean differs by ..."),
    "a split that draws without a seed": (users("DrawnSplit", "dataset.val={_target_: tests.faulty_data.DrawnSplit, own: true}"), "dataset: its val split has other samples each time it is loaded ... draw from torch"),
    "a training split that draws without a seed": (users("DrawnSplit own: true"), "dataset: its train split has other samples each time it is loaded ..."),
    "samples of a process": (users("OfProcess", "dataset.num_workers=2"), "dataset: its samples differ in loader processes ... dataset.num_workers=0"),
    "rows left out": (users("Damaged", DROP, UNWEIGHTED), "dataset: a micro-batch of 10 samples has 7 rows, but its loss is divided by the number of samples ..."),
    "rows left out, on two": (users("Damaged", DROP, UNWEIGHTED, "parallel=ddp", TWO), "dataset: a micro-batch of 5 samples has ... rows, but its loss ..."),
    "rows twice": (users("Points", "+dataset.batch_transform={_target_: tests.faulty_data.Twice}", UNWEIGHTED), "dataset: a micro-batch of 10 samples has 20 rows ..."),
    **{f"a dataset that {what} with its epoch": (users(f"ByEpoch growth: {growth}"), f"dataset: its set_epoch(1) changes its length from 40 to {40 + growth}: ...")
       for what, growth in (("grows", 10), ("shrinks", -10))},
    "epochs of another length": (users("Points", "sampler._target_=tests.faulty_data.Epochs", "+sampler.kind=shorter"), "sampler: epoch 3 has 20 samples, and epoch 0 has 40 (all epochs ..."),
    "epochs that are drawn": (users("Points", "sampler._target_=tests.faulty_data.Epochs", "+sampler.kind=drawn"), "sampler: its epoch 0 has other samples each time ... seeded by the seed and the epoch)"),
    "numbers of no sample": (users("Points", "sampler._target_=tests.faulty_data.Epochs", "+sampler.kind=beyond"), "sampler: epoch 0 has the sample 4 ... 0 to 39 ..."),
    "a last batch of one sample": (users("Points n: 1001", "+model.is_normed=true"), "model: it does not take a micro-batch of 1 sample, the run's smallest: ValueError: Expected more than 1 value ... (drop_last=true ..."),
    "a last batch of one sample, on two": (users("Points n: 43", "+model.is_normed=true", "parallel=ddp", TWO), "model: it does not take a micro-batch of 1 sample ... (drop_last=true ..."),
    "a micro-batch of one sample": (users("Points", "+model.is_normed=true", "micro_batch_size=3"), "model: it does not take a micro-batch of 1 sample ... (a micro_batch_size that divides global_batch_size"),
    "a parameter in another precision, fsdp": (users("Points", "+model.scale=float64", "parallel=fsdp", TWO), "parallel: a step in fp32 on 2 processes fails: AssertionError: FSDP expects uniform original parameter dtype ..."),
    "its own sum over processes": ([*model("SumsItself"), "parallel=ddp", TWO, "micro_batch_size=4"], "model: 2 processes compute different results ... its own code asks torch.distributed: all_reduce at ... faulty.py: ..."),
    "draws that no layer shows, cut": ([*model("DroppingWhereCut"), "micro_batch_size=4", "parallel=tensor", TWO], "parallel: 2 processes compute different results ... first in the output of last ... without dropout, they compute the same ... (no dropout, or parallel=ddp)"),
    "draws that a part starts later, cut": ([*model("DroppingLate"), "+part.starts._target_=tests.faulty.StartsDropping", "micro_batch_size=4", "parallel=tensor", TWO], "part.starts: 2 processes compute different results ... a step after ... more updates by the same gradients: the gradient of ... without it, they compute the same ..."),
    "a micro-batch of one sample, where the batch grows": (users("Points", "+model.is_normed=true", "micro_batch_size=5", "part=batch_warmup", "part.batch_warmup.start=5", "part.batch_warmup.samples=200"), "model: it does not take a micro-batch of 1 sample ..."),
    "experts that draw": ([*model("Mixed"), "+model.kind=dropout", "micro_batch_size=4", "parallel=expert", TWO], "parallel: 2 processes compute different results ... first in the output of chosen ... without dropout, they compute the same ..."),
    "experts that look at all choices": ([*model("Mixed"), "+model.kind=coupled", "parallel=expert", TWO], "parallel: 2 processes compute different results ... first in the output of chosen ..."),
    "experts that count on all": ([*model("Mixed"), "+model.kind=counted", "parallel=expert", TWO], "parallel: a step on 2 processes fails with this model: AssertionError: all of them ..."),
    "a connection over all blocks": ([*model("Residual"), "+model.reach=0.1", "parallel=pipeline", TWO], "parallel: 2 processes compute different results ... first in the output of last; loss of step 1 is nan instead of ... faulty.py: uses a tensor of an earlier stage ... (parallel=ddp)"),
    "tokens that meet elsewhere": ([*model("Rolling"), "dataset.kind=tokens", "dataset.vocab_size=16", "dataset.seq_len=8", "task=language_modeling", "parallel=tensor", TWO], "parallel: 2 processes compute different results ... first in the output of ... (parallel.sequence=false"),
    "a rate that is not restored": ([*model("Net"), "+part.lowers._target_=tests.faulty.LowersTheRate"], "part.lowers: restored from a checkpoint, ... loop.lr_share changes, and no checkpoint holds it ..."),
    "padding in a column": ([*model("Net"), "+part.counts._target_=tests.faulty.CountsPadding", "parallel=ddp", TWO, "micro_batch_size=4"], "part.counts: 2 processes compute different results ... num_samples of step 1 is 16.0 instead of 12.0 ... loop.is_padding ..."),
    "padding in a column, pipeline": ([*RUN, "model=mlp", "+part.counts._target_=tests.faulty.CountsPadding", "parallel=ddp+pp", "parallel.replicate=2", "parallel.pipeline=2", "launch.nproc_per_node=4", "micro_batch_size=4"], "part.counts: 4 processes compute different results ... num_samples of step 1 is ..."),
    "a gradient that is brought back": ([*model("Net"), "part=unfreeze", "part.unfreeze.groups=[['first.*']]", "+part.fills._target_=tests.faulty.Refills"], "part.fills: it brings back the gradient of a parameter ... loop.recompute() does"),
    "a gradient of another turn": ([*model("Net"), "+optimizer.turns={one: {match: [first.*]}, two: {match: [last.*]}}", "+part.fills._target_=tests.faulty.Refills"], "part.fills: it brings back the gradient of a parameter that its turn ..."),
    "a mode that a micro-batch leaves": ([*task("LeavesAutocastOn")[:-1], "parallel=ddp", TWO, "micro_batch_size=4"], "model: restored from a checkpoint, it computes different results ..."),
    "a hook that remembers": ([*model("Net"), "parallel=ddp", TWO, "parallel.hook={_target_: tests.faulty.sends_half, _partial_: true}"], "parallel: 2 processes keep something that no checkpoint holds: restored from one, the gradient of ... (parallel.hook=null)"),
    # what goes on from step to step, before it matters
    "a count that will matter": ([*model("Patient"), "+model.kind=counter"], "model: num_calls ... no checkpoint ... register_buffer() ..."),
    "an object": ([*model("Patient"), "+model.kind=object"], IN_AN_OBJECT.format("memory.means[0]")),
    "a mean teacher": (model("Teacher2"), "model: ... different results ... register_buffer() ..."),
    "a count in: object": (counts("object"), IN_AN_OBJECT.format("count.num_calls")),
    **{f"a count in: {kind}": (counts(kind), LATER) for kind in ("attribute", "iterator", "closure", "class", "global")},
    "a counter in the task": (task("Annealed"), "task: num_calls ... no checkpoint ..."),
    "a buffer made later": (model("LaterBuffer"), "model: late appears, or changes its shape, in training ... constructor ..."),
    "a buffer that gets its shape, with a short last batch": (users("Points n: 43", "model._target_=tests.faulty_data.Observing"), "model: least appears, or changes its shape, in training ... constructor ..."),
    "a buffer that grows": (model("GrowingBuffer"), "model: history appears, or changes its shape, in training ... constructor ..."),
    "a teacher that moves late, on two": ([*model("LateTeacher"), "parallel=ddp", TWO], "model: its forward changes teacher.weight, a parameter ..."),
    "a wrong chain": ([*model("WrongChain"), "parallel=pipeline", TWO], "parallel: 2 processes compute different results ... first in the output of last; loss of step 1 is ... instead of"),
    "blocks that are not called by forward, fsdp": ([*model("NotByForward"), "model.parts.blocks=blocks", "parallel=fsdp", TWO], "parallel: a step on 2 processes fails with this model: RuntimeError: ... DTensor ... (model.parts.blocks=[], because its code uses the weights of a block ..."),
}  # fmt: skip


def found(line: list[str]) -> list[Problem]:
    findings, fate = perform(Builder(checked(*line), world=World.alone()))
    assert not fate
    return findings


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero"])
def test_a_block_that_is_passed_over_now_and_then_is_found(strategy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_IDLE_S", 3.0)
    (finding,) = found([*model("LayerDrop"), f"seed={seed}", "micro_batch_size=4", f"parallel={strategy}", TWO])
    assert not finding.is_warning and "find_unused_parameters=true" in finding.expected


@pytest.mark.slow
@pytest.mark.parametrize("data", ["Pooled", "Polling"])
def test_loader_processes_that_wait_for_a_thread_are_found_with_the_place(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_SILENT_S", 2.0)
    monkeypatch.setattr(child, "_HANGS_S", 3.0)
    (finding,) = found(users(data, "dataset.num_workers=2"))
    assert not finding.is_warning and "it waits forever at " in finding.what and "faulty_data.py" in finding.what
    assert found(users(data)) == []


def said(finding: Problem) -> str:
    return f"{finding.key}: {finding.what} ({finding.expected})"


QUICK = (
    "an average",
    "the time",
    "a parameter made late",
    "an odd extra state",
    "a count that will matter",
    "a count in: object",
)


@pytest.mark.quick(6)
@pytest.mark.parametrize("what", sorted(FOUND, key=lambda what: what not in QUICK))
def test_what_breaks_the_promise_is_found(what: str) -> None:
    line, expected = FOUND[what]
    *warnings, finding = found(line)
    assert not finding.is_warning and all("only those of micro-batch 0" in said(one) for one in warnings)
    assert said(finding) == Says(expected)


TEXTS = ["dataset=map_style", *(f"dataset.{split}={{_target_: tests.faulty_data.Texts}}" for split in ("train", "val", "test")),
         "dataset.collate={_target_: tests.faulty_data.padded, _partial_: true}", "dataset.facts={vocab_size: 16, seq_len: 8}",
         "task=language_modeling", "model=gpt", "model.dim=8", "model.num_layers=2", "model.num_heads=2", "global_batch_size=4",
         "micro_batch_size=1", "trainer.max_epochs=null", "trainer.max_steps=4", "launch.nproc_per_node=4"]  # fmt: skip
RIGHT = {
    "residuals around blocks": [*model("Residual"), "parallel=pipeline", TWO],
    "a weight that no step uses": [*model("Residual"), "+model.has_spare=true", "parallel=ddp+pp", "parallel.replicate=2",
                                   "parallel.pipeline=2", "launch.nproc_per_node=4", "micro_batch_size=4"],
    "experts that lie apart": [*model("Mixed"), "+model.kind=apart", "parallel=expert", TWO],
    "a constructor that draws from numpy": [*model("NumpyWeights"), "parallel=fsdp", TWO],
    "noise before the modules of a chain": model("NoisyChain"),
    "a hook of training": model("Pulled"),
    "a flag of the mode": [*model("Observing"), "parallel=ddp", TWO],
    "a task without metrics": [*model("Net"), "task._target_=tests.faulty.OnlyLoss"],
    "samples in an open file": points("PointsInAnArchive"),
    "samples kept as they are stored": [*points("Points"), "parallel=ddp", TWO],
    "latest activations": model("LastSeen"),
    "a generator that is not used": [*model("Patient"), "+model.kind=generator"],
    "a clamp, alone": model("Clamped"),
    "a shift that is set by the first samples, alone": model("Initialised"),
    "modules in a vmap, on two": [*model("Mapped"), "parallel=ddp", TWO],
    "a fixed micro-batch": [*model("Fixed"), "micro_batch_size=16", "global_batch_size=16", "dataset.num_train=64"],
    "an optimizer that draws": optimizer("Langevin"),
    "data from common generators": dataset("Shuffled"),
    "evaluations that draw": model("AlwaysDropping"),
    "a model": model("Net"),
    "infinite numbers, on two": [*model("Bounded"), "parallel=ddp", TWO],
    "tensors made in the forward, on two": [*model("Placing"), "parallel=ddp", TWO],
    "a column of a clock, on two": [*model("Net"), "+part.clocked._target_=tests.faulty.Clocked", "parallel=ddp", TWO],
    "the time of the last row": [*model("Net"), "+part.timed={_target_: tests.faulty.Timed, is_saved: false}"],
    "the time of the last row, in a state": [*model("Net"), "+part.timed={_target_: tests.faulty.Timed, is_saved: true}"],
    "sharpness behind frozen layers": [*model("Net"), "part=[unfreeze,sharpness]", "part.unfreeze.groups=[['first.*']]"],
    "a constructor that reads numbers": model("Rates"),
    "a constructor that reads numbers, on two": [*model("Rates"), "parallel=fsdp", TWO],
    "complex numbers": model("Rotary"),
    "the same model again": model("cached"),
    "a buffer that is computed anew, on two": [*model("Cache"), "parallel=fsdp", TWO],
    "a part that calls a block and draws, on two": [*model("Residual"), "+part.draws._target_=tests.faulty.LooksAndDraws", "parallel=ddp", TWO],
    "weights that hooks compute, on two": [*model("Hooked"), "parallel=fsdp", TWO],
    "a scripted model": model("scripted"),
    "parameters that a model leaves out, frozen": [*model("TrainsOnly"), "trainer.freeze=[first.*]"],
    "not a number": model("Unknown"),
    "memory that is laid out otherwise": model("Strided"),
    "lists of tensors in groups": optimizer("Lookback"),
    "a teacher, alone": model("Teacher"),
    "an extra state": model("Extra"),
    "an optimizer that counts": optimizer("Counting"),
    "a layer that is read, cut": [*model("Reader"), "parallel=tensor", TWO],
    "a model of a library": zoo_line("hf llama"),
    "images, channels last": [*model("ChannelsLast"), "trainer.channels_last=true"],
    "sets of points in one tensor, on two": users("Sets", "dataset.val={_target_: tests.faulty_data.Sets}", "dataset.collate={_target_: tests.faulty_data.joined, _partial_: true}",
                                                 "task=regression", "model._target_=tests.faulty_data.Pool", "parallel=ddp", TWO, "micro_batch_size=3"),
    "a mean that is zero but for rounding, on two": [*model("ZeroMean"), "optimizer=sgd", "optimizer.lr=1.0", "parallel=ddp", TWO, "micro_batch_size=4"],
    "statistics, without the short last batch": users("Points n: 41", "+model.is_normed=true", "drop_last=true"),
    "nested tensors": users("Points", "dataset.collate={_target_: tests.faulty_data.nested, _partial_: true}",
                            "model._target_=tests.faulty_data.OfRows", "parallel=ddp", TWO),
    "rows left out, with a weight, on two": users("Damaged", DROP, "parallel=ddp", TWO, "micro_batch_size=5"),
    "a collate function that leaves nothing of few samples": users("Damaged", DROP),
    "a split that draws": users("DrawnSplit", "dataset.val={_target_: tests.faulty_data.DrawnSplit}"),
    **{f"micro-batches of different lengths, {' '.join(strategy)}": [*TEXTS, *(f"parallel{word}" for word in strategy)]
       for strategy in (["=pipeline"], ["=context"], ["=context", ".attention=ring"], ["=pp+fsdp+tp", ".tensor=1", ".shard=2"])},
    "data that torch has computed on several threads, on two": [*users("computed", "parallel=ddp", TWO), "dataset.facts={num_classes: 10}",
                                                                "model={_target_: torch.nn.Sequential, _args_: [{_target_: torch.nn.Linear, in_features: 784, out_features: 256}, {_target_: torch.nn.Sigmoid}, {_target_: torch.nn.Linear, in_features: 256, out_features: 10}]}",
                                                                "dataset.val={_target_: tests.faulty_data.computed, n: 12}", "dataset.test={_target_: tests.faulty_data.computed, n: 12}"],
    "a normalisation in evaluation mode, on two": [*model("FrozenNorm"), "parallel=ddp", TWO],
    "a normalisation over all processes, on two": [*RUN, "model=cnn", "model.channels=[4]", "model.norm=batch", "trainer.sync_batchnorm=true", "parallel=ddp", TWO],
    "a sampler of lists": users("Points", "sampler._target_=tests.faulty_data.Epochs", "+sampler.kind=list"),
}  # fmt: skip


QUIET = ("noise before the modules of a chain", "a task without metrics", "a generator that is not used")


@pytest.mark.quick(3)
@pytest.mark.parametrize("what", sorted(RIGHT, key=lambda what: what not in QUIET))
def test_what_keeps_it_is_left_alone(what: str) -> None:
    assert found(RIGHT[what]) == []


LATE_FORWARD = "in a later step, its training forward"
WARNED = {
    "a loss over pairs": (task("Coupled"), "task: ... neither the sum nor the mean ..."),
    "functional dropout": (model("Dropping"), "model: ... draws random numbers ..."),
    "draws in some steps": (
        model("Redraws"),
        "model: in a later step, its training forward draws random numbers, so the results ...",
    ),
    "a collate function that draws, and seldom mixes": (
        users("Points", "dataset.collate={_target_: tests.faulty_data.mixed_at_times, _partial_: true, share: 0.01}"),
        "dataset: its collate function or a transform draws once for a whole micro-batch, so the results ...",
    ),
    "an evaluation that draws": (
        [*model("Net"), "task._target_=tests.faulty.Samples"],
        "model, task: an evaluation draws random numbers, so the results ...",
    ),
    "a model that mixes in later steps": (model("MixesLater"), f"model: {LATE_FORWARD} couples the samples ..."),
    "a part that mixes in later steps": (
        [*model("Net"), "+part.mixing={_target_: tests.faulty.Mixing, kind: roll, start: 4000}", "trainer.max_steps=9000"],
        "model, part.mixing: in a later step, its training forward or batch() couples the samples ...",
    ),
    "a part that draws in some steps": (
        [*model("Net"), "+part.mixing={_target_: tests.faulty.Mixing, kind: noise, share: 0.02}"],
        "model, part.mixing: in a later step, its training forward or batch() draws random numbers ...",
    ),
    **{
        f"a step that {what} later": (
            [
                *model("Net"),
                f"task={{_target_: tests.faulty.MixingStep, kind: {kind}, start: {start}}}",
                "trainer.max_steps=9000",
            ],
            f"model, task: {LATE_FORWARD} {what} ...",
        )
        for kind, start, what in (("noise", 5, "draws random numbers"), ("roll", 5, "couples"), ("roll", 4000, "couples"))
    },
    "an own normalisation": (model("Coupling"), "model: ... couples the samples ..."),
    "own statistics": (model("Statistics"), "model: ... change its buffer mean ..."),
    "a part that draws": (
        [*model("Net"), "+part.mixing={_target_: tests.faulty.Mixing, kind: noise}"],
        "part.mixing: its batch() draws random numbers ...",
    ),
    "a part that mixes": (
        [*model("Net"), "+part.mixing={_target_: tests.faulty.Mixing, kind: roll}"],
        "part.mixing: its batch() couples the samples ...",
    ),
    "a backward pass over the whole batch": (model("Clipping"), "model: its backward pass couples the samples ..."),
    "a loss over more samples than a rehearsal's": (
        [*task("Hardest"), "+task.count=16", "global_batch_size=32"],
        "task: its loss of 32 samples (at ... faulty.py: ... is not the sum of the losses of its halves, so the results ...",
    ),
    "a loss over more samples than a process has": (
        [*task("Hardest"), "+task.count=8", "global_batch_size=16"],
        "task: its loss of 16 samples (at ... faulty.py: ... is not the sum of the losses of its halves, so the results ...",
    ),
    "a metric of the whole batch": (task("Spread"), "task: its value spread of a batch is not the sum ..."),
    "statistics of a task": ([*model("Net"), "task._target_=tests.faulty.Centred"], "task: ... change its buffer center ..."),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WARNED)
def test_what_the_number_of_processes_would_decide_is_warned_of(what: str) -> None:
    line, expected = WARNED[what]
    assert found(line) == []  # one process
    ddp = [*line, "parallel=ddp", TWO]
    (finding,) = found(ddp)
    assert finding.is_warning and said(finding) == Says(expected + " depend on the number of processes (set micro_batch_size")
    assert ("only the samples of a step's micro-batch 0" in said(finding)) == (" buffer " in expected)
    cut = [said(finding) for finding in found([*ddp, "micro_batch_size=2"])]
    follows = (
        f"{expected.split()[0]} in training, samples change its buffer ... of a step's samples only those of micro-batch 0 ..."
    )
    assert cut == [Says(follows)] * (" buffer " in expected)
    (finding,) = found([*line, "micro_batch_size=auto"])
    assert said(finding) == Says(f"{expected} and their memory (set micro_batch_size to a number")


UNREAD = {"task: stats['mean']": task("InADictionary"), "model: num_passes": [*model("Patient"), "+model.kind=unread"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREAD)
def test_a_number_that_no_checkpoint_holds_is_warned_of_if_nothing_seems_to_read_it(name: str) -> None:
    (finding,) = found(UNREAD[name])
    expected = f"{name} changes from step to step, and no checkpoint holds it: if a step reads it, ..."
    assert finding.is_warning and said(finding) == Says(expected)


@pytest.mark.slow
def test_a_parameter_that_each_micro_batch_sets_is_warned_of() -> None:
    (finding,) = found([*model("Initialised"), "micro_batch_size=4"])
    expected = "model: its forward changes shift, a parameter, in each micro-batch of a step anew (micro_batch_size=null ..."
    assert finding.is_warning and said(finding) == Says(expected)


@pytest.mark.slow
def test_what_does_not_run_in_float64_takes_its_steps_under_the_strategy_all_the_same() -> None:
    warning, refusal = found([*task("Probing"), "parallel=fsdp", TWO])
    assert warning.is_warning and said(warning) == Says(
        "parallel: the strategy was not compared ... must have the same dtype ..."
    )
    assert not refusal.is_warning and said(refusal) == Says(
        "parallel: a step in fp32 on 2 processes fails: ... (parallel=zero)"
    )
    assert found([*task("Probing"), "parallel=zero", TWO]) == [warning]


@pytest.mark.slow
def test_a_process_that_has_computed_in_float64_refuses_no_run() -> None:
    assert found([*model("OfOneDtype"), "parallel=ddp", TWO]) == []


DRAWING = {"model": model("AlwaysDropping"), "data": dataset("Shuffled"), "optimizer": optimizer("Langevin")}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "model", "optimizer"])
def test_what_data_evaluations_and_optimizers_draw_has_keys(what: str, tmp_path: Path) -> None:
    line = [
        *DRAWING[what], "precision=fp64", "micro_batch_size=2", "trainer.eval_every=2", "checkpoint.every=1",
        "rehearse=false",
    ]  # fmt: skip
    one = finished(*line, root=tmp_path / "one")
    assert_close(finished(*line, "parallel=ddp", TWO, root=tmp_path / "two"), one)
    assert_same_bits(killed_and_continued(*line, at=3, root=tmp_path / "cut"), one)


def test_it_is_reported_before_anything_is_made() -> None:
    assert refused(*model("Counter"), "rehearse=true") == Says(
        "model: ... num_calls ... rehearse=false starts without a rehearsal)"
    )


def test_it_can_be_switched_off_and_is_no_part_of_the_identity(tmp_path: Path) -> None:
    ended = finished(*model("Counter"), "rehearse=false", root=tmp_path / "runs")
    assert checked(*model("Net"), "rehearse=false").run.id == checked(*model("Net"), "rehearse=true").run.id
    assert ended.summary["status"] == "finished"


def test_it_says_nothing_and_changes_nothing(tmp_path: Path) -> None:
    with_it = finished(*model("Noisy"), "rehearse=true", root=tmp_path / "with")
    without = finished(*model("Noisy"), "rehearse=false", root=tmp_path / "without")
    assert with_it.output.count("said by the model") == without.output.count("said by the model")
    assert_close(with_it, without, tolerance=0.0)


def fatal() -> None:
    os.environ["FATAL"] = str(os.getpid())


def test_a_rehearsal_that_dies_is_a_warning_and_the_run_starts(tmp_path: Path) -> None:
    ended = finished(*model("Killed"), "rehearse=true", root=tmp_path / "runs", before=fatal)
    assert "the rehearsal was not finished: its process was killed by SIGKILL" in ended.output


def graph(layout: str, persistent: str) -> list[str]:
    return [*model("Graph"), f"+model.layout={layout}", f"+model.persistent={persistent}", "parallel=ddp", TWO]


FOUND_WITHOUT = {
    "a state of no parameter": (optimizer("ForAll"), "optimizer: ForAll keeps 'all' in its state, an entry that belongs to no parameter"),
    "parameters that a model leaves out": (model("TrainsOnly"), "model: ... parameters() leaves out first.weight, ... (trainer.freeze=[first.*], "),
    "a sparse buffer": (graph("sparse_coo", "true"), "model: graph has the layout torch.sparse_coo, ... (a plain attribute, "),
    "a sparse buffer that is not saved": (graph("sparse_coo", "false"), "model: graph has the layout torch.sparse_coo, ... (a plain attribute, "),
    "a sparse buffer of rows": (graph("sparse_csr", "true"), "model: graph has the layout torch.sparse_csr, ... (a plain attribute, "),
    "an optimizer that needs a closure": (optimizer("ByClosure"), "optimizer: ByClosure needs a closure"),
    "what is trained changes": ([*model("FreezesLater"), "trainer.max_steps=8", "checkpoint.every=2"], "the trained parameters have changed since the start (requires_grad)"),
    "statistics that other processes do not have": (
        [*model("FreezesStatistics"), "micro_batch_size=4", "trainer.max_steps=8", "trainer.eval_every=null", "checkpoint.every=null", "parallel=ddp", TWO],
        "a BatchNorm1d goes into evaluation mode during a run, and only rank 0 has its statistics (keep it"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("what", FOUND_WITHOUT)
def test_what_a_run_without_a_rehearsal_finds_too(what: str, tmp_path: Path) -> None:
    line, said = FOUND_WITHOUT[what]
    ended = command(*line, "rehearse=false", root=tmp_path / "runs")
    assert ended.code == 78 and all(words in ended.output for words in said.split(" ... ")), ended.output


def test_one_process_has_the_statistics_of_a_model_that_freezes_them(tmp_path: Path) -> None:
    line, _ = FOUND_WITHOUT["statistics that other processes do not have"]
    finished(*line[:-2], root=tmp_path / "runs")


@pytest.mark.slow
def test_what_a_rehearsal_computes_no_run_inherits(tmp_path: Path) -> None:
    """Nor what is computed without storage: the process that starts the workers has not called the model."""
    line = [*model("Cached"), "rehearse=true", "micro_batch_size=4"]
    assert command(*line, root=tmp_path / "runs").code == 78
    ended = finished(*model("cached"), "rehearse=true", root=tmp_path / "cached")
    assert ended.summary["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero"])
def test_a_backward_pass_sees_the_gradients_of_one_process(strategy: str, tmp_path: Path) -> None:
    line = [*model("ClampsGradients"), "precision=fp64", "micro_batch_size=2", "rehearse=true"]
    one = finished(*line, root=tmp_path / "one")
    assert_close(finished(*line, f"parallel={strategy}", "launch.nproc_per_node=3", root=tmp_path / "three"), one)


@pytest.mark.slow
def test_complex_weights_are_trained_saved_and_continued(tmp_path: Path) -> None:
    line = [*model("ComplexWeight"), "micro_batch_size=2", "checkpoint.every=1", "parallel=ddp", TWO, "rehearse=true"]
    assert command(*line, root=tmp_path / "cut", before=after_step(3, crash)).code < 0
    whole = finished(*line, root=tmp_path / "whole")
    assert_same_bits(finished(*line, root=tmp_path / "cut"), whole)
    one = finished(*line[:-3], "parallel=single", root=tmp_path / "one")
    losses = [[row["loss"] for row in run.rows] for run in (whole, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and whole.weights["turn"].is_complex()


@pytest.mark.slow
def test_memory_that_is_laid_out_otherwise_is_saved_and_continued(tmp_path: Path) -> None:
    line = [*model("Strided"), "checkpoint.every=1"]
    assert_survives_a_kill(*line, at=3, root=tmp_path)


def compute(answer: Connection) -> None:
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        pass
    answer.send("done")
    signal.pause()


def wait(answer: Connection) -> None:
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize(("act", "comes"), [(compute, True), (wait, False)])
def test_who_computes_is_waited_for_and_who_waits_is_not(
    act: Callable[[Connection], None], comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_IDLE_S", 1.0)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=act, args=(theirs,))
    process.start()
    assert ranks._comes(ours, [process], deadline=math.inf) is comes
