"""The overrides of a command line: chosen options, values, and errors."""

from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.arguments import syntax_problem
from framework.config.code import prefixes
from framework.config.folders import CONF, config_name, defaults_in, folders, groups, is_group, options, own_groups
from framework.config.hydra_settings import TO_HYDRA, hydra_problem, is_hydras
from framework.config.identity import leaves
from framework.config.schema import COMPONENTS, SEVERAL, RunConfig
from framework.config.spelling import did_you_mean, option_meant
from framework.config.targets import locate
from framework.runtime.problem import Problem, shown
from framework.runtime.program import typed_override


def sort_overrides(overrides: list[str]) -> tuple[list[str], list[Override], list[Problem]]:
    """Split overrides into chosen options (for Hydra), values, and problems."""
    choices: list[str] = []
    values: list[Override] = []
    problems: list[Problem] = []
    for text in overrides:
        override = parse(text)
        if override is None or not override.key_or_group:
            options_of = {group: options(group) for group in groups()}
            problems.append(syntax_problem(text, parses=lambda t: parse(t) is not None, options=options_of))
        elif problem := _refusal(override, text):
            problems.append(problem)
        elif is_choice(override) and not isinstance(override.value(), dict):
            is_deletion = override.type == OverrideType.DEL
            found = [] if is_deletion else _choice_problems(override.key_or_group, _chosen(override))
            problems += found
            if not found:
                choices += _choice(override, text)
        elif not is_hydras(override.key_or_group):
            values.append(override)
        elif override.key_or_group.startswith(TO_HYDRA):
            choices.append(text)
    return choices, values, problems


@cache  # a command asks for each of its words several times, and Hydra's parser takes a millisecond
def parse(text: str) -> Override | None:
    """Parse one override as Hydra does. Return None if the text is not an override."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # ValueError: an integer with more digits than Python converts
        return None


def is_choice(override: Override) -> bool:
    """Return whether an override chooses an option of a group, or of a group in a group (`model/encoder=large`)."""
    group = override.key_or_group
    return group in groups() or (("/" in group or override.package is not None) and is_group(group))


def _chosen(override: Override) -> Any:
    """Return the chosen option. An option can have a name such as 50 or 1e3."""
    word = str(override.input_line).partition("=")[2].strip()
    is_number = isinstance(override.value(), (bool, int, float)) and word in options(override.key_or_group)
    return word if is_number else override.value()


def _choice(override: Override, text: str) -> list[str]:
    """Return the choice for Hydra, which takes only texts. Of the framework's groups, a choice without a default is added."""
    group, chosen = override.key_or_group, _chosen(override)
    if chosen != override.value():
        text = f"{text.partition('=')[0]}='{chosen}'"
    if override.package == group.replace("/", "."):  # Hydra takes a package only where it is not the group's own
        text = text.replace(f"@{override.package}", "", 1)
    elif override.package is not None:
        place = override.package.split(".")[0]
        is_own = text[0] == "+" and place not in (*RunConfig.model_fields, *groups(), "_global_")  # a new key is under `extra`
        return [text.replace(f"@{override.package}", f"@extra.{override.package}", 1) if is_own else text]
    if group not in groups():
        return [text]
    prefix = "" if group in chosen_by_default() else "+"
    return [] if chosen is None else [prefix + text.lstrip("+")]


def key_of(override: Override) -> str:
    """Return the key that an override sets. A new key, `+key`, is `extra.key`; `extra.GROUP` is a group of the user."""
    key = override.key_or_group
    root, _, rest = key.partition(".")
    if root == "extra" and rest.split(".")[0] in own_groups():
        return rest
    is_added = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
    return f"extra.{key}" if is_added and root not in (*RunConfig.model_fields, *groups(), "hydra") else key


def chosen_by_default() -> set[str]:
    """Return the groups with a default in the primary configuration, and in the framework's if the primary one includes it."""
    paths = [folder / f"{config_name()}.yaml" for folder in folders()]
    chosen = defaults_in(next((path for path in paths if path.is_file()), CONF / "config.yaml"))
    return {*chosen, *(defaults_in(CONF / "config.yaml") if "config" in chosen else ())}


_SWITCHED_OFF = {
    "scheduler": "scheduler=constant",
    "logger": "logger=none",
    "metric": "metric=none",
    "part": "part=none",
    "sampler": "sampler=permutation",
    "experiment": "experiment=null",
}


def _refusal(override: Override, text: str) -> Problem | None:
    key = override.key_or_group
    if is_hydras(key):
        if key == "hydra.mode" and str(override.value()) not in RunMode.__members__:
            return Problem(key, f"{shown(override.value())} is not valid", "RUN or MULTIRUN")
        is_read = key.startswith((*TO_HYDRA, "hydra.verbose", "hydra.mode"))  # by Hydra, and by main()
        return None if is_read or (key == "hydra.job.chdir" and override.value() is False) else hydra_problem(key)
    if override.type == OverrideType.DEL:
        return _deletion_refusal(key, text)
    if override.is_sweep_override():
        return Problem(key, "several values make a sweep", "add -m; a list is written [1,2], a text with a comma \"'a,b'\"")
    if (override.package is not None or "/" in key) and not is_choice(override):
        word = text.partition("=")[0].lstrip("+")
        close = did_you_mean(key.split("/")[0], groups())
        return Problem(word, "unknown group", close or f"one of {', '.join(groups())}")
    return None


def _deletion_refusal(key: str, text: str) -> Problem | None:
    """Refuse to delete a key that must have a value. Only keys of components and the user's own keys can be deleted."""
    if key in groups():
        return Problem(text, "a group cannot be deleted", _SWITCHED_OFF.get(key, f"{key}=OPTION chooses another"))
    section, _, rest = key.partition(".")
    if is_group(key) or (section in (*COMPONENTS, *SEVERAL, "extra") and rest):
        return None
    return Problem(text, "a key cannot be deleted", "null switches off an optional part")


def _choice_problems(group: str, chosen: Any) -> list[Problem]:
    if isinstance(chosen, list) and group not in SEVERAL:
        return [Problem(group, f"{shown(chosen)} is not valid", f"one option, as in {group}={options(group)[0]}")]
    problems = []
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if str(name) not in options(group) and (group, name) != ("experiment", None):
            expected = "one of " + ", ".join(options(group)) if options(group) else "there is none yet"
            close = _class_meant(group, str(name)) or option_meant(str(name), group, options(group))
            if name is None and (group in _SWITCHED_OFF or "/" in group):
                close = f"did you mean {_SWITCHED_OFF.get(group, f'~{group}')}?"
            if alike := [option for option in options(group) if option == shown(name) or _is_number(option, name)]:
                close = f"did you mean {typed_override(group, alike[0])}?"
            problems.append(Problem(group, f"no option {shown(name)}", expected + (f"; {close}" if close else "")))
    return problems


def _is_number(option: str, name: Any) -> bool:
    try:
        return float(option) == float(name)
    except (TypeError, ValueError):
        return False


def _class_meant(group: str, name: str) -> str:
    """Return a suggestion for a dotted path or a torchvision architecture. Return an empty string for any other name."""
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return f"did you mean {group}._target_={name}?"
    try:
        is_known = group == "model" and name in locate("torchvision.models.list_models")()
    except ValueError:  # torchvision is not installed
        is_known = False
    return f"did you mean model=torchvision model.name={name}?" if is_known else ""


def apply(config: DictConfig, override: Override) -> list[Problem]:
    """Apply an override to the configuration. Return the problems if this is not possible."""
    key, value = key_of(override), override.value()
    sections = key.split(".")
    if override.type == OverrideType.DEL:
        return _delete(config, sections)
    for depth in range(1, len(sections)):
        above = ".".join(sections[:depth])
        if _holds_value(config, above):
            close = _class_meant(key, str(value)) if _is_empty(config, above) else ""
            return [Problem(key, "unknown key", f"{above} holds a value, not keys" + (f"; {close}" if close else ""))]
    is_section = OmegaConf.is_dict(OmegaConf.select(config, key, throw_on_resolution_failure=False))
    if is_section and not isinstance(value, dict):
        expected, close = f"a section, whose keys are set as in {key}.KEY=VALUE", option_meant(str(value), key, ())
        if value in options(group := key.replace(".", "/")):
            close = f"did you mean {group}={value}?"
        return [Problem(key, f"{shown(value)} is not valid", expected + (f"; {close}" if close else ""))]
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        return [Problem(key, f"{shown(value)} is not valid", one_line(error))]
    return []


def empty_replaced(config: DictConfig, overrides: list[Override]) -> None:
    """Empty each component of the files whose last `_target_` is another one: the option's other keys belong to the old target.

    Afterwards, all overrides can be applied in their order. A null, where a component is allowed, becomes an empty node.
    """
    targets: dict[str, Any] = {}
    for override in overrides:
        given = leaves({key_of(override): override.value()})
        targets |= {key.removesuffix("._target_"): value for key, value in given if key.endswith("._target_")}
    for key, target in targets.items():
        node = OmegaConf.select(config, key, throw_on_resolution_failure=False)
        if isinstance(node, DictConfig) and node.get("_target_") not in (None, target):
            node.clear()
        elif null := next((above for above in prefixes(key) if _is_empty(config, above)), None):
            OmegaConf.update(config, null, {}, force_add=True)


def _delete(config: DictConfig, sections: list[str]) -> list[Problem]:
    node = OmegaConf.select(config, ".".join(sections[:-1]), throw_on_resolution_failure=False)
    if not OmegaConf.is_dict(node) or sections[-1] not in node:
        return [Problem(f"~{'.'.join(sections)}", "there is no such key to delete", "--cfg job prints the keys")]
    del node[sections[-1]]
    return []


def _is_empty(config: DictConfig, key: str) -> bool:
    return _holds_value(config, key) and OmegaConf.select(config, key, throw_on_missing=False) is None


def _holds_value(config: DictConfig, key: str) -> bool:
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    if not OmegaConf.is_dict(node) or last not in node.keys():
        return False
    return not OmegaConf.is_config(node._get_node(last))


def one_line(error: BaseException) -> str:
    """Return an error of Hydra or OmegaConf as one line. Hydra's own may have no text, but a cause."""
    if not str(error) and error.__cause__ is not None:
        return one_line(error.__cause__)
    if "ecursi" in str(error):  # OmegaConf detects one kind itself; the other kind ends in Python's RecursionError
        return "it refers to itself"
    line = " ".join(str(error).split("\n    full_key:")[0].split()).split(" Config search path:")[0]
    is_resolver = line.startswith("Unsupported interpolation type")
    return f"{line}; a module hydra_plugins/NAME.py in this directory may register a resolver" if is_resolver else line
