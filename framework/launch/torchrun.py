"""Under torchrun (or any launcher that speaks its variables): rank 0 composes, the others take the result."""

import json
from datetime import timedelta
from pathlib import Path

from framework.environment import Environment
from framework.frozen import Frozen
from framework.log import LOGGER
from framework.outcome import Exit, headline
from framework.parent import die_with_parent


def join(overrides: list[str], *, environment: Environment) -> int:
    """Run this rank's part. Rank 0 alone composes, checks and makes the directory."""
    die_with_parent()
    decision = _decide(overrides, environment=environment) if environment.rank == 0 else None
    decision = _from_rank_0(decision, environment=environment)
    if not isinstance(decision, Frozen):
        return decision
    from framework.launch.worker import work

    try:
        return work(decision, None)
    except Exception as error:
        LOGGER.error("rank %d failed: %s", environment.rank, headline(error))
        return Exit.FAILED


def _decide(overrides: list[str], *, environment: Environment) -> Frozen | int:
    """Return the frozen configuration of a run that may go, or the exit code of one that may not."""
    from framework.launch.start import Begun, begin

    begun = begin(overrides, world_size=environment.world_size)
    return begun.frozen if isinstance(begun, Begun) else begun  # its lock stays with this process until it ends


def _from_rank_0(decision: Frozen | int | None, *, environment: Environment) -> Frozen | int:
    """Hand rank 0's decision to every rank through the launcher's store. Collective."""
    import torch.distributed as dist

    from framework.world import launcher_store

    store = dist.PrefixStore(f"start_{environment.attempt}", launcher_store(environment, timeout=timedelta(minutes=10)))
    if isinstance(decision, Frozen):
        store.set("decision", json.dumps({"path": str(decision.path.absolute()), "digest": decision.digest}))
    elif decision is not None:
        store.set("decision", json.dumps({"code": int(decision)}))
    taken = json.loads(store.get("decision"))
    return taken["code"] if "code" in taken else Frozen(path=Path(taken["path"]), digest=taken["digest"])
