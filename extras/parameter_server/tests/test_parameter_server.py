"""The parameter server: synchronous it is one process (and in tests/test_conformance.py); asynchronous it is what it says."""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.nn.functional import cross_entropy

from extras.parameter_server.asynchronous import Hogwild
from extras.parameter_server.synchronous import Notices, Server
from framework.build import components
from framework.checkpoint.canonical import TrainingState, state_tensors
from framework.checkpoint.manifest import read_state
from framework.data.loader import Loader
from framework.data.order import Order
from framework.engine.engine import Engine
from framework.engine.forward import WholeModel
from framework.optim.optimizers import hidden_matrices, trainable
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests.harness import Ended, Says, assert_close, assert_same_bits, checked, command, finished, once, refused, together
from tests.test_any_to_any import note_state
from tests.test_optim import scale_from
from tests.test_resume import RUN, after_step, preempt

FORK = multiprocessing.get_context("fork")
SYNC = ["parallel=parameter-server", "launch.nproc_per_node=3"]
# without the average of the weights, which asynchronous processes cannot have
ASYNC = [*SYNC, "parallel.mode=async", "trainer.ema_decay=null"]
MODES = {"sync": SYNC, "async": ASYNC}


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


# --- both modes


@pytest.mark.slow
def test_a_rehearsal_which_builds_the_strategy_twice_in_a_process_finds_nothing(tmp_path: Path) -> None:
    finished(
        "parallel=parameter-server", "launch.nproc_per_node=2", "trainer.max_steps=2", "rehearse=true", root=tmp_path / "runs"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", sorted(MODES))
def test_one_process_is_its_own_server(mode: str, tmp_path: Path) -> None:
    alone = finished(*RUN, *MODES[mode], "launch.nproc_per_node=1", "trainer.ema_decay=0.9", root=tmp_path / "runs")
    assert_same_bits(alone, finished(*RUN, root=tmp_path / "single"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", sorted(MODES))
def test_on_one_machine_only_that_machine_is_listened_to(mode: str, tmp_path: Path) -> None:
    def held() -> set[str]:
        return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}

    inherited = held()  # MPI of an earlier test in this process listens everywhere

    def note_sockets() -> None:
        mine = held() - inherited
        found = []
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = row.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in mine:
                    found.append(local.partition(":")[0])
        assert os.environ["TP_SOCKET_IFNAME"] == "lo"  # without, it depends on what the host's name stands for
        (tmp_path / f"sockets_{Environment.read().rank}").write_text(json.dumps(found))

    finished(*RUN, *MODES[mode], root=tmp_path / "runs", before=after_step(2, note_sockets))
    for rank in range(3):
        listening = json.loads((tmp_path / f"sockets_{rank}").read_text())
        assert len(listening) >= 1  # gloo's and rpc's
        loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
        assert set(listening) <= set(loopback)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_being_well_the_ranks_part_in_silence(mode: str, tmp_path: Path) -> None:
    for preempted in (False, True):
        before = after_step(3, preempt) if preempted else None
        ended = command(*RUN, *MODES[mode], root=tmp_path / str(preempted), before=before)
        assert ended.code == (75 if preempted else 0)
        assert "RPC" not in ended.output and "tensorpipe" not in ended.output, ended.output


def strike(rank: int, act: Callable[[], None]) -> Callable[[], None]:
    def struck() -> None:
        if (Environment.read().rank, Environment.read().attempt) == (rank, 0):
            act()

    return struck


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_dies_is_noticed_at_once(mode: str, rank: int, tmp_path: Path) -> None:
    """At once: long before launch.timeout_s, after which anyone would; and by rpc, since no row makes the ranks meet."""
    line = [*RUN, *MODES[mode], "launch.max_restarts=0", "trainer.log_every=100", "trainer.eval_every=null"]
    failed = command(*line, root=tmp_path / "runs", before=after_step(6, strike(rank, die)), timeout_s=20)
    assert failed.code == 1
    assert re.search(rf"ERROR: rank {rank} failed: killed(,| by SIGKILL)", failed.output), failed.output


def fail() -> None:
    raise LookupError("the planted fault")


@pytest.mark.quick(1)
@pytest.mark.parametrize("rank", [2, 0])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_is_told_and_not_that_it_was_missed(mode: str, rank: int, tmp_path: Path) -> None:
    line = [*RUN, *MODES[mode], "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=after_step(6, strike(rank, fail)), timeout_s=30)
    assert failed.code == 1
    assert f"ERROR: rank {rank} failed: LookupError: the planted fault" in failed.output, failed.output


# --- synchronous


def whole() -> Ended:
    return once(*RUN, *SYNC)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_killed_and_started_again_it_ends_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    ended = finished(*RUN, *SYNC, root=tmp_path / "runs", before=after_step(6, strike(rank, die)))
    assert ended.summary["restarts"] == 1
    assert_same_bits(ended, whole())


@pytest.mark.slow
@pytest.mark.parametrize("cut", [3, 7])
def test_preempted_it_ends_with_the_same_bits(cut: int, tmp_path: Path) -> None:
    stopped = command(*RUN, *SYNC, root=tmp_path / "runs", before=after_step(cut, preempt))
    assert stopped.code == 75, stopped.output
    assert_same_bits(finished(*RUN, *SYNC, root=tmp_path / "runs"), whole())


@pytest.mark.slow
def test_who_comes_first_changes_no_bit(tmp_path: Path) -> None:
    has_come = FORK.Semaphore(0)

    def plant() -> None:
        compute, hand_in = WholeModel.train, Server.hand_in

        def last(passes: Any, *args: Any, **options: Any) -> Any:
            if dist.get_rank() == 1:  # ranks 0 and 2 have computed by then
                assert has_come.acquire(timeout=30)
            return compute(passes, *args, **options)

        def tell(serving: Any, gradients: Any, rank: int) -> None:
            hand_in(serving, gradients, rank)
            if rank == 2:
                has_come.release()

        WholeModel.train = last  # type: ignore[method-assign,assignment]
        Server.hand_in = tell  # type: ignore[method-assign]

    assert_same_bits(finished(*RUN, *SYNC, root=tmp_path / "runs", before=plant), whole())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_ranks_are_ddp_to_the_last_bit(precision: str, tmp_path: Path) -> None:
    """A sum of two does not depend on its order. In fp16 the first steps overflow, and are skipped."""
    line = [*RUN, f"precision={precision}", "launch.nproc_per_node=2", "trainer.clip_grad_norm=0.5", "trainer.max_epochs=1"]
    scales = []
    runs = []
    for strategy in ("parameter-server", "ddp"):
        before = scale_from(2.0**24, growth_interval=2000) if precision == "fp16" else None
        runs.append(finished(*line, f"parallel={strategy}", root=tmp_path / strategy, before=before))
        newest = max((runs[-1].directory / "checkpoints").iterdir())
        scales.append(read_state(newest)["loss_scale"])
    assert_same_bits(*runs)
    assert scales[0]["num_skipped"] == scales[1]["num_skipped"]
    assert (scales[0]["num_skipped"] > 0) == (precision == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("options", [["trainer.sync_batchnorm=true"], ["trainer.activation_checkpointing=true"]])
def test_it_goes_with(options: list[str], tmp_path: Path) -> None:
    line = [*RUN, "precision=fp64", "model.dropout=0", *options]
    assert_close(finished(*line, *SYNC, root=tmp_path / "runs"),
                 finished(*line, "parallel=ddp", "launch.nproc_per_node=3", root=tmp_path / "ddp"))  # fmt: skip


def test_a_notice_is_kept_until_all_have_read_it_and_no_longer() -> None:
    notices = Notices(num_readers=2)
    early = notices.read(0)
    assert not early.done()
    notices.post(0, [torch.ones(1)])
    assert early.done() and notices.read(0) is early and not notices._open
    first, second = notices.read(1), notices.read(1)
    notices.post(1, [torch.ones(1)])
    assert first.done() and first is second and not notices._open


# --- asynchronous

RANKS, STEPS = 3, 9  # two epochs: batches of 14, 14, 14 and 7; the last step is not compared
SGD = ["dataset=synthetic", "dataset.num_train=49", "dataset.num_val=8", "dataset.num_test=8", "dataset.image_size=8",
       "model=mlp", "model.dim=8", "precision=fp64", "global_batch_size=14", "trainer.max_epochs=null",
       f"trainer.max_steps={STEPS}", "trainer.log_every=100", "trainer.eval_every=null", f"checkpoint.every={STEPS - 1}",
       "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01", "scheduler.warmup_steps=3",
       "trainer.clip_grad_norm=1.0"]  # fmt: skip
MUON = [*(item for item in SGD if not item.startswith("optimizer")), "optimizer=muon", "optimizer.adamw_lr=0.02"]


def in_turns() -> Callable[[], None]:
    """Return what makes the ranks of a command take their steps, but for the last, one after the other."""
    turns = [FORK.Semaphore(int(rank == 0)) for rank in range(RANKS)]

    def plant() -> None:
        original = Trainer.train_step

        def train_step(trainer: Trainer, *args: Any, **options: Any) -> Any:
            if trainer.progress.step >= STEPS - 1:  # a measured step, in which the ranks meet
                return original(trainer, *args, **options)
            assert turns[trainer.world.rank].acquire(timeout=30)
            result = original(trainer, *args, **options)
            turns[(trainer.world.rank + 1) % RANKS].release()
            return result

        Trainer.train_step = train_step  # type: ignore[method-assign]

    return plant


def by_hand(line: list[str]) -> dict[str, torch.Tensor]:
    """Train one model on the ranks' samples in turn, in one process and without the framework's loop."""
    config = checked(*line)
    model = components.model(config.model, seed=config.seed).double()
    optimizer = components.component(config.optimizer)(trainable(model, hidden=hidden_matrices(model)))
    schedule = components.component(config.scheduler)
    peaks = [group["lr"] for group in optimizer.param_groups]
    dataset = components.dataset(config.dataset)
    source = dataset.load("train")
    order = Order(num_samples=len(source), global_batch_size=14, seed=0, drop_last=False)
    loaders = [Loader(dataset, source, order=order, micro_batch_size=None, dp_rank=rank, dp_size=RANKS,
                      device=torch.device("cpu"), dtype=torch.float64).train(0) for rank in range(RANKS)]  # fmt: skip
    for step in range(STEPS - 1):
        for loader in loaders:
            (micro_batch,) = next(loader).micro_batches
            optimizer.zero_grad()
            cross_entropy(model(micro_batch.inputs), micro_batch.targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * schedule(step, STEPS)
            optimizer.step()
    return state_tensors(TrainingState(model, optimizer, None))


@pytest.mark.slow
@pytest.mark.parametrize("line", [SGD, MUON], ids=["sgd", "muon"])
def test_ranks_in_turn_are_one_model_stepped_by_hand(line: list[str], tmp_path: Path) -> None:
    """Each gradient is a mean over its rank's samples, clipped by itself, at this moment's parameters; and is one step."""
    run = finished(*line, *ASYNC, root=tmp_path / "runs", before=in_turns())
    served, expected = tensors_of(run.directory / "checkpoints" / f"step_{STEPS - 1:08d}"), by_hand(line)
    assert served.keys() == expected.keys() and any(name.startswith("optimizer/") for name in served)
    for name, tensor in expected.items():
        assert torch.allclose(served[name].double(), tensor.double(), rtol=0, atol=1e-10), name


@pytest.mark.slow
def test_a_rank_does_not_wait_for_another(tmp_path: Path) -> None:
    """Rank 1 computes a gradient only when rank 0 has finished the same step, and rank 2 only after that."""
    done = [FORK.Semaphore(0) for _ in range(RANKS)]

    def plant() -> None:
        compute, take = Engine.train, Trainer.train_step

        def late(engine: Any, *args: Any, index: int, **options: Any) -> Any:
            if index == 4 and engine.dp_rank > 0:
                assert done[engine.dp_rank - 1].acquire(timeout=30)
            return compute(engine, *args, index=index, **options)

        def tell(trainer: Trainer, *args: Any, **options: Any) -> Any:
            result = take(trainer, *args, **options)
            if trainer.progress.step == 5:
                done[trainer.world.rank].release()
            return result

        Engine.train = late  # type: ignore[method-assign,assignment]
        Trainer.train_step = tell  # type: ignore[method-assign]

    finished(*SGD, *ASYNC, root=tmp_path / "runs", before=plant)


ADAMW = [*(item for item in SGD if not item.startswith("optimizer")), "optimizer=adamw"]


@pytest.mark.slow
def test_each_push_is_one_step_and_a_rank_without_samples_pushes_nothing(tmp_path: Path) -> None:
    """Batches of 2, 2, 2 and 1 on three ranks: 7 pushes an epoch."""
    line = [*ADAMW, "dataset.num_train=7", "dataset.num_classes=3", "global_batch_size=2", "trainer.max_steps=8"]
    run = finished(*line, "checkpoint.every=4", *ASYNC, root=tmp_path / "runs")
    for step, pushes in ((4, 7), (8, 14)):
        tensors = tensors_of(run.directory / "checkpoints" / f"step_{step:08d}")
        counts = {name: value.item() for name, value in tensors.items() if name.endswith("/step")}
        assert len(counts) > 1 and set(counts.values()) == {pushes}
    assert run.summary["samples_seen"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("onward", [ASYNC, ["parallel=ddp", "launch.nproc_per_node=2"]], ids=["async", "ddp"])
def test_a_checkpoint_is_one_state_of_all_ranks_and_is_what_goes_on(onward: list[str], tmp_path: Path) -> None:
    """`note_state` fails a command whose ranks hold different tensors."""
    before = together(note_state(tmp_path / "saved"), after_step(4, preempt))
    stopped = command(*ADAMW, *ASYNC, root=tmp_path / "first", before=before)
    assert stopped.code == 75, stopped.output
    taken = stopped.summary["step"], stopped.summary["samples_seen"]
    assert taken == (5, 49 + 14)
    resume = [*ADAMW, *onward, f"run.resume={stopped.directory}"]
    ended = finished(*resume, root=tmp_path / "second", before=note_state(tmp_path / "restored"))
    saved = json.loads((tmp_path / "saved").read_text())
    assert json.loads((tmp_path / "restored").read_text()) == saved
    assert any(name.startswith("optimizer/") for name in saved)
    assert (ended.summary["step"], ended.summary["samples_seen"]) == (STEPS, 2 * 49 + 14)


@pytest.mark.slow
def test_a_resumed_run_in_turns_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """What the server starts from is all that it had: momentum too."""
    last = f"step_{STEPS - 1:08d}"
    whole = finished(*SGD, *ASYNC, root=tmp_path / "whole", before=in_turns())
    stopped = command(*SGD, *ASYNC, root=tmp_path / "runs", before=together(in_turns(), after_step(3, preempt)))
    assert stopped.code == 75, stopped.output
    ended = finished(*SGD, *ASYNC, root=tmp_path / "runs", before=in_turns())
    expected, found = (tensors_of(run.directory / "checkpoints" / last) for run in (whole, ended))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_learns_the_digits(ranks: int, tmp_path: Path) -> None:
    line = ["trainer.max_epochs=15", "trainer.log_every=20", *ASYNC, f"launch.nproc_per_node={ranks}"]
    run = finished(*line, root=tmp_path / "runs")
    losses = [row["loss"] for row in run.rows if row["split"] == "train"]
    assert losses[-1] < 0.3 * losses[0]
    (test,) = (row for row in run.rows if row["split"] == "test")
    assert test["accuracy"] > 0.95  # chance is 0.1; seen were 0.983 and more


def test_what_asynchronous_processes_cannot_do_is_refused() -> None:
    line = [*RUN, *SYNC, "parallel.mode=async", "trainer.sync_batchnorm=true", "precision=fp16"]
    assert refused(*line).splitlines() == [
        Says("trainer.ema_decay: 0.9 ... parallel.mode=async ... parallel.mode=sync"),
        Says("trainer.sync_batchnorm: true ... parallel.mode=async ... parallel.mode=sync"),
        Says("precision: fp16 ... loss scale ... parallel.mode=async ... parallel.mode=sync"),
    ]


@pytest.mark.slow
def test_an_evaluation_waits_for_the_pushes_of_all(tmp_path: Path) -> None:
    """The eighth push of rank 2 comes when rank 0 asks already for what is to be evaluated, and saved, after step 8."""
    is_asked = FORK.Semaphore(0)

    def plant() -> None:
        push, sync = Hogwild._push, Hogwild.sync_buffers
        count = [0]

        def late(engine: Any, *args: Any) -> None:
            count[0] += 1
            if engine.dp_rank == 2 and count[0] == 8:
                assert is_asked.acquire(timeout=30)
            push(engine, *args)

        def ask(engine: Any) -> None:
            if engine.dp_rank == 0 and count[0] == 8:
                is_asked.release()
            sync(engine)

        Hogwild._push, Hogwild.sync_buffers = late, ask  # type: ignore[method-assign]

    line = [*ADAMW, "trainer.eval_every=4", "checkpoint.every=4"]
    run = finished(*line, *ASYNC, root=tmp_path / "runs", before=plant)
    saved = tensors_of(run.directory / "checkpoints" / "step_00000008")
    assert {value.item() for name, value in saved.items() if name.endswith("/step")} == {8 * RANKS}
    config = checked(*line)
    model, dataset = components.model(config.model, seed=config.seed).double(), components.dataset(config.dataset)
    model.load_state_dict({name.removeprefix("model/"): value for name, value in saved.items() if name.startswith("model/")})
    stored = [torch.from_numpy(array) for array in dataset.load("val").gather(np.arange(8))]
    inputs, targets = dataset.transform(*stored, keys=None)
    (row,) = (row for row in run.rows if (row["split"], row["step"]) == ("val", 8))
    assert abs(cross_entropy(model(inputs.double()), targets).item() - row["loss"]) < 1e-10
