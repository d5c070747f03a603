"""Every operation of the process group over mpi4py against plain torch arithmetic. Run by test_mpi.py, under mpirun."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from extras.mpi.group import NAME

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return a rank's tensor, which every rank can compute: small whole numbers, or floats that round when summed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 4, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def everyone(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    return [values(rank, *shape, dtype=dtype, seed=seed) for rank in range(dist.get_world_size())]


def reduced(kind: object, tensors: list[Tensor]) -> Tensor:
    """Return what the reduction is: of 16-bit floats in 64 bits, rounded once."""
    dtype = tensors[0].dtype
    stack = torch.stack(tensors)
    wide = stack.double() if dtype.is_floating_point else stack.long()
    by_kind: dict[object, Callable[[], Tensor]] = {
        dist.ReduceOp.SUM: lambda: wide.sum(0),
        dist.ReduceOp.AVG: lambda: wide.mean(0),
        dist.ReduceOp.PRODUCT: lambda: wide.prod(0),
        dist.ReduceOp.MIN: lambda: wide.amin(0),
        dist.ReduceOp.MAX: lambda: wide.amax(0),
    }
    result = by_kind[kind]()
    return result != 0 if dtype == torch.bool else result.to(dtype)


def same(actual: Tensor, expected: Tensor) -> None:
    """To the rounding of a sum whose order is MPI's; 16-bit floats, which are rounded once, and whole numbers exactly."""
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}
    assert actual.dtype == expected.dtype
    rounding = tolerance.get(actual.dtype, 0.0)
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)


def check_reductions(rank: int, size: int) -> None:
    for dtype in [*FLOATS, *WHOLE, torch.bool]:
        kinds = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
        for kind in kinds + [dist.ReduceOp.AVG] * dtype.is_floating_point:
            tensor = values(rank, 5, 7, dtype=dtype)
            dist.all_reduce(tensor, op=kind)
            same(tensor, reduced(kind, everyone(5, 7, dtype=dtype)))
            assert_same_everywhere(tensor)
            output = torch.empty(4, 3, dtype=dtype)
            dist.reduce_scatter_single(output, values(rank, 4 * size, 3, dtype=dtype), op=kind)
            same(output, reduced(kind, everyone(4 * size, 3, dtype=dtype))[4 * rank : 4 * rank + 4])
            tensor = values(rank, 6, dtype=dtype)
            dist.reduce(tensor, dst=1, op=kind)
            same(tensor, reduced(kind, everyone(6, dtype=dtype)) if rank == 1 else values(rank, 6, dtype=dtype))


def assert_same_everywhere(tensor: Tensor) -> None:
    """The same bits on every rank: replicas must not drift."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    assert all(torch.equal(copy.view(torch.uint8), copies[0].view(torch.uint8)) for copy in copies)


def check_strange_tensors(rank: int, size: int) -> None:
    """Not in one piece, empty, without dims, leaves that require gradients."""
    tensor = values(rank, 4, 6).t()
    dist.all_reduce(tensor)
    same(tensor, reduced(dist.ReduceOp.SUM, everyone(4, 6)).t())
    tensor = values(rank, 4, 6).t()
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor, values(1, 4, 6).t())
    wide = values(rank, 3, 8, dtype=torch.bfloat16)
    dist.all_reduce(wide[:, ::2])
    same(wide[:, ::2], reduced(dist.ReduceOp.SUM, everyone(3, 8, dtype=torch.bfloat16))[:, ::2])
    assert torch.equal(wide[:, 1::2], values(rank, 3, 8, dtype=torch.bfloat16)[:, 1::2])
    dist.all_reduce(torch.empty(0))
    number = torch.tensor(float(rank))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    assert number == size - 1
    leaf = values(rank, 3).requires_grad_()
    dist.broadcast(leaf, src=0)
    assert torch.equal(leaf, values(0, 3))


def check_moves(rank: int, size: int) -> None:
    for dtype in [*FLOATS, *WHOLE, torch.bool, torch.complex128]:
        real = torch.float64 if dtype.is_complex else dtype
        mine, all_of_it = values(rank, 2, 3, dtype=real).to(dtype), [t.to(dtype) for t in everyone(2, 3, dtype=real)]
        tensor = mine.clone()
        dist.broadcast(tensor, src=2)
        assert torch.equal(tensor, all_of_it[2])
        whole = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_single(whole, mine)
        assert torch.equal(whole, torch.cat(all_of_it))
        parts = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.gather(mine, parts if rank == 1 else None, dst=1)
        assert rank != 1 or all(map(torch.equal, parts, all_of_it))
        dist.scatter(tensor, all_of_it if rank == 2 else None, src=2)
        assert torch.equal(tensor, mine)
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in uneven] == [[float(r)] * (r + 1) for r in range(size)]


def check_exchanges(rank: int, size: int) -> None:
    """`to[a][b]` rows go from a to b, none from a rank to the next."""
    to = [[0 if b == (a + 1) % size else a + 2 * b + 1 for b in range(size)] for a in range(size)]
    sent = [[values(100 * a + b, to[a][b], 2) for b in range(size)] for a in range(size)]
    expected = torch.cat([sent[a][rank] for a in range(size)])
    output = torch.empty_like(expected)
    dist.all_to_all_single(output, torch.cat(sent[rank]), [to[a][rank] for a in range(size)], to[rank])
    assert torch.equal(output, expected)
    parts = [torch.empty_like(sent[a][rank]) for a in range(size)]
    dist.all_to_all(parts, sent[rank])
    assert torch.equal(torch.cat(parts), expected)
    even = torch.empty(size, 2)
    dist.all_to_all_single(even, torch.full((size, 2), float(rank)))
    assert even[:, 0].tolist() == list(range(size))


def check_messages(rank: int, size: int) -> None:
    """A ring: everyone first receives, then sends; large enough that a send must meet its receive."""
    before, after = (rank - 1) % size, (rank + 1) % size
    large = 1 << 18
    received = torch.empty(large)
    wanted = dist.irecv(received, src=before)
    sending = dist.isend(torch.full((large,), float(rank)), dst=after)
    assert wanted is not None and sending is not None
    wanted.wait()
    sending.wait()
    assert received.eq(before).all()
    first, second = torch.empty(2), torch.empty(2)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, first, before), dist.P2POp(dist.irecv, second, before),
        dist.P2POp(dist.isend, torch.ones(2), after), dist.P2POp(dist.isend, torch.zeros(2), after),
    ])  # fmt: skip
    for work in works:
        work.wait()
    assert first.eq(1).all() and second.eq(0).all()  # in the order of sending
    if rank == 0:
        dist.send(torch.ones(3), dst=1, tag=7)
    if rank == 1:
        dist.recv(received[:3], src=0, tag=7)
        assert received[:3].eq(1).all()


def check_functional(rank: int, size: int) -> None:
    """What DTensor calls: through C++, and back."""
    mine, whole = values(rank, 2, 3), everyone(2, 3)
    same(functional.wait_tensor(functional.all_reduce(mine, "sum", dist.group.WORLD)), reduced(dist.ReduceOp.SUM, whole))
    assert torch.equal(functional.wait_tensor(functional.all_gather_single(mine, 0, dist.group.WORLD)), torch.cat(whole))
    long = values(rank, 2 * size, 3)
    part = functional.wait_tensor(functional.reduce_scatter_single(long, "avg", 0, dist.group.WORLD))
    same(part, reduced(dist.ReduceOp.AVG, everyone(2 * size, 3))[2 * rank : 2 * rank + 2])
    both = functional.all_reduce_coalesced([mine, mine + 1], "max", dist.group.WORLD)
    for plus, tensor in enumerate(both):
        same(functional.wait_tensor(tensor), reduced(dist.ReduceOp.MAX, whole) + plus)
    swapped = functional.all_to_all_single(long, [2] * size, [2] * size, dist.group.WORLD)
    assert torch.equal(functional.wait_tensor(swapped), torch.cat([t[2 * rank : 2 * rank + 2] for t in everyone(2 * size, 3)]))


def check_groups(rank: int, size: int) -> None:
    """Groups that overlap, in operations that are under way at once and end in another order."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group()]
    members = [[0, 1], [1, 2], [0, 1, 2]]
    tensors = [values(rank, 50_000, seed=i) for i in range(3)]
    works = [dist.all_reduce(t, group=g, async_op=True) if rank in m else None for t, g, m in zip(tensors, pairs, members)]
    for work in reversed(works):
        if work is not None:
            work.wait()
    for i, (tensor, ranks) in enumerate(zip(tensors, members)):
        if rank in ranks:
            same(tensor, torch.stack([values(r, 50_000, seed=i) for r in ranks]).sum(0))
    # two groups of the same ranks, which do not all begin with the same one
    by_group = [(dist.group.WORLD, torch.ones(3)), (pairs[2], torch.full((3,), 10.0))]
    both = [dist.all_reduce(t, group=g, async_op=True) for g, t in (by_group if rank == 0 else by_group[::-1])]
    for work in both:
        work.wait()
    assert [t.tolist() for _, t in by_group] == [[3.0] * 3, [30.0] * 3]
    dist.barrier(group=pairs[2])
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "long": "x" * rank})
    assert objects == [{"rank": r, "long": "x" * r} for r in range(size)]
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    assert future.wait().tolist() == [10.0 * size] * 2
    work = dist.all_reduce(torch.ones(2), async_op=True)
    while not work.is_completed():
        pass


def check_time_out(rank: int, size: int) -> None:
    """Rank 0 comes only when the others have given up waiting."""
    short = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        for other in range(1, size):
            dist.recv(torch.empty(1), src=other)
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, group=short, async_op=True)
    if rank != 0:
        try:
            work.wait()
        except RuntimeError as error:
            assert f"MPI: all-reduce among {size} ranks has not finished in launch.timeout_s=0.3" in str(error)
        else:
            raise AssertionError("no time-out")
        dist.send(torch.ones(1), dst=0)
    work.wait(timedelta(seconds=30))
    assert tensor == size


if __name__ == "__main__":
    torch.set_num_threads(1)
    from extras.mpi import mpi

    world = mpi.library().COMM_WORLD
    dist.init_process_group(NAME, store=dist.HashStore(), rank=world.rank, world_size=world.size)
    for check in (check_reductions, check_strange_tensors, check_moves, check_exchanges, check_messages,
                  check_functional, check_groups, check_time_out):  # fmt: skip
        check(world.rank, world.size)
        if world.rank == 0:
            print(f"{check.__name__} passed", flush=True)
    dist.destroy_process_group()
    mpi.leave()
