"""The start of each worker in a round of an elastic run. All use rank 0's configuration; only rank 0 claims the directory."""

from dataclasses import dataclass
from pathlib import Path

from framework.config.frozen_file import FrozenConfig
from framework.config.modes import MODES
from framework.config.schema import RunConfig
from framework.launch.claim import ClaimedRun, claim, is_finished
from framework.launch.failures import record_failure
from framework.launch.torchrun import agree, carry_out
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit


@dataclass(frozen=True)
class RoundEntry:
    """The start of each worker of a node in a round. All nodes share `folder`."""

    config: RunConfig
    folder: Path

    def join(self, node_folder: Path) -> int:
        """Do one worker's part of a round. All ranks use the configuration of rank 0, which alone claims the directory."""
        environment = Environment.read()
        log.start_console(rank=environment.rank)
        try:
            begun, taken = agree(self._decide, environment=environment)
        except Exception as error:
            record_failure(error, environment=environment, scratch=node_folder)
            raise
        return carry_out(taken, begun=begun, scratch=node_folder) if isinstance(taken, FrozenConfig) else taken

    def _decide(self) -> ClaimedRun | int:
        """Claim the directory. This process keeps the lock until it ends. Return an exit code if nothing is left to do."""
        began = self.folder / "began"
        config = self.config.begun() if began.exists() else self.config
        if MODES[config.mode].about == "run" and is_finished(config.run, targets=config.targets()):
            return Exit.FINISHED
        run = claim(config, party="elastic")
        if isinstance(run, ClaimedRun):
            began.touch()
        return run
