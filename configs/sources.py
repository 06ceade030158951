"""Where values come from: YAML files, environment variables and the command line, read by pydantic-settings'
sources."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import yaml
from pydantic import BaseModel
from pydantic_settings import BaseSettings, EnvSettingsSource, YamlConfigSettingsSource
from pydantic_settings.exceptions import SettingsError as SourceError

from configs.errors import Problem, SettingsError
from configs.keys import find, flat, is_plain_list, is_switch, merged, unknown

COMMAND_LINE = "command line"
_TRUE_OR_FALSE = {"true", "false", "1", "0", "yes", "no", "on", "off"}
_MAX_FILE_BYTES = 1 << 20
# Keys whose value may be a path, or end in one before `:name`; in a file, it is relative to that file.
_PATHS = {
    *("model", "train.model", "infer.model", "teacher.model", "orch.model.name", "orch.teacher_model.model.name"),
    *("orch.teacher_model.model.tokenizer", "orch.env.id", "orch.eval.env.id", "orch.advantage.import_path"),
    *("orch.hints.templates", "orch.preferences.pairs"),
}


@dataclass(frozen=True, slots=True)
class Given:
    """Where a value was set, and by which key. Example: ``Given("run.yaml", "lora_rank")`` for `train.lora_rank`."""

    origin: str
    key: str


@dataclass(kw_only=True)
class Gathered:
    """Values from one or several sources, and where each came from."""

    tree: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    """By the dotted key of every value."""
    problems: list[Problem] = field(default_factory=list)

    def add(self, tree: Mapping[str, Any], origin: str, *, below: str = "") -> None:
        """Takes over values that have precedence over those that are there. `below`: what precedes their keys here, as
        `train.`."""
        for key, _ in flat(tree):
            self.given[below + key] = Given(origin, key)
        self.tree = merged(self.tree, {below.rstrip("."): tree} if below else tree)

    def over(self, low: "Gathered") -> "Gathered":
        """These values and, where there are none, those of `low`."""
        return Gathered(
            tree=merged(low.tree, self.tree),
            given=low.given | self.given,
            problems=[*low.problems, *self.problems],
        )


def nearest(given: Mapping[str, Given], key: str) -> Given | None:
    """How a key was given, or the section or list that it belongs to."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (found := given.get(".".join(parts[:length]))) is not None:
            return Given(found.origin, ".".join([found.key, *parts[length:]]))
    return None


# --- files --------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would drop the first without a word, and aliases,
    which settings do not need and which can make a small file endless."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if (key := str(key_node.value)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias is not taken in settings", None)
        return super().compose_node(parent, index)


class _YamlFile(YamlConfigSettingsSource):
    def _read_file(self, file_path: Any) -> dict[str, Any]:
        tree = yaml.load(file_path.read_text(encoding="utf-8"), _Loader)
        if tree is not None and not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}, expected a mapping of keys to values")
        return tree or {}


def read_yaml(path: Path, prefix: str = "") -> dict[str, Any]:
    """The values of a file, paths made absolute. `prefix`: where they stand in the settings of a run (`orch.`). Raises
    `SettingsError`."""

    def fail(message: str) -> SettingsError:
        return SettingsError([Problem(origin=str(path), key="(file)", value=str(path), message=message)])

    try:
        if not path.is_file():
            raise fail("no such file; give the path of a YAML file with settings")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise fail(f"is larger than {_MAX_FILE_BYTES} bytes, expected a file of settings")
        tree = _YamlFile(BaseSettings, yaml_file=path).yaml_data
    except RecursionError:
        raise fail("is nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise fail(f"cannot be read as YAML: {error}") from None
    absolute: dict[str, Any] = _absolute(tree, prefix.rstrip("."), path.parent)
    return absolute


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


# --- texts --------------------------------------------------------------------------------------------------------


class _Texts(EnvSettingsSource):
    """Values given as texts, by their dotted keys; lists and mappings are JSON."""

    def __init__(self, cls: type[BaseModel], texts: Mapping[str, str]) -> None:
        self._texts = texts
        super().__init__(
            cast(type[BaseSettings], cls),
            case_sensitive=True,
            env_prefix="",
            env_nested_delimiter=".",
            env_parse_none_str="null",
        )

    def _load_env_vars(self) -> Mapping[str, str | None]:
        # The source knows the text for null by a type of its own.
        from pydantic_settings.sources.utils import parse_env_vars

        return parse_env_vars(self._texts, True, False, "null")


def _as_list(text: str) -> str:
    """The JSON of a list that may be given with commas instead."""
    return text if text.lstrip().startswith("[") or text == "null" else json.dumps(text.split(","))


def _from_texts(cls: type[BaseModel], given: Iterable[tuple[str, str, str | None]]) -> Gathered:
    """Values from (origin, dotted key, text); None where the text is missing."""
    gathered = Gathered()
    for origin, key, text in given:
        message, known = None, find(cls, key)
        if known is None:
            message = unknown(cls, key)
        elif text is None:
            message = f"needs a value, as in --{key} VALUE"
        elif key in gathered.given:
            message = f"is given twice ({gathered.given[key].origin}); give it once"
        else:
            gathered.given[key] = Given(origin, key)
            try:
                gathered.add(_Texts(cls, {key: _as_list(text) if is_plain_list(known) else text})(), origin)
            except (SourceError, ValueError, RecursionError):
                message = (
                    'is not JSON, in which mappings and lists of them are given, as in \'[{"id": "reverse-text"}]\''
                )
        if message is not None:
            gathered.problems.append(Problem(origin=origin, key=key, value=text, message=message))
    return gathered


def environment(cls: type[BaseModel], prefixes: Mapping[str, str]) -> Gathered:
    """Values from environment variables. `prefixes`: what a variable begins with, to what its key begins with."""
    given = []
    for name, text in os.environ.items():
        for prefix, key in prefixes.items():
            if name.startswith(prefix):
                dotted = key + name.removeprefix(prefix).lower().replace("__", ".")
                given.append((f"environment variable {name}", dotted, text))
    return _from_texts(cls, given)


Options: TypeAlias = list[tuple[str, str | None]]
"""(key, text) of each option of a command line, None where it stands alone, in the order in which they were given."""


def split(cls: type[BaseModel], arguments: Sequence[str]) -> tuple[list[str], Options]:
    """Takes `--key value`, `--key=value` and, for what is true or false, `--key` apart: the words that belong to no
    option, and the options."""
    words: list[str] = []
    options: Options = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or argument == "--":
            words.append(argument)
            continue
        key, equals, text = argument[2:].partition("=")
        value: str | None = text if equals else None
        known = find(cls, key)
        follows = value is None and remaining and not remaining[0].startswith("--")
        takes_any = known is None or not is_switch(known.annotation)
        if follows and (takes_any or remaining[0].lower() in _TRUE_OR_FALSE):
            value = remaining.pop(0)
        if value is None and known is not None and is_switch(known.annotation):
            value = "true"
        options.append((key, value))
    return words, options


def command_line(cls: type[BaseModel], words: Sequence[str], options: Options) -> Gathered:
    """Values from options. Words that belong to none are problems."""
    gathered = _from_texts(cls, ((COMMAND_LINE, key, text) for key, text in options))
    for word in words:
        message = "unexpected argument; the file or the run comes first, and settings are given as --key value"
        gathered.problems.append(Problem(origin=COMMAND_LINE, key=word, value=word, message=message))
    return gathered
