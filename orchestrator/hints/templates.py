"""Texts of hints by what went wrong, the built-in ones and the user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.importing import find
from orchestrator.rollouts.state import StepError

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


class HintsRefused(ValueError):
    """What was given for hints cannot be used."""


class HintTemplates:
    """Texts by `hint_template_key`, or else by `error_kind`, with PLACEHOLDERS in braces.

    Example: ``HintTemplates({"unknown_fruit": "There is fruit in {message}"})``
    """

    def __init__(self, texts: Mapping[str, str] = BUILT_IN) -> None:
        """Raises HintsRefused for a text that nothing can fill."""
        self._texts = dict(texts)
        for key, text in self._texts.items():
            _check(key, text)

    @classmethod
    def loaded(cls, location: str | None = None) -> "HintTemplates":
        """The built-in ones, replaced and extended by those at `location`: a YAML or JSON file of texts by key, or
        `module:NAME` or `path/to/file.py:NAME` of a mapping; null takes a built-in one away. Raises HintsRefused, and
        NotFound for a name that leads to nothing."""
        if location is None:
            return cls()
        own = _read(location)
        if not isinstance(own, Mapping) or not all(
            isinstance(key, str) and isinstance(text, str | None) for key, text in own.items()
        ):
            raise HintsRefused(f"hints.templates = {location!r}: expected a mapping of keys to texts, or to null")
        if unknown := [key for key, text in own.items() if text is None and key not in BUILT_IN]:
            raise HintsRefused(
                f"hints.templates = {location!r}: {unknown[0]!r} is null, and none of the built-in hints "
                f"{', '.join(BUILT_IN)}"
            )
        try:
            return cls({key: text for key, text in {**BUILT_IN, **own}.items() if text is not None})
        except HintsRefused as error:
            raise HintsRefused(f"hints.templates = {location!r}: {error}") from None

    def of(self, error: StepError) -> str | None:
        """None for an error that no text is for."""
        return self._texts.get(error.hint_template_key) or self._texts.get(error.error_kind)


def _check(key: str, text: str) -> None:
    """Raises HintsRefused for a text that is empty, and for placeholders that nothing fills."""
    if not text.strip():
        raise HintsRefused(f"the hint for {key!r} is empty; give a text, or null for no hint")
    try:
        text.format_map(dict.fromkeys(PLACEHOLDERS, ""))
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise HintsRefused(
            f"the hint for {key!r} cannot be filled ({type(error).__name__}: {error}); there are "
            f"{', '.join(f'{{{one}}}' for one in PLACEHOLDERS)}; write {{{{ and }}}} where it shall have braces"
        ) from None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise HintsRefused(f"the key {twice[0]} stands twice; merge the two")
        return super().construct_mapping(node, deep)


def _read(location: str) -> Any:
    if not location.endswith((".yaml", ".yml", ".json")):
        return find(location, setting="hints.templates")
    path = Path(location)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # JSON is YAML
    except FileNotFoundError:
        raise HintsRefused(f"hints.templates = {location!r}: no such file {path.absolute()}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise HintsRefused(f"hints.templates = {location!r} cannot be read: {error}") from error
