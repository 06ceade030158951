"""Texts of hints by what went wrong, the built-in ones and the user's own."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from configs.loading import read_yaml
from orchestrator.rollouts.state import StepError
from transport.importing import find

Texts = Mapping[str, str]
"""By `hint_template_key` or `error_kind`, with PLACEHOLDERS in braces.
Example: ``{"unknown_fruit": "There is fruit in {message}"}``"""

BUILT_IN: Texts = {
    "unclosed_call": "Close every tool call that you open. {message}",
    "malformed_json": "A tool call must be valid JSON. {message}",
    "malformed_call": "A tool call must have the form that was asked for. {message}",
    "unknown_tool": "Call only tools that there are, by their exact names. {message}",
    "wrong_arguments": "Give a tool exactly the arguments that it takes. {message}",
    "tool_timeout": "Ask the tool for less at a time. {message}",
    "tool_error": "Mind what the tool can do. Called as before, it fails: {message}",
    "unknown_word": "Look up only words that stand in the question, spelled as there. {message}",
    "malformed_action": "Answer with an action in the form that was asked for. {message}",
    "refused_action": "Choose an action that is allowed here. {message}",
}
"""By the kinds of errors that built-in environments mark."""

PLACEHOLDERS = ("message", "error_kind", "hint_template_key", "answer")
"""What the environment said; the marked kind and key; what the policy answered."""


def load_templates(location: str | None) -> Texts:
    """The built-in texts, replaced and extended by those at `location`: a YAML or JSON file of texts by key, or
    `module:NAME` or `path/to/file.py:NAME` of a mapping; null takes a built-in one away. Raises ValueError."""
    if location is None:
        return BUILT_IN
    file = location.endswith((".yaml", ".yml", ".json"))  # JSON is YAML
    given = read_yaml(Path(location)) if file else find(location, setting="hints.templates")
    try:
        own = TypeAdapter(dict[str, str | None]).validate_python(given)
        if unknown := [key for key, text in own.items() if text is None and key not in BUILT_IN]:
            raise ValueError(f"{unknown[0]!r} is null, and none of the built-in hints {', '.join(BUILT_IN)}")
        texts = {key: text for key, text in {**BUILT_IN, **own}.items() if text is not None}
        for key, text in texts.items():
            _check(key, text)
    except ValueError as error:
        raise ValueError(f"hints.templates = {location!r}: {error}") from error
    return texts


def template_of(texts: Texts, error: StepError) -> str | None:
    """None for an error that no text is for."""
    return texts.get(error.hint_template_key) or texts.get(error.error_kind)


def _check(key: str, text: str) -> None:
    """Raises ValueError for a text that is empty, and for placeholders that nothing fills."""
    try:
        filled = text.format_map(dict.fromkeys(PLACEHOLDERS, "x")).strip()
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"the hint for {key!r} cannot be filled ({type(error).__name__}: {error}); there are "
            f"{', '.join(f'{{{one}}}' for one in PLACEHOLDERS)}; write {{{{ and }}}} where it shall have braces"
        ) from None
    if not filled:
        raise ValueError(f"the hint for {key!r} is empty; give a text, or null for no hint")
