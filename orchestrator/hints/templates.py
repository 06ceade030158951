"""Texts of hints by what went wrong, the built-in ones and the user's own."""

import difflib
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.episodes.state import StepError
from orchestrator.importing import find

BUILT_IN: Mapping[str, str] = {
    "unclosed_call": "Close every tool call that you open. {message}",
    "malformed_json": "A tool call must be valid JSON. {message}",
    "malformed_call": "A tool call must have the form that was asked for. {message}",
    "unknown_tool": "Call only tools that there are, by their exact names. {message}",
    "wrong_arguments": "Give {tool} exactly the arguments that it takes. {message}",
    "tool_timeout": "Ask {tool} for less at a time. {message}",
    "tool_error": "Mind what {tool} can do. Called as before, it fails: {message}",
    "unknown_word": "Look up only words that stand in the question, spelled as there. {message}",
    "malformed_action": "Answer with an action in the form that was asked for. {message}",
    "refused_action": "Choose an action that is allowed here. {message}",
}
"""By the kinds of errors that built-in environments mark."""

PLACEHOLDERS = ("message", "error_kind", "hint_template_key", "tool", "answer", "role", "env", "turn")
"""What the environment said; the marked kind and key; the tool that was called; what the policy answered; who it was;
the environment's label; the answer's number in its conversation, from 1."""

_SUFFIXES = (".yaml", ".yml", ".json")


class HintsRefused(ValueError):
    """What was given for hints cannot be used."""


@dataclass(frozen=True, slots=True)
class HintTemplate:
    """A text with placeholders. Example: ``HintTemplate("words", "Spell words as in the question. {message}")``"""

    key: str
    text: str

    def __post_init__(self) -> None:
        """Raises HintsRefused for placeholders that nothing fills."""
        if not self.text.strip():
            raise HintsRefused(f"the hint for {self.key!r} is empty; give a text, or null for no hint")
        try:
            parts = list(string.Formatter().parse(self.text))
        except ValueError as error:
            raise HintsRefused(
                f"the hint for {self.key!r} cannot be read: {error}; write {{{{ and }}}} where it shall have braces"
            ) from None
        for _, name, spec, conversion in parts:
            if name is None:
                continue
            if name not in PLACEHOLDERS or spec or conversion:
                written = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                raise HintsRefused(
                    f"the hint for {self.key!r} has the placeholder {{{written}}}{_close(name, PLACEHOLDERS)}; there "
                    f"are {', '.join(f'{{{one}}}' for one in PLACEHOLDERS)}; write {{{{ and }}}} where it shall have "
                    "braces"
                )

    def filled(self, fields: Mapping[str, str]) -> str:
        """The text with a value for each of PLACEHOLDERS."""
        return self.text.format_map(fields).strip()


class HintTemplates:
    """Texts by `hint_template_key`, or else by `error_kind`.

    Example: ``HintTemplates.loaded("hints.yaml")`` of a file that has ``unknown_fruit: "There is fruit in {message}"``
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._templates = {key: HintTemplate(key, text) for key, text in texts.items()}

    @classmethod
    def loaded(
        cls, location: str | None = None, *, setting: str = "templates", keys: Iterable[str] | None = None
    ) -> "HintTemplates":
        """The built-in ones, replaced and extended by those at `location`: a YAML or JSON file of texts by key, or
        `module:NAME` or `path/to/file.py:NAME` of a mapping. A key without text, null, takes a built-in one away.

        `setting` is the name of what gave the location. `keys` are all that environments mark, where that is known:
        then texts for others are errors. Raises HintsRefused, and NotFound for a name that leads to nothing.
        """
        own = {} if location is None else _checked(_read(location, setting), f"{setting} = {location!r}")
        if missing := sorted(key for key, text in own.items() if text is None and key not in BUILT_IN):
            raise HintsRefused(
                f"{setting} = {location!r} takes away {missing[0]!r}{_close(missing[0], BUILT_IN)}, which is none of "
                f"the built-in hints {', '.join(BUILT_IN)}"
            )
        if keys is not None:
            known = {*keys, *BUILT_IN}
            if unknown := sorted(own.keys() - known):
                raise HintsRefused(
                    f"{setting} = {location!r} has a hint for {unknown[0]!r}{_close(unknown[0], known)}, which no "
                    f"environment marks; they mark {', '.join(sorted(known))}"
                )
        try:
            return cls({key: text for key, text in {**BUILT_IN, **own}.items() if text is not None})
        except HintsRefused as error:
            raise HintsRefused(f"{setting} = {location!r}: {error}") from None

    @property
    def keys(self) -> Sequence[str]:
        """All that have a text."""
        return tuple(self._templates)

    def of(self, error: StepError) -> HintTemplate | None:
        """None for an error that no text is for."""
        return self._templates.get(error.hint_template_key) or self._templates.get(error.error_kind)


def _read(location: str, setting: str) -> Any:
    if not location.endswith(_SUFFIXES):
        return find(location, setting=setting)
    path = Path(location)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, _UniqueKeys)
    except FileNotFoundError:
        raise HintsRefused(f"{setting} = {location!r}: no such file {path.absolute()}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise HintsRefused(f"{setting} = {location!r} cannot be read as {kind}: {error}") from error


def _checked(own: Any, where: str) -> dict[str, str | None]:
    if not isinstance(own, Mapping):
        raise HintsRefused(f"{where} is a {type(own).__name__}, expected a mapping of keys to texts")
    for key, text in own.items():
        if not isinstance(key, str) or not key:
            raise HintsRefused(f"{where} has the key {key!r}, expected an error's hint_template_key or error_kind")
        if not isinstance(text, str | None):
            raise HintsRefused(f"{where} has a {type(text).__name__} for {key!r}, expected a text, or null for no hint")
    return dict(own)


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is no text; put it in quotes")
        if key in made:
            raise ValueError(f"the key {key} stands twice; merge the two")
        made[key] = value
    return made


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently drop the first."""


def _unique_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[str, Any]:
    return _unique(tuple(loader.construct_object(part, deep=True) for part in pair) for pair in node.value)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _close(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
