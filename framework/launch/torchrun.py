"""Under torchrun (or any launcher that speaks its variables): rank 0 composes, the others take the result."""

import json
from datetime import timedelta
from pathlib import Path

from framework.config import Frozen
from framework.environment import Environment
from framework.launch.parent import die_with_parent
from framework.log import LOGGER
from framework.outcome import Exit


def join(overrides: list[str], *, environment: Environment) -> int:
    """Run this rank's part. Rank 0 alone composes, checks and makes the directory."""
    from framework.launch.start import Begun, begin
    from framework.launch.worker import work

    die_with_parent()
    if environment.rank == 0:
        begun = begin(overrides, world_size=environment.world_size)
        frozen = begun.frozen if isinstance(begun, Begun) else None
        message = {"path": str(frozen.path.absolute()), "digest": frozen.digest} if frozen else {"exit": int(begun)}
    else:
        message = None
    message = _tell_all(message, environment=environment)
    if "exit" in message:
        return message["exit"]
    try:
        return work(Frozen(path=Path(message["path"]), digest=message["digest"]), None)
    except Exception as error:
        LOGGER.error("rank %d failed: %s: %s", environment.rank, type(error).__name__, error)
        return Exit.FAILED


def _tell_all(message: dict | None, *, environment: Environment) -> dict:
    """Hand rank 0's message to every rank through the launcher's store. Collective."""
    import torch.distributed as dist

    from framework.world import launcher_store

    store = dist.PrefixStore(f"start_{environment.attempt}", launcher_store(environment, timeout=timedelta(minutes=10)))
    if message is not None:
        store.set("message", json.dumps(message))
    return json.loads(store.get("message"))
