"""Which devices a run takes, what it refuses, and what it makes of the words of CUDA's libraries."""

import math
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from framework.cli.run import checked_line
from framework.config.schema import BackendSection
from framework.distributed import world
from framework.distributed.devices import devices_of, record_collectives
from framework.launch.failures import Failure, cause
from framework.main import main
from framework.parallel.sync_batchnorm import synchronise
from framework.preflight import processes
from framework.runtime import numerics
from framework.runtime.environment import Environment
from framework.runtime.exits import Unfit, headline, is_lost_peer, is_timeout, lacks_memory
from framework.runtime.program import keep_cuda_for_children
from framework.runtime.torch_internals import NCCL_LATER, set_group_timeout
from tests.harness import around, checked, command
from tests.test_conformance import SMALL


def test_the_launcher_asks_nvml_whether_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own answer would initialise the driver, and nothing that is forked could use CUDA."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", None, raising=False)
    assert main(["--version"]) == 0  # as every command, it sets the variable
    assert torch.cuda.is_available()
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # the user's own choice stays
    keep_cuda_for_children()
    with pytest.raises(TypeError):
        torch.cuda.is_available()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(processes, "_cuda_devices", lambda: count)

    return pretend


def of(device: str, *, local_rank: int = 0, num_local: int = 1, num_devices: int | None = 1) -> list[str]:
    place = Environment(rank=local_rank, local_rank=local_rank, world_size=num_local, local_world_size=num_local)
    return [str(found) for found in devices_of(place, device=device, num_devices=num_devices)]


# --- what a process takes


def test_a_device_goes_with_its_backend() -> None:
    table = {name: [BackendSection(name=name).device(asked) for asked in ("auto", "cuda", "cpu")]
             for name in ("auto", "gloo", "nccl", "ucc")}  # fmt: skip
    assert table == {
        "auto": ["auto", "cuda", "cpu"],
        "gloo": ["cpu", "cuda", "cpu"],
        "nccl": ["cuda", "cuda", "cpu"],
        "ucc": ["cpu", "cuda", "cpu"],
    }


def test_a_process_takes_its_own_device_among_those_that_it_sees(cuda: Callable[[int], None]) -> None:
    cuda(4)
    assert of("auto") == ["cuda:0"] and of("cpu") == ["cpu"]
    assert of("cuda", local_rank=3, num_local=4) == ["cuda:3"]
    assert of("cuda", local_rank=1, num_local=2, num_devices=2) == ["cuda:2", "cuda:3"]
    assert of("auto", num_devices=None) == [f"cuda:{index}" for index in range(4)]
    cuda(1)  # as a launcher shows each task its own
    assert of("auto", local_rank=3, num_local=4) == ["cuda:0"]
    cuda(3)
    with pytest.raises(Unfit, match="4 processes here need 4 CUDA devices, and there are 3"):
        of("auto", local_rank=3, num_local=4)


def test_nothing_falls_back_to_the_cpu_that_was_to_be_on_a_device(cuda: Callable[[int], None]) -> None:
    cuda(0)
    assert of("auto") == ["cpu"]
    with pytest.raises(Unfit, match="device: cuda, but PyTorch sees no CUDA device on .*built without CUDA"):
        of("cuda")
    with pytest.raises(Unfit, match="device: auto, but PyTorch sees no CUDA device"):  # where its launcher saw one
        devices_of(Environment(launcher_has_cuda=True), device="auto", num_devices=1)
    assert devices_of(Environment(launcher_has_cuda=True), device="cpu", num_devices=1) == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("count", "line", "problem"),
    [
        (0, ["device=cuda"], "device: cuda, but PyTorch sees no CUDA device here"),
        (1, ["device=cuda"], None),
        (1, ["device=cuda", "backend=gloo"], None),
        (
            1,
            ["device=cuda", "backend=other", "backend.name=counting", "backend.module=tests.counting_backend"],
            "device: cuda, but the back end counting is for cpu",
        ),
        (1, ["device=cpu", "backend=nccl"], "device: cpu, but backend=nccl is for CUDA"),
        (0, ["device=cpu"], None),
        (1, ["device=gpu"], "device: 'gpu' is not valid"),
    ],
)
def test_a_device_is_checked_before_the_start(
    count: int, line: list[str], problem: str | None, cuda: Callable[[int], None]
) -> None:
    cuda(count)
    found = [str(problem) for problem in checked_line(line).problems if problem.key == "device"]
    assert [text.startswith(problem or "") for text in found] == [True] * (problem is not None), found


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        (["parallel=ddp"], False),
        (["parallel=ddp", "invariance=bitwise", "micro_batch_size=4"], True),
        (["parallel=fsdp"], True),
        (["parallel=gossip", "trainer.eval_every=8", "checkpoint.every=8"], False),
        (["parallel=fsdp", "launch.nproc_per_node=1"], False),
        (["parallel=fsdp", "backend=auto"], False),
        (["parallel=fsdp", "device=cpu"], False),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_gloo_is_asked_for_no_more_than_it_does_with_cuda_s_memory(
    line: list[str], is_refused: bool, cuda: Callable[[int], None]
) -> None:
    """Gathers, and messages between two processes, end the process by SIGSEGV or SIGABRT: seen with torch 2.11."""
    cuda(2)
    before = ["backend=gloo", "device=cuda", "launch.nproc_per_node=2"]
    given = [word for word in before if word.partition("=")[0] not in {key.partition("=")[0] for key in line}]
    found = [str(problem) for problem in checked_line([*given, *line]).problems if problem.key == "backend"]
    assert [text.startswith("backend: gloo, which can only sum and broadcast CUDA tensors") for text in found] == [
        True
    ] * is_refused, found


def test_on_the_cpu_no_process_is_started_for_each_device(cuda: Callable[[int], None]) -> None:
    cuda(4)
    assert checked("parallel=ddp").launch.num_processes == 4
    assert checked("parallel=ddp", "device=cpu").launch.num_processes == 1
    assert checked("parallel=ddp", "backend=gloo").launch.num_processes == 1
    assert checked("parallel=ddp", "device=cpu", "launch.nproc_per_node=6").launch.num_processes == 6


# --- of all processes


def test_a_run_whose_processes_differ_ends_at_once_on_all_of_them(tmp_path: Path) -> None:
    def differ() -> None:
        def one_kind(plain: Any, kind: str, store: dist.Store, **others: Any) -> None:
            plain("cuda" if Environment.read().rank == 1 else kind, store, **others)

        around(world, "require_one_kind", one_kind)

    ended = command(
        *SMALL, "model=mlp", "parallel=ddp", "launch.nproc_per_node=2", "rehearse=false", root=tmp_path, before=differ
    )
    assert ended.code == 78
    assert "device: auto, but 1 of 2 processes see CUDA devices" in ended.output


# --- how exactly


@pytest.mark.parametrize(("matmul", "allows"), [("highest", False), ("high", True)])
def test_fp32_is_fp32_in_convolutions_too(matmul: str, allows: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        numerics.set_numerics(matmul=matmul, deterministic=False)
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allows, allows)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_deterministic_is_on_where_bits_are_promised() -> None:
    assert not checked().is_deterministic and checked("trainer.deterministic=true").is_deterministic
    bitwise = ["invariance=bitwise", "micro_batch_size=8", "parallel=ddp"]
    assert checked(*bitwise).is_deterministic and not checked(*bitwise, "trainer.deterministic=false").is_deterministic


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_synchronised_statistics_are_counted_in_32_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    layer, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    synchronise(nn.Sequential(layer), group=None, forward=SimpleNamespace(is_padding=False))
    x = (torch.randn(38, 3, 57, 45, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)  # 97,470 numbers a channel
    mine, theirs = layer(x), plain(x.float())
    assert mine.dtype == dtype and mine.isfinite().all()
    torch.testing.assert_close(mine.float(), theirs, atol=0.02, rtol=0.01)
    torch.testing.assert_close(layer.running_mean, plain.running_mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.running_var, plain.running_var, atol=1e-4, rtol=1e-3)


# --- the words of CUDA's libraries


def test_nccl_s_words_are_known() -> None:
    lost = "NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.29"
    aborted = "NCCL communicator was aborted on rank 3. Original reason for failure was: ..."
    late = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 60002 milliseconds before timing out."
    assert is_lost_peer(RuntimeError(lost)) and is_lost_peer(RuntimeError(aborted)) and not is_lost_peer(RuntimeError(late))
    assert is_timeout(RuntimeError(late)) and not is_timeout(RuntimeError(lost))


def test_errors_that_are_each_other_s_context_are_read_once() -> None:
    error, other = RuntimeError("raised again"), ValueError("in between")
    error.__context__, other.__context__ = other, error
    assert not is_timeout(error)
    other.__context__ = RuntimeError("Timed out waiting 10ms for recv operation to complete")
    assert is_timeout(error)


def test_a_device_without_room_says_what_needs_less() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB")
    assert headline(error) == ("CUDA out of memory: less memory is needed with a smaller micro_batch_size (auto finds one), "
                               "trainer.activation_checkpointing=true, or parallel=fsdp")  # fmt: skip


def test_code_that_takes_no_shards_is_told_what_continues_the_run() -> None:
    for text in ("aten.transpose_.default does not have a sharding strategy registered", "got mixed torch.Tensor and DTensor"):
        assert headline(RuntimeError(text)).endswith("parallel=zero or parallel=ddp continues the run)")
    assert headline(RuntimeError("of another kind")) == "RuntimeError: of another kind"


def test_a_lack_of_memory_is_known_by_what_libraries_say() -> None:
    wrapped = ValueError("my layer")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    texts = ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
             "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"]  # fmt: skip
    assert all(map(lacks_memory, [wrapped, MemoryError(), *map(RuntimeError, texts)]))
    assert not lacks_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_nccl_s_recorder_writes_into_the_run_s_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE",
             "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    record_collectives(tmp_path)
    assert not os.environ.keys() & {*names}, "torch warns of some even where there is no device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # a user's own
    record_collectives(tmp_path)
    set_now = {name: os.environ[name] for name in names if name in os.environ}
    assert set_now == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_collectives_rank_",
                       "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, "torch 2.11 warns of the older names"  # fmt: skip


def test_nccl_waits_longer_than_what_finds_who_hangs() -> None:
    before = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
    try:
        set_group_timeout(timedelta(seconds=40))
        assert distributed_c10d.default_pg_nccl_timeout == distributed_c10d.default_pg_timeout + NCCL_LATER
    finally:
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = before


@pytest.mark.parametrize("is_on_cuda", [True, False])
def test_who_was_killed_is_named_and_not_whom_nccl_has_aborted(is_on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_on_cuda)

    def ended(signum: int) -> Any:
        return SimpleNamespace(exitcode=-signum, pid=77, signal_name=lambda: signal.Signals(signum).name)

    found = cause([], {0: ended(signal.SIGABRT), 2: ended(signal.SIGKILL)}, pids={0: 77, 1: 78, 2: 79})
    assert found.rank == (2 if is_on_cuda else 0)
    found = cause(
        [Failure(1, "lost", "x", lost_peer=True)],
        {0: ended(signal.SIGABRT), 2: ended(signal.SIGKILL)},
        pids={0: 77, 1: 78, 2: 79},
    )
    assert (found.rank, found.error) == ((2, "killed by SIGKILL") if is_on_cuda else (0, "killed by SIGABRT"))
    assert ("another size" in found.where) != is_on_cuda
    alone = cause([], {0: ended(signal.SIGABRT)}, pids={0: 1})
    assert ("process 77" in alone.where) == is_on_cuda  # an abort of NCCL's need not come again
    assert "another size" not in alone.where
    assert math.isfinite(found.time)
    unseen = [cause([Failure(0, "lost", "x", lost_peer=True)], {}, pids={0: pid, 1: pid + 1}) for pid in (5, 8)]
    assert [(found.rank, found.where) for found in unseen] == [(1, "process 6"), (1, "process 9")]  # two kills, not one fault
