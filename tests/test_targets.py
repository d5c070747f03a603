"""Components: what a target gets for a mapping or a list, and which keys it takes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig

from framework.config.targets import component
from framework.config.validation import component_problems, problems_of_build
from framework.runtime.problem import Problem
from tests.harness import Says


@dataclass
class Inner:
    rate: float = 0.5


@dataclass
class Sizes:
    inner: Inner
    width: int = 8
    names: list[str] | None = None


class Keeper:
    def __init__(self, any: Any = None, config: DictConfig | None = None, names: "ListConfig | None" = None,
                 sizes: Sizes | None = None, by_name: dict[str, Sizes] | None = None,
                 of_one: Callable[[float], float] = abs) -> None:  # fmt: skip
        self.kept = {"any": any, "config": config, "names": names, "sizes": sizes, "by_name": by_name, "of_one": of_one}


def sizes(
    some: tuple[Any, ...] | None = None, other: Any = (1, 2), both: list[Any] | tuple[Any, ...] = (), plain: Any = None
) -> Any:
    return [some, other, both, plain]


PATH = "tests.test_targets.Keeper"
MAPPING = {"a": {"b": [1]}}


def kept(**node: Any) -> dict[str, Any]:
    return component({"_target_": PATH, **node})().kept


def problems(**node: Any) -> list[str]:
    return [str(problem) for problem in component_problems("model", {"_target_": PATH, **node}, known=[])]


@pytest.mark.parametrize("convert", [{}, *({"_convert_": how} for how in ("all", "partial", "object"))])
def test_a_mapping_is_a_dict_unless_the_argument_is_a_config(convert: dict[str, str]) -> None:
    found = kept(any=MAPPING, config=MAPPING, names=["x"], **convert)
    assert type(found["any"]) is dict and found["any"] == MAPPING
    assert isinstance(found["config"], DictConfig) and found["config"].a.b[0] == 1
    assert isinstance(found["names"], ListConfig)


def test_a_list_is_a_tuple_where_the_argument_is_one() -> None:
    given = {name: [3, [4]] for name in ("some", "other", "both", "plain")}
    assert component({"_target_": f"{__name__}.sizes", **given})() == [(3, [4]), (3, [4]), [3, [4]], [3, [4]]]
    said = str(Problem.of_error("model", AssertionError("depth needs to be tuple")))
    assert said == Says(
        "model: depth needs to be tuple (instead of a list [1, 2], {_target_: builtins.tuple, _args_: [[1, 2]]}; ..."
    )


def test_an_argument_that_is_a_function_of_others_gets_a_node() -> None:
    assert kept(of_one={"_target_": "math.sqrt", "_partial_": True})["of_one"](9) == 3


def test_convert_none_gives_configs_also_to_inner_nodes() -> None:
    inner = {"_target_": PATH, "any": MAPPING}
    found = kept(any=[inner, inner | {"_convert_": "all"}], _convert_="none")["any"]
    assert isinstance(found, ListConfig), "with built objects in it"
    assert isinstance(found[0].kept["any"], DictConfig)
    assert type(found[1].kept["any"]) is dict


def test_a_dataclass_gets_its_own_class() -> None:
    found = kept(sizes={"inner": {"rate": 1.5}, "names": ["x"]}, by_name={"x": {"width": 1}})
    assert found["sizes"] == Sizes(Inner(1.5), 8, ["x"])
    assert found["by_name"] == {"x": {"width": 1}}
    assert kept(sizes=None)["sizes"] is None


@pytest.mark.parametrize(("node", "lines"), [
    ({"sizes": {"inner": {}}}, []),
    ({"sizes": {"inner": {"rat": 1.0}, "width": "8"}}, ["model.sizes.inner.rat: did you mean model.sizes.inner.rate?", "model.sizes.width: 8 ... did you mean 8"]),
    ({"sizes": {}}, ["model.sizes.inner: is missing"]),
    ({"_convert_": "nonsense"}, ["model._convert_: 'nonsense' ... none, partial, all, object"]),
    ({"_convert_": "none"}, []),
])  # fmt: skip
def test_dataclasses_and_convert_are_checked(node: dict[str, Any], lines: list[str]) -> None:
    assert sorted(problems(**node)) == [Says(line) for line in lines]


def shown_less(takes: Any) -> Any:
    """A decorator that takes everything; signatures follow `__wrapped__`."""

    @functools.wraps(takes)
    def call(*args: Any, **given: Any) -> Any:
        more = given.pop("more", None)
        return (takes(*args, **given), more)

    return call


@shown_less
def hiding(width: int = 8) -> int:
    return width


@shown_less
def holding(inner: Any = None, width: int = 8) -> Any:
    return inner


HIDING, HOLDING = "tests.test_targets.hiding", "tests.test_targets.holding"


@pytest.mark.parametrize(("node", "lines"), [
    ({"more": 1}, []),
    ({"widht": 1}, ["model.any.widht: unknown key ... did you mean model.any.width?"]),
    ({"more": 1, "_partial_": True}, ["model.any.more: unknown key"]),
    ({"width": "x"}, ["model.any.width: 'x' is not valid"]),
    ({"unheard": 1}, []),
])  # fmt: skip
def test_a_key_that_a_signature_hides_may_exist_in_an_inner_node(node: dict[str, Any], lines: list[str]) -> None:
    model = {"_target_": PATH, "any": {"_target_": HIDING, **node}}
    assert [str(problem) for problem in component_problems("model", model, known=[], may_hide=True)] == [
        Says(line) for line in lines
    ]


def test_what_the_callable_does_not_take_is_an_unknown_key() -> None:
    assert kept(any={"_target_": HIDING, "more": 1})["any"] == (8, 1)
    model = {"_target_": PATH, "any": [{"_target_": HOLDING, "inner": {"_target_": HIDING, "unheard": 1}}]}
    with pytest.raises(TypeError, match="unheard") as caught:
        component(model)()
    (problem,) = problems_of_build("model", model, caught.value)
    assert str(problem) == Says("model.any[0].inner.unheard: unknown key")
    (other,) = problems_of_build("model", model, TypeError("got an unexpected keyword argument 'of_something_else'"))
    assert other.key == "model"
