"""Settings from YAML files, environment variables and the command line, with the origin of every value.

Precedence, highest first: command line, environment, YAML file, default.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, YamlConfigSettingsSource

from configs.common import ProcessSettings, all_conflicts
from configs.errors import Problem, SettingsError
from configs.keys import find, get, holds, key_of, put, sections_of, unknown

S = TypeVar("S", bound=ProcessSettings)
M = TypeVar("M", bound=BaseModel)
COMMAND_LINE = "command line"
ABSENT = object()
_TRUE_OR_FALSE = {"true", "false", "1", "0", "yes", "no", "on", "off"}
# Keys whose value may be a path, or end in one before `:name`; in a file, it is relative to that file.
_PATHS = {
    *("model", "train.model", "infer.model", "teacher.model", "orch.model.name", "orch.teacher_model.model.name"),
    *("orch.teacher_model.model.tokenizer", "orch.env.id", "orch.eval.env.id", "orch.advantage.import_path"),
    *("orch.arena", "orch.filters.import_path"),
    *("orch.hints.templates", "orch.preferences.pairs", "train.loss.import_path", "train.init_adapter"),
}
Texts: TypeAlias = Sequence[tuple[str, str, str | None]]
"""Origin, dotted key and text of values that are given as texts; None where the text is missing."""
Given: TypeAlias = Mapping[str, tuple[str, str]]
"""By the dotted key of every value that was set: its origin, and the key by which it was set there."""


@dataclass(kw_only=True)
class Values:
    """Values from several sources, and where each came from."""

    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Keys that stand for others, unless these are set too."""
    tree: dict[str, Any] = field(default_factory=dict)
    given: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, added: dict[str, Any], origin: str, *, below: str = "") -> None:
        """Takes over values that have precedence over those that are there. `below`: what precedes their keys here, as
        `train.`."""
        self.given |= {below + key: (origin, key) for key in _leaves(added)}
        added = {below.rstrip("."): added} if below else added
        for name, target in [(name, target) for name, targets in self.shared.items() for target in targets]:
            value = get(added, name, ABSENT)
            if value is not ABSENT and get(added, target, ABSENT) is ABSENT:
                put(added, target, value)
                self.given[target] = (origin, name)
        self.tree = _merged(self.tree, added)

    def add_texts(self, cls: type[BaseModel], texts: Texts) -> None:
        """Takes over values that are given as texts, those of keys that stand for others first."""
        seen: dict[str, str] = {}
        for origin, key, text in sorted(texts, key=lambda one: one[1] not in self.shared):
            known, value = find(cls, key), dict[str, Any]()
            try:
                if known is None:
                    raise ValueError(unknown(cls, key))
                if text is None or key in seen:
                    raise ValueError(
                        f"is given twice ({seen[key]})" if key in seen else f"needs a value: --{key} VALUE"
                    )
                put(value, key, _value(text, known.annotation))
                self.add(value, origin)
                seen[key] = origin
            except (json.JSONDecodeError, RecursionError):
                why = 'is not JSON, in which mappings and lists of them are given, as \'[{"id": "reverse-text"}]\''
                self.problems.append(Problem(origin=origin, key=key, value=text, message=why))
            except ValueError as error:
                self.problems.append(Problem(origin=origin, key=key, value=text, message=str(error)))

    def validated(self, cls: type[M], *, default: str, missing: Mapping[str, str] | None = None) -> M:
        """The settings that these values make. `default`: the origin of those that were not given. `missing`: keys that
        another one could fill, to that one. Raises `SettingsError`, also with the problems that were found before."""
        problems = list(self.problems)
        try:
            settings = cls.model_validate(self.tree)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key, value, message = key_of(cls, item["loc"]), item["input"], item["msg"].removeprefix("Value error, ")
                origin, shown = nearest(self.given, key) or (default, key)
                if item["type"] == "too_short" and item["input"]:
                    continue  # a member of the list has an error
                if item["type"] == "missing":
                    shown = (missing or {}).get(key, shown)
                    value, message = None, f"is required; set it in the file, or --{shown}"
                elif item["type"] == "extra_forbidden":
                    message = unknown(cls, key)
                problem = Problem(origin=origin, key=shown, value=value, message=message)
                problems += [problem] if problem not in problems else []
        if problems:
            raise SettingsError(problems)
        return settings


def environment(prefixes: Mapping[str, str]) -> Texts:
    """The values in environment variables. `prefixes`: what a name begins with, to what its key begins with."""
    return [
        (f"environment variable {name}", key + name.removeprefix(prefix).lower().replace("__", "."), text)
        for name, text in os.environ.items()
        for prefix, key in prefixes.items()
        if name.startswith(prefix)
    ]


def split(cls: type[BaseModel], arguments: Sequence[str]) -> Texts:
    """The values of a command line: `--key value`, `--key=value` and, for what is true or false, `--key`. Raises
    `SettingsError` for words that belong to no option."""
    texts: list[tuple[str, str, str | None]] = []
    problems, remaining = list[Problem](), list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or argument == "--":
            message = "unexpected argument; the file or the run comes first, and settings are given as --key value"
            problems.append(Problem(origin=COMMAND_LINE, key=argument, value=argument, message=message))
            continue
        key, equals, text = argument[2:].partition("=")
        is_switch = (known := find(cls, key)) is not None and holds(known.annotation, bool)
        follows = not equals and remaining and not remaining[0].startswith("--")
        if follows and (not is_switch or remaining[0].lower() in _TRUE_OR_FALSE):
            equals, text = "=", remaining.pop(0)
        texts.append((COMMAND_LINE, key, text if equals else "true" if is_switch else None))
    if problems:
        raise SettingsError(problems)
    return texts


def nearest(given: Given, key: str) -> tuple[str, str] | None:
    """How a key was given, or the section or list that it belongs to."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (found := given.get(".".join(parts[:length]))) is not None:
            return found[0], ".".join([found[1], *parts[length:]])
    return None


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees in one; where both have a value, that of `high`."""
    tree = dict(low)
    for name, value in high.items():
        below = tree.get(name)
        tree[name] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return tree


def _value(text: str, annotation: Any) -> Any:
    """What a text on the command line or in the environment stands for; pydantic reads numbers and the like itself."""
    of_sections, is_list = bool(sections_of(annotation)), holds(annotation, tuple)
    if text != "null" and ((of_sections and is_list) or text[:1] in ("[", "{")):
        return json.loads(text) if of_sections or is_list or holds(annotation, dict) else text
    return None if text == "null" else text


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if (key := str(key_node.value)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _YamlFile(YamlConfigSettingsSource):
    def _read_file(self, file_path: Any) -> dict[str, Any]:
        tree = yaml.load(file_path.read_text(encoding="utf-8"), _Loader)
        if tree is not None and not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}, expected a mapping of keys to values")
        return tree or {}


def read_yaml(path: Path, prefix: str = "") -> dict[str, Any]:
    """The values of a file, paths made absolute. `prefix`: where they stand in the settings of a run (`orch.`). Raises
    `SettingsError`."""
    try:
        if not path.is_file():
            raise ValueError("no such file; give the path of a YAML file with settings")
        if path.suffix == ".py":
            raise ValueError(f'it is Python; give an environment as --orch.env \'[{{"id": "{path.name}:CLASS"}}]\'')
        tree: dict[str, Any] = _absolute(_YamlFile(BaseSettings, yaml_file=path).yaml_data, prefix[:-1], path.parent)
        return tree
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        message = f"cannot be read as YAML: {error}"
        raise SettingsError([Problem(origin=str(path), key="(file)", value=str(path), message=message)]) from None


def _absolute(value: Any, key: str, folder: Path) -> Any:
    """The tree below `key` with paths that are relative to `folder` made absolute."""
    if isinstance(value, dict):
        return {str(name): _absolute(inner, f"{key}.{name}".lstrip("."), folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_absolute(inner, key, folder) for inner in value]
    if not isinstance(value, str) or not (key in _PATHS or (".args." in key and value.startswith(("./", "../")))):
        return value
    path, colon, name = value.partition(".py:")
    there = folder / (path + colon.rstrip(":"))
    try:
        return f"{there.absolute()}{':' if colon else ''}{name}" if there.exists() else value
    except (OSError, ValueError):
        return value


# --- one program ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[S]):
    """Settings of a program together with where each value came from."""

    settings: S
    given: Given
    file: str
    """Name of the YAML file, or of the program where there was none."""
    prefix: str = ""
    """What the user puts before the keys that were not set: `train.` in the file of a run."""

    def problem(self, key: str, message: str) -> Problem:
        """A problem with `key` of these settings."""
        value = value_at(self.settings, key)
        return Problem(origin=self.origin(key), key=self.shown(key), value=value, message=message)

    def origin(self, key: str) -> str:
        """Where the value of `key` came from."""
        return (nearest(self.given, key) or (f"{self.file} (default)", ""))[0]

    def shown(self, key: str) -> str:
        """What the user calls `key`."""
        return (nearest(self.given, key) or ("", self.prefix + key))[1]

    def said(self, key: str) -> str:
        """A key with its value and its origin, for messages about another one."""
        return f"{self.shown(key)} = {value_at(self.settings, key)!r} ({self.origin(key)})"


def value_at(settings: BaseModel, key: str) -> object:
    """The value of a dotted key; `env.0.id` reaches into lists. Raises AttributeError where another `type` has it."""
    value: Any = settings
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else getattr(value, part)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def load(cls: type[S], *, file: str | Path | None, arguments: Sequence[str] = ()) -> Loaded[S]:
    """Settings of one program from its YAML file, the environment and `--key value` arguments.

    Raises `SettingsError` with every problem: unknown keys, values of a wrong type or out of range, required keys
    that are missing, contradictions, and keys that would have no effect.
    """
    name, values = str(file) if file is not None else f"grpo-{cls.role}", Values()
    if file is not None:
        values.add(read_yaml(Path(file), f"{cls.role}."), name)
    values.add_texts(cls, environment({cls.env_prefix: ""}))
    values.add_texts(cls, split(cls, arguments))
    loaded = Loaded(settings=values.validated(cls, default=name), given=values.given, file=name)
    if problems := [loaded.problem(key, message) for key, message in all_conflicts(loaded.settings)]:
        raise SettingsError(problems)
    return loaded


def dump(settings: BaseModel) -> str:
    """The effective settings as YAML, defaults included."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text
