"""Only the largest gradients are sent, with error feedback (Aji & Heafield 2017; Lin et al. 2018)."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

SHARE = 0.05  # of a bucket's gradients


class State:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.errors: dict[tuple[int, int], Tensor] = {}  # by bucket and size: DDP lays buckets out anew after a step


def hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean of the ranks' largest gradients; the others are added to the next gradient."""
    gradient, num_ranks = bucket.buffer(), state.group.size()
    where = (bucket.index(), gradient.numel())
    wanted = gradient + state.errors[where] if where in state.errors else gradient.clone()
    places = wanted.abs().topk(max(1, int(SHARE * wanted.numel())), sorted=False).indices
    values = wanted[places]
    wanted[places] = 0.0
    state.errors[where] = wanted

    all_values, all_places = values.new_empty(num_ranks, len(values)), places.new_empty(num_ranks, len(places))
    dist.all_gather_single(all_values.flatten(), values, group=state.group)
    work = dist.all_gather_single(all_places.flatten(), places, group=state.group, async_op=True)

    def mean(_: object) -> Tensor:
        gradient.zero_()
        for theirs, at in zip(all_values, all_places):  # in rank order, so that every rank sums the same way
            gradient.index_add_(0, at, theirs)
        return gradient.div_(num_ranks)

    return work.get_future().then(mean)
