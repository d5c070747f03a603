"""The plain part of a checkpoint: everything except tensors. It is validated before it is used."""

import re
import time
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from framework.runtime.plain import Invalid, Plain, first_fault

RECORD_ID = re.compile(r"[0-9a-z]{1,40}-[0-9a-f]{8}")  # it becomes part of file names


def _printable(text: str) -> str:
    if not text.isprintable():  # the text is printed to logs and terminals
        raise ValueError("holds characters that cannot be printed")
    return text


Word = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
SplitName = Annotated[str, Field(pattern=r"^(train|val(\.\w+)?|test)$")]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Measured = Annotated[float, Field(allow_inf_nan=True)]  # infinity is allowed: a perplexity can overflow, and the run continues


class Progress(Plain):
    """The progress of a run. All counters are global; no counter belongs to a single rank."""

    step: Natural
    samples_seen: Natural
    wall_s: float = Field(ge=0)
    train_s: float = Field(ge=0, default=0.0)  # in steps: without starts, evaluations and checkpoints
    began: float = Field(ge=0, default_factory=time.time)  # time of the first start, in seconds since the epoch
    num_divergences: Natural = 0  # divergences from which the run has recovered

    @property
    def goodput(self) -> float:
        """The share of the time since the first start that was spent in steps that count."""
        return self.train_s / max(time.time() - self.began, 1e-9)


class SavedRow(Plain):
    """A row of metrics.jsonl, with the task's own metrics."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Measured | None]

    step: Natural
    split: Word
    loss: Measured | None  # None if no target of the step counts

    @model_validator(mode="after")
    def _metrics_have_names(self) -> "SavedRow":
        for name in self.model_extra or {}:
            _printable(name)
        return self


class SavedSplit(Plain):
    last: SavedRow
    best: SavedRow


class SavedPatience(Plain):
    best: Measured | None
    num_bad: Natural


class SavedLossScale(Plain):
    value: float = Field(gt=0)
    num_quiet_steps: Natural
    num_skipped: Natural


class SavedGroup(Plain):
    names: list[str]  # names of the parameters
    values: dict[str, Any]  # values that the optimizer has changed


class PlainState(Plain):
    """A run's state besides tensors, by the names of parameters and modules: so it fits any strategy."""

    numbers: dict[str, dict[str, Any]] = {}  # from the optimizer's state, by parameter
    groups: list[SavedGroup] = []
    extra: dict[str, Any] = {}  # extra state of modules
    parts: dict[str, Any] = {}  # state of the run's parts, by NAME/PATH
    orders: dict[str, list[Natural]] = {}  # of the dims in memory, of tensors with another order than new ones


class SavedRows(Plain):
    """The content of metrics.jsonl."""

    num_rows: Natural
    num_bytes: Natural
    crc32: Natural


class SavedState(Plain):
    """The result of `Trainer.state_dict`."""

    progress: Progress
    metrics: dict[SplitName, SavedSplit]
    monitor: Measured | None
    patience: SavedPatience
    loss_scale: SavedLossScale
    facts: dict[Word, Word | int | float | bool | None]
    data: dict[SplitName, dict[Word, Word]]  # fingerprints
    stream: dict[str, Any] = {}  # the place in a stream of training samples, before the last step
    kept: PlainState
    is_scheduled: bool = True  # by checkpoint.every, and not because of a stop or a best value
    record_id: Annotated[str, Field(pattern=f"^{RECORD_ID.pattern}$")] | None = None  # the run's name in loggers
    rows: SavedRows | None = None
    stopped: Word = ""  # the reason why a part has ended the run
    evaluations_left: list[SplitName] = []  # of this step: a stop has broken them off


def stored_plain_state(state: dict[str, Any]) -> PlainState:
    """Return the plain values in a checkpoint's state."""
    return PlainState.model_validate(state["kept"])


def checked_state(state: Any) -> dict[str, Any]:
    """Return a checkpoint's plain state. Raise Invalid if it does not have the form that a run writes."""
    try:
        SavedState.model_validate(state)
    except ValidationError as error:
        raise Invalid(f"its state is not the state of a run: {first_fault(error)}") from None
    return state
