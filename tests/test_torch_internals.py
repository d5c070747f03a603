"""Names of torch that are not public: what they do, where a release that changes it would fail in silence; and that few files use them."""

import ast
import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from framework.runtime import torch_compiler
from framework.runtime import torch_internals as ours

ROOT = Path(__file__).resolve().parent.parent


def test_apply_to_own_leaves_the_children_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("own", nn.Parameter(torch.zeros(2)))
    ours.apply_to_own(model, lambda tensor: tensor + 1)
    assert model.own.tolist() == [1.0, 1.0]
    before = model[0].weight.clone()
    ours.apply_to_own(model, lambda tensor: tensor + 1)
    assert torch.equal(model[0].weight, before)


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


def test_the_compiler_is_found_and_its_caches_are_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")  # put back at the end
    frozen = gc.get_freeze_count()
    torch_compiler.import_dynamo()
    # a few of the frozen objects may have died since; gc.unfreeze() would leave none
    assert gc.get_freeze_count() > frozen / 2 > 0, "it was imported: what is frozen stays so"
    assert isinstance(torch_compiler.has_compiler(), bool)
    torch_compiler.compile_into(tmp_path / "compiled", num_versions=24)
    assert torch._inductor.config.fx_graph_cache and torch._dynamo.config.recompile_limit == 24
    assert Path(cache_dir()).parent == tmp_path / "compiled"
    assert not torch._dynamo.config.automatic_dynamic_local_pgo


def test_redistributions_are_logged_by_this_logger() -> None:
    assert importlib.import_module(ours.REDISTRIBUTION_LOG).logger.name == ours.REDISTRIBUTION_LOG


def test_a_rendezvous_shows_its_nodes_and_gives_workers_a_store_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    store = dist.HashStore()
    one = ours.DynamicRendezvous.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 1, "a node")
    one.use_store(store, "somewhere", 1234)
    monkeypatch.setattr("inspect.stack", lambda: pytest.fail("a node that inspects all modules joins too late"))
    found = one.next_rendezvous()
    place = found.bootstrap_store_info
    assert (found.rank, found.world_size, place.master_addr, place.master_port) == (0, 1, "somewhere", 1234)
    assert one.look() == one.look(is_new=False) == ours.RoundView(0, True, ["a node"], 0, ["a node"])
    one.shutdown()


def test_a_stack_in_the_backward_pass_has_this_function() -> None:
    seen: list[str] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            import traceback

            seen.extend(frame.name for frame in traceback.extract_stack())
            return gradient

    Look.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert ours.BACKWARD_FUNCTION in seen


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
