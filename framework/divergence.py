"""What follows from a loss or gradient that is not finite: the end, a step left out, or an earlier checkpoint."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Divergence:
    """`raise` ends the run. `skip` leaves the step out; `rollback` goes on from the `back`-th newest checkpoint, with the
    batches after the one that was not finite: both at most `limit` times in a run.

    Source of the rollback: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", section 5.1.
    """

    action: Literal["raise", "skip", "rollback"]
    limit: int
    back: int

    @property
    def is_watched(self) -> bool:
        """Return whether every step has to be known as finite before it is taken."""
        return self.action != "raise"

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"
