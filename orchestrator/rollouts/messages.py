"""Chat messages as user code passes them: what they must be, and copies that nobody changes later; and what models
answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_FIELD = 2000
"""Longest text of an example's field that is kept for traces."""
MAX_FIELDS = 16
Message = Mapping[str, Any]
"""`{"role": "user", "content": "hi"}`, with what else the model's chat template reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponse:
    """An answer with what the server tells of it."""

    text: str
    tokens: tuple[tuple[str, float], ...] = ()
    """Each sampled token as text with its log-probability (natural log), where the server gives them."""
    token_ids: tuple[int, ...] = ()
    """Ids of the same tokens, where the server gives them, as `grpo-infer` does."""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of calls that came apart from the text; the arguments are, as they were sampled, JSON or not.
    """
    version: int | None = None
    """The policy version that was live when it was asked; None where the server is no `grpo-infer`."""


def fields_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first fields of an example other than its prompt, as traces show them: numbers and short texts
    as they are, anything else as text, cut at `MAX_FIELD` characters."""
    return {str(name): _shown(value) for name, value in [*example.items()][: MAX_FIELDS + 1] if name != "prompt"}


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    except Exception:  # an object of the user's, of which nothing but the trace wants to know
        text = f"a {type(value).__name__}"
    text = text if len(text) <= MAX_FIELD else f"{text[:MAX_FIELD]}…"
    return text.encode("utf-8", "replace").decode()


def messages_of(example: Mapping[str, Any], index: int | None = None) -> list[dict[str, str]]:
    """Returns the prompt of an example as chat messages. Raises ValueError that says what an example must look like."""
    prompt, which = example.get("prompt"), "an example" if index is None else f"example {index}"
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif (
        isinstance(prompt, Sequence)
        and prompt
        and all(
            isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in prompt
        )
    ):
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    else:
        raise ValueError(
            f"{which} has prompt = {prompt!r}, expected a text or a list of messages with role and content"
        )
    if not all(is_text(text) for message in messages for text in message.values()):
        raise ValueError(
            f"{which} has prompt = {prompt!r}, in which there is half of a surrogate pair, expected whole characters; "
            "mend it where the text was cut, or leave the example out"
        )
    return messages


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns copies of messages. Raises ValueError for what cannot be shown to a model."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f'a {type(messages).__name__} was given for messages, expected a list such as [{{"role": "user", '
            '"content": "hi"}]'
        )
    if not messages:
        raise ValueError("no messages were given; give at least one, or nothing is asked")
    return [_checked(message, index) for index, message in enumerate(messages)]


def plain(value: Any, what: str) -> Any:
    """Returns a copy of `value` as plain data. Raises ValueError with what it is where JSON cannot hold it."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
        msgspec.msgpack.encode(copy)  # no half of a surrogate pair, no integer of more than 64 bits
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{what} cannot be sent: {error}; make it of texts, finite numbers, lists and dicts") from None
    return copy


def _checked(message: Message, index: int) -> dict[str, Any]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str | list | None) or len(message) < 2:
        raise ValueError(
            f"message {index} is {message!r}, expected a dict with role and content, such as "
            '{"role": "user", "content": "hi"}'
        )
    if len(message) == 2 and isinstance(content, str) and is_text(content):
        return {"role": role, "content": content}
    copy: dict[str, Any] = plain(dict(message), f"message {index}, of {role},")
    return copy | ({"content": text_of(content)} if isinstance(content, list) else {})


def shown(value: object) -> str:
    """Returns the beginning of a value's `repr`, for a message: there are integers that are too long for one, and
    objects whose own raises."""
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may come in parts: as one, because a control token could be
    spelled over several. Raises ValueError for what is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError(
        f"a message's content is {str(content)[:200]}, expected text; images and sound cannot be trained on"
    )


def num_characters(value: object) -> int:
    """Returns how many there are in all texts of plain data."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + num_characters(one) for key, one in value.items())
    return sum(map(num_characters, value)) if isinstance(value, list | tuple) else 0


def is_text(content: str) -> bool:
    """Tells whether it has no half of a surrogate pair."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True
