"""Settings from YAML files, environment variables and the command line, with the origin of every value.

Precedence, highest first: command line, environment, YAML file, default.
"""

import difflib
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from grpo.configs.common import ProcessSettings, all_conflicts
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.facts import this_hardware
from grpo.configs.keys import find, get, holds, key_of, known_keys, put, unknown, words_of
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, YamlConfigSettingsSource

S = TypeVar("S", bound=ProcessSettings)
M = TypeVar("M", bound=BaseModel)
COMMAND_LINE = "command line"
ABSENT = object()
_SWITCH_WORDS = {"true", "false", "1", "0", "yes", "no", "on", "off", "null"}
# Keys whose value may be a path, or end in one before `:name`; in a file, it is relative to that file.
_PATHS = {
    *("model", "train.model", "infer.model", "teacher.model", "orch.model.name", "orch.teacher_model.model.name"),
    *("env", "env.id", "orch.env", "orch.eval.env"),
    *("orch.teacher_model.model.tokenizer", "orch.env.id", "orch.eval.env.id", "orch.advantage.import_path"),
    *("orch.arena", "orch.filters.import_path"),
    *("orch.hints.templates", "orch.preferences.pairs", "train.loss.import_path", "train.init_adapter"),
}
_PREFIXES = ("GRPO_RUN_", "GRPO_TRAIN_", "GRPO_INFER_", "GRPO_ORCH_", "GRPO_TEACHER_")
"""Beginnings of the names of variables with settings; each program looks at its own."""
_MAX_VALUES = 500_000
"""Largest number of values in one file."""
_NUM_EXPLAINED = 50
"""Number of unknown keys for which the one that was meant is looked for."""
_TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_NO_SETTINGS = {"GRPO_PARENT_PID"}
"""Variables that are no person's."""
Texts: TypeAlias = Sequence[tuple[str, str | None]]
"""Dotted key and text of the values on a command line; None where the text is missing."""
Given: TypeAlias = Mapping[str, tuple[str, str]]
"""Origin of every value that was set, and the key by which it was set there, by the value's dotted key."""


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

    def add_options(self, cls: type[BaseModel], texts: Texts) -> None:
        """Takes over the values of a command line, those of keys that stand for others first."""
        right = dict[str, str]()
        for key, text in texts:
            message = unknown(cls, _without_numbers(key)) if find(cls, key) is None else None
            message = message or ("is given twice; give it once" if key in right else None)
            message = message or (f"needs a value: --{key} VALUE" if text is None else None)
            if text is None or message is not None:
                self._refuse(COMMAND_LINE, key, text, str(message))
            else:
                right[key] = text
        tree = _options_of(cls)(parsed_args=dict(right))()
        for key in sorted(right, key=lambda one: one not in self.shared):
            self._add_one(COMMAND_LINE, key, get(tree, key))

    def add_environment(self, cls: type[BaseModel], prefix: str, *, below: str = "") -> None:
        """Takes over the values of environment variables whose names begin with `prefix`, those of keys that stand for
        others first. `below`: what precedes their keys here, as `train.`."""
        tree = _Environment(cls, prefix)()
        names = {_key_of(name, prefix): name for name in os.environ if name.startswith(prefix)}
        for key in sorted(names, key=lambda one: below + one not in self.shared):
            origin = f"environment variable {names[key]}"
            if find(cls, key) is None:
                self._refuse(origin, below + key, os.environ[names[key]], unknown(cls, key))
            else:
                self._add_one(origin, below + key, get(tree, key))

    def check_environment(self, programs: Mapping[str, type[BaseModel]]) -> None:
        """Refuses environment variables that nothing reads. `programs`: whose settings there are, by the beginning of
        their variables' names. Variables with keys are what settings say they are called, often others' settings."""
        strange = [name for name in sorted(os.environ) if name.startswith("GRPO_") and not name.startswith(_PREFIXES)]
        strange = [name for name in strange if not name.endswith(("_KEY", "_TOKEN")) and name not in _NO_SETTINGS]
        if not strange:
            return
        known = [_variable(prefix, key) for prefix, cls in programs.items() for key in known_keys(cls)]
        for name in strange:
            parts = {one: one.removeprefix(prefix) for prefix in programs for one in known if one.startswith(prefix)}
            close = [one for one, key in parts.items() if key == name.removeprefix("GRPO_")]
            close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            message = f"nothing reads it{f'; did you mean {close[0]}?' if close else ''}; unset it otherwise"
            self._refuse("environment", name, os.environ[name], message)

    def _add_one(self, origin: str, key: str, value: Any) -> None:
        if isinstance(value, _NoJson):
            why = 'is not JSON, in which mappings and lists of them are given, as \'[{"type": "repetition"}]\''
            self._refuse(origin, key, value.text, why)
            return
        tree = dict[str, Any]()
        put(tree, key, value)
        self.add(tree, origin)

    def refuse(self, key: str, message: str) -> None:
        """Notes what is wrong with the value of a key that is there, or with its default."""
        origin, shown = self.given.get(key, ("default", key))
        self._refuse(origin, shown, get(self.tree, key), message)

    def _refuse(self, origin: str, key: str, value: object, message: str) -> None:
        self.problems.append(Problem(origin=origin, key=key, value=value, message=message))

    def validated(self, cls: type[M], *, default: str, missing: Mapping[str, str] | None = None) -> M:
        """The settings that these values make. `default`: the origin of those that were not given. `missing`: keys that
        another one could fill, to that one. Raises `SettingsError`, also with the problems that were found before."""
        problems, seen = list(self.problems), set[tuple[str, str, str]]()
        try:
            settings = cls.model_validate(self.tree)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key, value, message = key_of(cls, item["loc"]), item["input"], item["msg"].removeprefix("Value error, ")
                origin, shown = nearest(self.given, key) or (default, key)
                if item["type"] == "default_factory_not_called" or (item["type"] == "too_short" and item["input"]):
                    continue  # what the default follows from has an error, or a member of the list
                if shown in self.shared and shown != key and any(one[:2] == (origin, shown) for one in seen):
                    continue  # one program after the other says what it thinks of the same value
                if item["type"] == "missing":
                    shown = (missing or {}).get(key, shown)
                    in_list = any(part.isdigit() for part in shown.split("."))
                    value, message = None, "is required" + f"; give --{shown}, or set it in a file" * (not in_list)
                elif item["type"] == "tuple_type":
                    message = "expected a list"
                elif item["type"] == "string_pattern_mismatch" and not str(value).strip():
                    message = "must not be empty"
                elif item["type"] == "extra_forbidden":
                    message = unknown(cls, key) if len(seen) < _NUM_EXPLAINED else "unknown key"
                if (origin, shown, message) not in seen:
                    seen.add((origin, shown, message))
                    problems.append(Problem(origin=origin, key=shown, value=value, message=message))
        if problems:
            raise SettingsError(problems)
        return settings


def split(cls: type[BaseModel], arguments: Sequence[str]) -> Texts:
    """The values of a command line: `--key value`, `--key=value` and, for what is true or false, `--key`. Raises
    `SettingsError` for words that belong to no option."""
    texts: list[tuple[str, str | None]] = []
    problems, remaining = list[Problem](), list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or argument == "--":
            message = "unexpected argument; the file or the run comes first, and settings are given as --key value"
            problems.append(Problem(origin=COMMAND_LINE, key=argument, value=argument, message=message))
            continue
        key, equals, text = argument[2:].partition("=")
        is_switch = (known := find(cls, key)) is not None and holds(known.annotation, bool)
        values = _SWITCH_WORDS | words_of(known.annotation) if is_switch and known else set[str]()
        follows = not equals and remaining and not remaining[0].startswith("--")
        if follows and (not is_switch or remaining[0].lower() in values):
            equals, text = "=", remaining.pop(0)
        texts.append((key, text if equals else "true" if is_switch else None))
    if problems:
        raise SettingsError(problems)
    return texts


def nearest(given: Given, key: str) -> tuple[str, str] | None:
    """Returns the origin of a key, or of the section or list that it belongs to."""
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


# --- pydantic-settings' sources, but not `BaseSettings`, which forgets the origin of a value, nor its command line,
# which takes repeated options and reports one error at a time ---


@dataclass(frozen=True, slots=True)
class _NoJson:
    """A text that looks like JSON and is none."""

    text: str


class _Decoding(EnvSettingsSource):
    """Values as texts: what begins like JSON is JSON; other texts are left to pydantic."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if value[:1] not in ("[", "{"):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return _NoJson(value)


class _Environment(_Decoding):
    def __init__(self, cls: type[BaseModel], prefix: str) -> None:
        own: Any = cls  # it asks for a BaseSettings, and uses the fields alone
        super().__init__(own, env_prefix=prefix, env_nested_delimiter="__", env_parse_none_str="null")


class _Options(_Decoding, CliSettingsSource[Any]):
    """Values by their dotted keys."""


@functools.cache
def _options_of(cls: type[BaseModel]) -> _Options:
    own: Any = cls
    return _Options(own, cli_parse_none_str="null")


def _variable(prefix: str, key: str) -> str:
    return prefix + key.replace(".", "__").upper()


def _without_numbers(key: str) -> str:
    """`env.0.id` as `env.id`: options do not reach into lists, however they count."""
    return ".".join(part for part in key.split(".") if not part.isdigit()) or key


def _key_of(variable: str, prefix: str) -> str:
    return variable.removeprefix(prefix).lower().replace("__", ".")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would drop the first without a word, and keys that
    YAML reads as something else, as `yes` and `1`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag not in _TEXTS:
                why = f"the key {str(key_node.value)[:100]} is no text; write it in quotes"
                raise yaml.constructor.ConstructorError(None, None, why, key_node.start_mark)
            if (key := str(key_node.value)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _YamlFile(YamlConfigSettingsSource):
    def _read_file(self, file_path: Any) -> dict[str, Any]:
        tree = yaml.load(file_path.read_text(encoding="utf-8"), _Loader)
        if tree is not None and not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}, expected a mapping of keys to values")
        _check_size(tree)
        return tree or {}


def _check_size(tree: Any) -> None:
    """Raises ValueError for more values than a person writes: a few aliases of aliases stand for billions."""
    waiting, num = [tree], 0
    while waiting:
        one = waiting.pop()
        inner = [*one.values()] if isinstance(one, dict) else one if isinstance(one, list) else []
        waiting += inner
        if (num := num + len(inner)) > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values, each alias counted where it stands")


def read_yaml(path: Path, prefix: str = "") -> dict[str, Any]:
    """The values of a file, paths made absolute. `prefix`: where they stand in the settings of a run (`orch.`). Raises
    `SettingsError`."""
    try:
        if not path.is_file():
            raise ValueError("no such file; give the path of a YAML file with settings")
        if path.suffix == ".py":
            raise ValueError(f"it is Python; give an environment as --env {path.name}:CLASS, after the run")
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
class LoadedSettings(Generic[S]):
    """Settings of a program together with where each value came from."""

    settings: S
    given: Given
    file: str
    """Name of the YAML file, or of the program where there was none."""
    prefix: str = ""
    """Prefix of keys that were not set, as the user would write them: `train.` in the file of a run."""

    def problem(self, key: str, message: str) -> Problem:
        """A problem with `key` of these settings."""
        value = value_at(self.settings, key)
        return Problem(origin=self.origin(key), key=self.shown(key), value=value, message=message)

    def origin(self, key: str) -> str:
        """Returns the origin of the value of `key`."""
        return (nearest(self.given, key) or (f"{self.file} (default)", ""))[0]

    def shown(self, key: str) -> str:
        """Returns `key` as the user would write it."""
        return (nearest(self.given, key) or ("", self.prefix + key))[1]

    def described(self, key: str) -> str:
        """A key with its value and its origin, for messages about another one."""
        return f"{self.shown(key)} = {value_at(self.settings, key)!r} ({self.origin(key)})"


def value_at(settings: BaseModel, key: str) -> object:
    """The value of a dotted key; `env.0.id` reaches into lists. Raises AttributeError where another `type` has it."""
    value: Any = settings
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else getattr(value, part)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def load(cls: type[S], *, file: str | Path | None, arguments: Sequence[str] = ()) -> LoadedSettings[S]:
    """Settings of one program from its YAML file, the environment and `--key value` arguments.

    Raises `SettingsError` with every problem: unknown keys, values of a wrong type or out of range, required keys
    that are missing, contradictions, and keys that would have no effect.
    """
    name, values = str(file) if file is not None else f"grpo-{cls.role}", Values()
    if file is not None:
        values.add(read_yaml(Path(file), f"{cls.role}."), name)
    values.add_environment(cls, cls.env_prefix)
    values.check_environment({cls.env_prefix: cls})
    values.add_options(cls, split(cls, arguments))
    cls.fill(values.tree, this_hardware())
    loaded = LoadedSettings(settings=values.validated(cls, default=name), given=values.given, file=name)
    if problems := [loaded.problem(key, message) for key, message in all_conflicts(loaded.settings)]:
        raise SettingsError(problems)
    return loaded


def dump(settings: BaseModel) -> str:
    """The effective settings as YAML, defaults included."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text
