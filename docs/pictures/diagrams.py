"""The pictures of docs/resume.md: `python docs/pictures/diagrams.py` draws them with the framework's own functions."""

import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from framework.cli.run import checked_line  # noqa: E402
from framework.data.order import Order, parts  # noqa: E402
from framework.parallel.invariant import inner_nodes  # noqa: E402

COLORS = ["#4c9be8", "#f0a04b", "#63b97a", "#b58be0"]  # of the processes
GREY, DARK = "#e8ecf0", "#28323c"


def box(
    axes: Axes, x: float, y: float, text: str, *, width: float, color: str = GREY, height: float = 0.7, size: float = 9
) -> None:
    """Draw a box around (x, y) with a text in it."""
    place = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(place, width, height, boxstyle="round,pad=0,rounding_size=0.12", color=color, linewidth=0))
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=DARK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = DARK) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.2})


def canvas(*, width: float, height: float, across: float, down: float) -> Axes:
    """Return axes of this size in inches, from (0, 0) at the top left to (across, down)."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, across), ylim=(down, 0))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return axes


def save(name: str) -> None:
    plt.savefig(HERE / f"{name}.png", dpi=110)
    plt.close()


def order() -> None:
    """Two epochs of 10 samples in batches of 4, on one, two and three processes."""
    axes = canvas(width=8.2, height=3.1, across=30, down=9)
    made = Order(num_samples=10, global_batch_size=4, seed=0, drop_last=False)
    for row, processes in enumerate((1, 2, 3)):
        y, x, seen = 3.0 + 2.2 * row, 5.6, 0
        axes.text(0.3, y, f"{processes} process{'es' * (processes > 1)}", va="center", fontsize=10, color=DARK)
        for step in range(1, 7):
            epoch, numbers = made.batch(seen)
            owner = {place: rank for rank in range(processes) for part in
                     parts(len(numbers), micro_batch_size=1, dp_rank=rank, dp_size=processes) if not part.is_padding
                     for place in range(part.start, part.stop)}  # fmt: skip
            if row == 0:
                axes.text(x + len(numbers) / 2 - 0.5, 1.5, f"step {step}", ha="center", fontsize=9, color=DARK)
                if seen % 10 == 0:
                    axes.text(x - 0.4, 0.5, f"epoch {epoch + 1}", fontsize=10, color=DARK, weight="bold")
            for place, number in enumerate(numbers):
                box(axes, x + place, y, str(number), width=0.9, height=1.1, color=COLORS[owner[place]], size=10)
            x, seen = x + len(numbers) + (0.6 if len(numbers) == 4 else 1.2), seen + len(numbers)
    save("order")


def identity() -> None:
    """Three commands, and the ids that the framework gives them."""
    axes = canvas(width=8.2, height=2.4, across=30, down=8)
    axes.text(0.4, 0.8, "command", fontsize=10, color=DARK, weight="bold")
    axes.text(15.4, 0.8, "decides what is computed", fontsize=10, color=DARK, weight="bold")
    axes.text(24.6, 0.8, "id", fontsize=10, color=DARK, weight="bold")
    commands = [([], "lr 0.003, seed 0, ..."), (["parallel=fsdp", "logger=tensorboard"], "lr 0.003, seed 0, ..."),
                (["optimizer.lr=0.01"], "lr 0.01, seed 0, ...")]  # fmt: skip
    ids = [checked_line(words).config.run.id for words, _ in commands]  # type: ignore[union-attr]
    lr = checked_line([]).config.optimizer["lr"]  # type: ignore[union-attr]
    for row, ((words, what), found) in enumerate(zip(commands, ids)):
        y = 2.6 + 2 * row
        axes.text(
            0.4,
            y,
            "\n".join(["train.py", *words]) if words else "train.py",
            va="center",
            fontsize=9,
            family="monospace",
            color=DARK,
        )
        arrow(axes, (12.2, y), (14.6, y))
        box(axes, 18.6, y, what.replace("0.003", str(lr)), width=7.6, height=1.3)
        arrow(axes, (22.8, y), (24.2, y))
        box(axes, 27.1, y, found, width=5.2, height=1.3, color=COLORS[[*dict.fromkeys(ids)].index(found)])
    save("identity")


def commit() -> None:
    """The steps of a save, and what the next start finds if the save is cut off between two of them."""
    axes = canvas(width=8.2, height=2.5, across=30, down=8)
    steps = ["every process writes\nits part, and flushes", "rank 0 writes the\nmanifest: sizes, sums",
             "flush, rename to\nstep_00000200", "flush the\nfolder", "delete older\ncheckpoints"]  # fmt: skip
    for place, text in enumerate(steps):
        x = 3.1 + 5.9 * place
        box(axes, x, 2, text, width=5.1, height=2.2, color=COLORS[0] if place < 2 else COLORS[2])
        if place:
            arrow(axes, (x - 3.3, 2), (x - 2.6, 2))
    axes.plot([14.9, 14.9], [0.3, 4.4], color="#d9534f", lw=1.6, ls="--", zorder=0)
    axes.text(
        14.6,
        5.3,
        "killed before this line:\nthe next start uses step_00000100",
        ha="right",
        va="center",
        fontsize=9,
        color=DARK,
    )
    axes.text(15.2, 5.3, "killed after it:\nthe next start uses step_00000200", ha="left", va="center", fontsize=9, color=DARK)
    axes.text(15, 7.1, "The rename is the commit: it happens, or it does not. A checkpoint is never half there.",
              ha="center", fontsize=9, color=DARK, style="italic")  # fmt: skip
    save("commit")


def tree() -> None:
    """The sum of seven micro-batches on one, two and three processes: the same additions, by others."""
    axes = canvas(width=8.2, height=3.3, across=30, down=11)
    for column, processes in enumerate((1, 2, 3)):
        left, count = 0.6 + 10 * column, 7
        bounds = [-(-rank * count // processes) for rank in range(processes + 1)]
        owner = {leaf: rank for rank in range(processes) for leaf in range(bounds[rank], bounds[rank + 1])}
        places = {(leaf, leaf + 1): (left + 0.6 + 1.25 * leaf, 8.8) for leaf in range(count)}
        for node, one, two in inner_nodes((0, count)):
            (x_one, y_one), (x_two, y_two) = places[one], places[two]
            places[node] = x, y = (x_one + x_two) / 2, min(y_one, y_two) - 2.1
            for (x_end, y_end), child in (((x_one, y_one), one), ((x_two, y_two), two)):
                is_sent = owner[child[0]] != owner[node[0]]
                axes.plot([x, x_end], [y, y_end], color="#d9534f" if is_sent else "#9aa5b1", lw=2 if is_sent else 1, zorder=0)
        for (start, stop), (x, y) in places.items():
            text = str(start + 1) if stop - start == 1 else "+"
            box(axes, x, y, text, width=1.05, height=1.15, color=COLORS[owner[start]], size=10)
        axes.text(left + 4.3, 10.5, f"{processes} process{'es' * (processes > 1)}", ha="center", fontsize=10, color=DARK)
    axes.text(15, 0.6, "micro-batches 1 to 7, summed; red: sent to another process", ha="center", fontsize=9, color=DARK)
    save("tree")


if __name__ == "__main__":
    matplotlib.use("agg")
    for draw in (order, identity, commit, tree):
        draw()
