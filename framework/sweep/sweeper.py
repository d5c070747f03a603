"""`hydra.sweeper` of a search: the number of trials, their draws, their pruning, and their objectives."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny

from framework.config.schema import Count, Positive, Section, keys_of
from framework.config.spelling import did_you_mean
from framework.config.validation import section_problems
from framework.runs.metrics_file import MACHINE
from framework.runtime.problem import Problem, shown

_NUM_TRIALS = 20

# --- pruners, with Optuna's names for their parameters; a step is an optimizer step


class Pruner(Section):
    """A rule that stops trials early."""

    name: str


class NoPruner(Pruner):
    """A pruner that stops no trial."""


class Median(Pruner):
    """A pruner that stops a trial if its best evaluation is worse than the median of the other trials at the same step."""

    n_startup_trials: Count = 5
    n_warmup_steps: Count = 0
    interval_steps: Positive = 1
    n_min_trials: Positive = 1


class Percentile(Median):
    """A pruner like Median that keeps the trials in the best `percentile` percent."""

    percentile: Annotated[float, Field(ge=0, le=100)] = 25.0


class _Halving(Pruner):
    bootstrap_count: Count = 0

    def rules(self) -> Iterator[Problem]:
        budget = "min_resource" if isinstance(self, Asha) else "max_resource"
        if self.bootstrap_count and getattr(self, budget) == "auto":
            yield Problem("bootstrap_count", f"{self.bootstrap_count} needs {budget}", f"{budget}=STEPS")


class Asha(_Halving):
    """Asynchronous successive halving: of the trials that reach a rung, the best 1/reduction_factor continue."""

    min_resource: Positive | Literal["auto"] = "auto"
    reduction_factor: Annotated[int, Field(ge=2)] = 4
    min_early_stopping_rate: Count = 0


class Hyperband(_Halving):
    """Several successive halvings, which start to prune at different steps."""

    min_resource: Positive = 1
    max_resource: Positive | Literal["auto"] = "auto"
    reduction_factor: Annotated[int, Field(ge=2)] = 3

    def rules(self) -> Iterator[Problem]:
        yield from super().rules()
        if isinstance(self.max_resource, int) and self.max_resource < self.min_resource:
            yield Problem("max_resource", f"{self.max_resource} is less than min_resource={self.min_resource}", "at least that")


class Patient(Pruner):
    """A pruner that stops a trial without an improvement of `min_delta` in `patience` evaluations."""

    patience: Count
    min_delta: Annotated[float, Field(ge=0)] = 0.0


_PRUNERS: dict[str, type[Pruner]] = {
    "median": Median, "percentile": Percentile, "asha": Asha, "hyperband": Hyperband, "patient": Patient, "none": NoPruner,
}  # fmt: skip


def read_pruner(node: dict[str, Any]) -> list[Problem]:
    """Replace `pruner` (a name, or `{name: NAME, ...}`) and `pruner.KEY` in a sweeper's node by a Pruner. Return problems."""
    chosen = node.pop("pruner", None)
    values = dict(chosen) if isinstance(chosen, dict) else {} if chosen is None else {"name": chosen}
    values |= {name.removeprefix("pruner."): node.pop(name) for name in [*node] if name.startswith("pruner.")}
    node["pruner"], problems = _pruner(**{str(name): value for name, value in values.items()}) if values else (None, [])
    return problems


def _pruner(name: Any = "median", **parameters: Any) -> tuple[Pruner | None, list[Problem]]:
    key = "hydra.sweeper.pruner"
    if not isinstance(name, str) or name not in _PRUNERS:
        meant = did_you_mean(str(name), list(_PRUNERS))
        return None, [Problem(key, f"{shown(name)} is not valid", f"one of {', '.join(_PRUNERS)}; {meant}".rstrip("; "))]
    kind = _PRUNERS[name]
    known = [field for field in kind.model_fields if field != "name"]
    expected = f"{name} has {', '.join(known)}" if known else f"pruner={name} has no keys"
    problems = [Problem(f"{key}.{one}", "unknown key", did_you_mean(one, known) or expected)
                for one in parameters if one not in known]  # fmt: skip
    values = {"name": name, **parameters}
    problems = problems or section_problems(kind, values, key, keys_of(kind, f"{key}."))
    return (None if problems else kind.model_validate(values)), problems


# --- objectives


class Objective(NamedTuple):
    """An objective of a search: SPLIT/METRIC, or a number in the run's summary."""

    name: str
    mode: str  # min or max

    def value(self, summary: dict[str, Any], *, monitor: str) -> float | None:
        """Return the value of a run, or None.

        For the monitored split, it is the value at the evaluation with the best `monitor`. For another split, it is the last
        value.
        """
        split, slash, metric = self.name.partition("/")
        if not slash:
            found = summary.get(self.name)
        else:
            which = "best" if split == monitor.partition("/")[0] else "last"
            found = summary.get("metrics", {}).get(split, {}).get(which, {}).get(metric)
        return float(found) if isinstance(found, (int, float)) else None


_OF_SUMMARY = ("parameters", "wall_s")
_SPLITS = ("train", "val")


# --- the section


class Sweeper(Section):
    """The settings of a search: how it draws its trials."""

    n_trials: Positive | None
    seed: Count
    sampler: Literal["tpe", "random", "grid"]
    pruner: SerializeAsAny[Pruner] | None
    objectives: list[str] | None

    @property
    def chosen_pruner(self) -> Pruner:
        """The pruner. The default is `median` with one objective, and no pruner with several."""
        return self.pruner or (NoPruner(name="none") if self.objectives else Median(name="median"))

    @property
    def goals(self) -> list[Objective]:
        """The objectives, if there are several."""
        return [Objective(name, mode) for name, _, mode in (text.rpartition(":") for text in self.objectives or [])]

    @property
    def metrics(self) -> list[str]:
        """The objectives that are metrics. The others come from the summary or from a clock."""
        return [goal.name for goal in self.goals if "/" in goal.name and goal.name.partition("/")[2] not in MACHINE]

    def num_trials(self, num_combinations: int) -> int:
        """Return the number of trials. `num_combinations` is the number of combinations in a grid."""
        if self.sampler == "grid":
            return min(self.n_trials or num_combinations, num_combinations)
        return self.n_trials or _NUM_TRIALS

    def decisive(self) -> dict[str, Any]:
        """Return the settings that distinguish this search from other searches."""
        pruner = self.chosen_pruner
        changed = pruner.model_dump(exclude={"name"}, exclude_defaults=True)
        others = {"objectives": self.objectives, "pruner_settings": changed}
        given = {name: value for name, value in others.items() if value}
        return {"seed": self.seed, "sampler": self.sampler, "pruner": pruner.name, **given}

    def rules(self) -> Iterator[Problem]:
        yield from self._objective_problems()
        if self.objectives and not isinstance(self.chosen_pruner, NoPruner):
            yield Problem("pruner", f"{self.chosen_pruner.name} cannot compare several objectives", "pruner=none")

    def _objective_problems(self) -> Iterator[Problem]:
        if self.objectives is None:
            return
        names = [goal.name for goal in self.goals]
        if len(names) < 2 or len({*names}) < len(names):
            yield Problem("objectives", f"{shown(self.objectives)} is not valid",
                          "at least two different objectives; for one, use checkpoint.monitor")  # fmt: skip
        for text, (name, mode) in zip(self.objectives, self.goals):
            split, slash, metric = name.partition("/")
            is_known = split in _SPLITS and metric if slash else name in _OF_SUMMARY
            if not is_known or mode not in ("min", "max"):
                expected = f"val/METRIC:min, val/METRIC:max, train/..., or {', '.join(_OF_SUMMARY)} with :min or :max"
                yield Problem("objectives", f"{text} is not valid", expected)
