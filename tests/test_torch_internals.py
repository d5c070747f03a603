"""A canary for each name of torch that is not public: a release that takes one away, or changes it, fails here by its name."""

import ast
import importlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from framework.runtime import torch_compiler
from framework.runtime import torch_internals as ours

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def alone(tmp_path: Path):  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_layers_have_these_bases() -> None:
    assert all(isinstance(layer(0.1), ours.DROPOUTS) for layer in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout))
    assert all(isinstance(layer(3), ours.BATCH_NORMS) for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm))
    assert isinstance(nn.InstanceNorm2d(3), ours.NORMS) and not isinstance(nn.Linear(3, 3), ours.NORMS)


def test_apply_to_own_leaves_the_children_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("own", nn.Parameter(torch.zeros(2)))
    ours.apply_to_own(model, lambda tensor: tensor + 1)
    assert model.own.tolist() == [1.0, 1.0]
    before = model[0].weight.clone()
    ours.apply_to_own(model, lambda tensor: tensor + 1)
    assert torch.equal(model[0].weight, before)


def test_many_tensors_are_changed_in_one_call() -> None:
    one, two = torch.zeros(3), torch.ones(2)
    ours.copy_all([one, two], [torch.full((3,), 4.0), torch.full((2,), 8.0)])
    ours.multiply_all([one, two], 0.5)
    ours.move_all_towards([one], [torch.full((3,), 6.0)], share=0.25)
    assert one.tolist() == [3.0] * 3 and two.tolist() == [4.0] * 2


def test_stand_ins_have_no_storage_and_the_types_of_autocast() -> None:
    with ours.stand_ins(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        layer = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
        assert layer(torch.empty(2, 1 << 20)).dtype == torch.bfloat16


def test_a_change_that_autograd_does_not_see_leaves_the_backward_pass_as_it_was() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    with torch.no_grad(), ours.same_versions([weight]):
        weight.mul_(3).div_(3)
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]


def test_a_mode_does_not_see_what_is_done_without_modes() -> None:
    seen = []

    class Mode(ours.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        with ours.without_modes():
            torch.ones(1).add_(1)
        assert seen == []
        torch.ones(1)
    assert seen


def test_a_view_is_told_from_a_tensor() -> None:
    tensor = torch.zeros(4)
    assert ours.is_view(tensor[:2]) and not ours.is_view(tensor)


def test_the_compiler_is_found_and_its_caches_are_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")  # put back at the end
    torch_compiler.import_dynamo()
    assert isinstance(torch_compiler.has_compiler(), bool)
    torch_compiler.compile_into(tmp_path / "compiled", num_versions=24)
    assert torch._inductor.config.fx_graph_cache and torch._dynamo.config.recompile_limit == 24
    assert cache_dir() == str(tmp_path / "compiled")
    assert not torch._dynamo.config.automatic_dynamic_local_pgo


def test_the_groups_of_a_mesh_take_this_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "default_pg_timeout", distributed_c10d.default_pg_timeout)
    ours.set_group_timeout(timedelta(seconds=7))
    assert distributed_c10d.default_pg_timeout == timedelta(seconds=7)


def test_ddp_leaves_buffers_and_gradients_alone_when_asked(alone: dist.ProcessGroup) -> None:
    wrapper = DistributedDataParallel(nn.BatchNorm1d(2), **ours.without_buffer_sync())
    ours.set_gradient_sync(wrapper, False)
    assert wrapper.require_backward_grad_sync is False
    with wrapper.no_sync():
        assert wrapper.require_backward_grad_sync is False
    assert not wrapper.will_sync_module_buffers()


def test_redistributions_are_logged_by_this_logger() -> None:
    assert importlib.import_module(ours.REDISTRIBUTION_LOG).logger.name == ours.REDISTRIBUTION_LOG


def test_a_loader_ends_its_processes() -> None:
    steps = iter(torch.utils.data.DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="fork"))
    next(steps)
    (process,) = steps._workers  # type: ignore[attr-defined]
    ours.shut_down_loader(steps)
    process.join(10)
    assert process.exitcode is not None


def test_a_loader_kills_its_processes() -> None:
    steps = iter(torch.utils.data.DataLoader([1, 2, 3], num_workers=2, multiprocessing_context="fork"))
    processes = list(steps._workers)  # type: ignore[attr-defined]
    os.kill(processes[0].pid, signal.SIGSTOP)
    ours.kill_loader(steps)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("name", ["_monitor_workers", "_initialize_workers", "_shutdown"])
def test_elastics_agent_has_this_method(name: str) -> None:
    assert callable(getattr(LocalElasticAgent, name))


def test_elastics_agent_has_these_attributes() -> None:
    source = ast.parse(Path(str(LocalElasticAgent.__init__.__code__.co_filename)).read_text())
    base = ast.parse(Path(str(LocalElasticAgent.__mro__[1].__init__.__code__.co_filename)).read_text())  # type: ignore[misc]
    names = {node.attr for tree in (source, base) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {"_worker_group", "_remaining_restarts", "_pcontext"} <= names


def test_a_rendezvous_shows_its_nodes_and_gives_workers_a_store_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    store = dist.HashStore()
    one = ours.DynamicRendezvous.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 1, "a node")
    one.use_store(store, "somewhere", 1234)
    found = one.next_rendezvous()
    place = found.bootstrap_store_info
    assert (found.rank, found.world_size, place.master_addr, place.master_port) == (0, 1, "somewhere", 1234)
    assert one.look() == one.look(is_new=False) == ours.RoundView(0, True, ["a node"], 0, ["a node"])
    one.shutdown()


def test_a_stack_in_the_backward_pass_has_this_function() -> None:
    seen: list[str] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            import traceback

            seen.extend(frame.name for frame in traceback.extract_stack())
            return gradient

    Look.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert ours.BACKWARD_FUNCTION in seen


def test_a_pipeline_takes_fewer_micro_batches_than_stages(alone: dist.ProcessGroup) -> None:
    stage = PipelineStage(torch.nn.Linear(2, 2), 0, 2, torch.device("cpu"), group=alone)
    assert ScheduleGPipe(stage, 1)._n_microbatches == 1


def test_schedules_are_told_apart_and_list_their_actions() -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    assert ours.is_single_stage(object.__new__(Schedule1F1B))
    assert issubclass(ScheduleInterleaved1F1B, PipelineScheduleMulti)


def test_actions_that_may_run_at_once_are_listed_one_by_one(alone: dist.ProcessGroup) -> None:
    stages = [PipelineStage(torch.nn.Linear(2, 2), number, 2, torch.device("cpu"), group=alone) for number in range(2)]
    actions = ours.actions_of(ScheduleDualPipeV(stages, 4, loss_fn=lambda *_: torch.zeros(())))[0]
    assert sorted(a for a in actions if a[0] == "FORWARD") == [("FORWARD", stage, n) for stage in range(2) for n in range(4)]
    assert len([a for a in actions if a[0] in ("FULL_BACKWARD", "BACKWARD_INPUT")]) == 8


# --- and nowhere else

OURS = ("torch_internals.py", "torch_compiler.py")


def uses_of_privates(path: Path) -> list[str]:
    """Return what a file takes of torch that begins with an underscore: modules, names, attributes of what it imports."""
    tree, found = ast.parse(path.read_text()), []
    roots = {"torch", "dist", "nn", "rpc"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_")]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("torch.") and "._" in a.name]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            found += [text] if text.split(".")[0] in roots else []
    return found


def test_private_names_are_in_few_files() -> None:
    found = {path.name: uses_of_privates(path) for path in (ROOT / "framework").rglob("*.py")}
    assert {name: uses for name, uses in found.items() if uses and name not in OURS} == {}


def test_a_rank_of_the_fake_backend_is_alone() -> None:
    ours.register_fake_backend()
    assert "fake" in dist.Backend.backend_list
