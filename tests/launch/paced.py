"""A node's command whose steps take a while and are written down, for tests that lose nodes in between.

`python tests/launch/paced.py FOLDER OVERRIDE...` is `python train.py OVERRIDE...` so planted, started cold.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def pace(folder: Path) -> Callable[[], None]:
    """Return what makes every rank note its steps in `folder`/steps: the time, the step, its rank and the world size.

    As long as there is a file `folder`/slow, a step takes the seconds that it holds, 0.3 if it is empty.
    """

    def plant() -> None:
        from framework.training.loop import Trainer

        original = Trainer.train_step

        def train_step(trainer: Trainer, *args: object, **kwargs: object) -> object:
            result = original(trainer, *args, **kwargs)
            with open(folder / "steps", "a") as file:
                world = trainer.world
                file.write(f"{time.time()} {trainer.progress.step} {world.rank} {world.world_size}\n")
            with suppress(FileNotFoundError):
                time.sleep(float((folder / "slow").read_text() or 0.3))
            return result

        Trainer.train_step = train_step

    return plant


def pace_jobs(folder: Path) -> Callable[[], None]:
    """Return what paces the nodes of Slurm's jobs so."""

    def plant() -> None:
        from framework.launch import slurm

        planted = f"from pathlib import Path; from tests.launch.paced import pace; pace(Path({str(folder)!r}))(); "
        slurm.NODE = slurm.NODE.replace("from framework", planted + "from framework")

    return plant


def steps_in(folder: Path) -> list[tuple[float, int, int, int]]:
    """Return the steps that were noted: time, step, rank, world size."""
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), int(step), int(rank), int(size)) for at, step, rank, size in map(str.split, lines)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from train import main

    pace(Path(sys.argv[1]))()
    sys.exit(main(sys.argv[2:]))
