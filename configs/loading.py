"""Loading the settings of one program, with the origin of every value.

Precedence, highest first: command line, environment, YAML file, default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.common import ProcessSettings, all_conflicts
from configs.errors import Problem, SettingsError
from configs.keys import key_of, unknown
from configs.sources import COMMAND_LINE, Gathered, command_line, environment, read_yaml, split

S = TypeVar("S", bound=ProcessSettings)
M = TypeVar("M", bound=BaseModel)
PROGRAMS = ("train", "infer", "orch", "teacher")
"""The sections of a run's file that hold settings of one program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[S]):
    """Settings of a program together with where each value came from."""

    settings: S
    origins: Mapping[str, str]
    """Dotted key of every value that was set, to where it was set."""
    file: str
    """Name of the YAML file, or of the program where there was none."""
    prefix: str = ""
    """What precedes the keys among the settings of a run, as `train.`."""
    own_file: bool = True
    """Whether the file holds settings of this program alone."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Keys that were set for several programs at once, to what they are called there."""

    def problem(self, key: str, message: str) -> Problem:
        """A problem with `key` of these settings."""
        return Problem(
            origin=self.origin(key), key=self.shown(key), value=value_at(self.settings, key), message=message
        )

    def origin(self, key: str) -> str:
        """Where the value of `key` came from."""
        return next((self.origins[one] for one in _prefixes(key) if one in self.origins), f"{self.file} (default)")

    def shown(self, key: str) -> str:
        """What the user calls `key`."""
        for one in _prefixes(key):
            if one in self.shared:
                return self.shared[one] + key.removeprefix(one)
        in_own_file = self.own_file and self.origin(key).removesuffix(" (default)") == self.file
        return key if in_own_file else self.prefix + key


def value_at(settings: BaseModel, key: str) -> object:
    """The value of a dotted key; `env.0.id` reaches into lists. Raises AttributeError where another `type` has it."""
    value: Any = settings
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else getattr(value, part)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def validated(
    cls: type[M],
    gathered: Gathered,
    *,
    default_origin: str,
    shared: Mapping[str, str] | None = None,
    missing: Mapping[str, str] | None = None,
) -> M:
    """The settings that `gathered` holds. `shared`: keys that were filled from another one, to that one; `missing`:
    keys that another one could fill. Raises `SettingsError`, also with the problems that gathering found."""
    try:
        settings = cls.model_validate(gathered.tree)
    except ValidationError as error:
        problems = list(gathered.problems)
        for item in _errors(error):
            key = key_of(cls, item["loc"])
            names = (missing if item["type"] == "missing" else shared) or {}
            shown = next((names[one] + key.removeprefix(one) for one in _prefixes(key) if one in names), key)
            origin = next((gathered.origins[one] for one in _prefixes(key) if one in gathered.origins), default_origin)
            problem = _problem(cls, item, key, shown, origin)
            problems += [problem] if problem not in problems else []
        raise SettingsError(problems) from None
    if gathered.problems:
        raise SettingsError(gathered.problems)
    return settings


def _errors(error: ValidationError) -> list[Any]:
    """Pydantic's errors, but that a list is too short because of an error in a member."""
    every: list[Any] = error.errors(include_url=False)
    within = {item["loc"][:length] for item in every for length in range(len(item["loc"]))}
    return [item for item in every if item["type"] != "too_short" or item["loc"] not in within]


def _problem(cls: type[BaseModel], item: Any, key: str, shown: str, origin: str) -> Problem:
    """What pydantic says of a key, in our form."""
    if item["type"] == "missing":
        return Problem(origin=origin, key=shown, value=None, message=f"is required; set it in the file, or --{shown}")
    message = unknown(cls, key) if item["type"] == "extra_forbidden" else item["msg"]
    return Problem(origin=origin, key=shown, value=item["input"], message=message)


def load(cls: type[S], *, file: str | Path | None, arguments: Sequence[str] = ()) -> Loaded[S]:
    """Settings of one program from its YAML file, the environment and `--key value` arguments.

    Raises `SettingsError` with every problem: unknown keys, values of a wrong type or out of range, required keys
    that are missing, contradictions, and keys that would have no effect.
    """
    name = str(file) if file is not None else f"grpo-{cls.role}"
    gathered = Gathered()
    if file is not None:
        gathered.add(read_yaml(Path(file), f"{cls.role}."), name)
    given = split(cls, arguments)
    gathered = command_line(cls, given).over(environment(cls, {cls.env_prefix: ""}).over(gathered))
    for word in given.words:
        message = "unexpected argument; FILE.yaml comes first, and settings are given as --key value"
        gathered.problems.append(Problem(origin=COMMAND_LINE, key=word, value=word, message=message))
    loaded = Loaded(settings=validated(cls, gathered, default_origin=name), origins=gathered.origins, file=name)
    if problems := [loaded.problem(key, message) for key, message in all_conflicts(loaded.settings)]:
        raise SettingsError(problems)
    return loaded


def dump(settings: BaseModel) -> str:
    """The effective settings as YAML, defaults included."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text
