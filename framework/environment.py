"""What the launcher tells a process through environment variables: this module alone reads `os.environ`."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """The process's place in the run, in torchrun's variables; one process alone has none of them set."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int  # how often the worker group has been restarted
    is_launched: bool  # torchrun (or any launcher that speaks its variables) started this process
    uses_agent_store: bool
    master_addr: str
    master_port: int

    @classmethod
    def read(cls) -> "Environment":
        env = os.environ
        return cls(
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
            is_launched="RANK" in env and "WORLD_SIZE" in env and "MASTER_PORT" in env,
            uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(env.get("MASTER_PORT", "0")),
        )


def set_default(name: str, value: str) -> None:
    """Set an environment variable that a library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def variable(name: str) -> str | None:
    """Return the environment variable, or None."""
    return os.environ.get(name)
