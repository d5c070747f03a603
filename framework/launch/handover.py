"""Rank 0's decision, handed over to the other ranks as text."""

import json
from pathlib import Path

from framework.config.frozen_file import Frozen


def as_text(decision: Frozen | int) -> str:
    """Return rank 0's decision as it is handed over."""
    if isinstance(decision, Frozen):
        return json.dumps({"path": str(decision.path.absolute()), "digest": decision.digest})
    return json.dumps({"code": int(decision)})


def from_text(text: str) -> Frozen | int:
    taken = json.loads(text)
    return taken["code"] if "code" in taken else Frozen(path=Path(taken["path"]), digest=taken["digest"])
