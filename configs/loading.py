"""Loading the settings of one program, with the origin of every value.

Precedence, highest first: command line, environment, YAML file, default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.common import ProcessSettings, all_conflicts
from configs.errors import Problem, SettingsError
from configs.keys import key_of, unknown
from configs.sources import Gathered, Given, command_line, environment, nearest, read_yaml, split

S = TypeVar("S", bound=ProcessSettings)
M = TypeVar("M", bound=BaseModel)
PROGRAMS = ("train", "infer", "orch", "teacher")
"""The sections of a run's file that hold settings of one program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[S]):
    """Settings of a program together with where each value came from."""

    settings: S
    given: Mapping[str, Given]
    """Dotted key of every value that was set, to how it was set."""
    file: str
    """Name of the YAML file, or of the program where there was none."""
    prefix: str = ""
    """What the user puts before the keys that were not set: `train.` in the file of a run."""

    def problem(self, key: str, message: str) -> Problem:
        """A problem with `key` of these settings."""
        return Problem(
            origin=self.origin(key), key=self.shown(key), value=value_at(self.settings, key), message=message
        )

    def origin(self, key: str) -> str:
        """Where the value of `key` came from."""
        return self._given(key).origin

    def shown(self, key: str) -> str:
        """What the user calls `key`."""
        return self._given(key).key

    def _given(self, key: str) -> Given:
        return nearest(self.given, key) or Given(f"{self.file} (default)", self.prefix + key)


def value_at(settings: BaseModel, key: str) -> object:
    """The value of a dotted key; `env.0.id` reaches into lists. Raises AttributeError where another `type` has it."""
    value: Any = settings
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else getattr(value, part)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def validated(cls: type[M], gathered: Gathered, *, default_origin: str, missing: Mapping[str, str] | None = None) -> M:
    """The settings that `gathered` holds. `missing`: keys that another one could fill, to that one. Raises
    `SettingsError`, also with the problems that gathering found."""
    try:
        settings = cls.model_validate(gathered.tree)
    except ValidationError as error:
        problems = list(gathered.problems)
        for item in _errors(error):
            key = key_of(cls, item["loc"])
            shown = (missing or {}).get(key, key) if item["type"] == "missing" else key
            given = nearest(gathered.given, key) or Given(default_origin, shown)
            problem = _problem(cls, item, key, given)
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


def _problem(cls: type[BaseModel], item: Any, key: str, given: Given) -> Problem:
    """What pydantic says of a key, in our form."""
    value, message = item["input"], item["msg"]
    if item["type"] == "missing":
        value, message = None, f"is required; set it in the file, or --{given.key}"
    elif item["type"] == "extra_forbidden":
        message = unknown(cls, key)
    return Problem(origin=given.origin, key=given.key, value=value, message=message)


def load(cls: type[S], *, file: str | Path | None, arguments: Sequence[str] = ()) -> Loaded[S]:
    """Settings of one program from its YAML file, the environment and `--key value` arguments.

    Raises `SettingsError` with every problem: unknown keys, values of a wrong type or out of range, required keys
    that are missing, contradictions, and keys that would have no effect.
    """
    name = str(file) if file is not None else f"grpo-{cls.role}"
    gathered = Gathered()
    if file is not None:
        gathered.add(read_yaml(Path(file), f"{cls.role}."), name)
    gathered = command_line(cls, *split(cls, arguments)).over(environment(cls, {cls.env_prefix: ""}).over(gathered))
    loaded = Loaded(settings=validated(cls, gathered, default_origin=name), given=gathered.given, file=name)
    if problems := [loaded.problem(key, message) for key, message in all_conflicts(loaded.settings)]:
        raise SettingsError(problems)
    return loaded


def dump(settings: BaseModel) -> str:
    """The effective settings as YAML, defaults included."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text
