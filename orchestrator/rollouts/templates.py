"""Facts about the model's chat template that conversations need: how a turn opens and ends."""

import functools
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.orchestrator.renderer import MAX_CHARACTERS_AT_ONCE, ChatRenderer

_PROBE = "probe-of-an-answer"
MAX_KNOWN = 256
"""Sets of tools whose template is kept: about 2 KiB each."""
NUM_BEGUN = 512
"""Beginnings of conversations whose text and ids are kept, where they are short."""


class TemplateRefused(ValueError):
    """The model's chat template does not take a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A renderer with the facts about its template.

    Example: of ChatML, ``opening="<|im_start|>assistant\\n"``, ``end_id`` that of ``<|im_end|>``.
    """

    renderer: ChatRenderer
    tools: tuple[Mapping[str, Any], ...] | None
    """The tools that the policy may call, in the OpenAI format; None if it has none."""
    opening: str
    """The text that opens the policy's turn; empty where there is none, or it cannot be told."""
    opening_ids: tuple[int, ...]
    """The opening as token ids."""
    end_id: int | None
    """The control token that follows an answer; None where plain text does."""
    _begun: OrderedDict[object, tuple[str, "array[int]"]] = field(
        default_factory=OrderedDict, repr=False, compare=False
    )
    """Text and ids by messages, those that were asked for last at the end."""

    @classmethod
    def of(cls, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]] | None = None) -> "ChatTemplate":
        """Looks at the template once. Raises TemplateRefused where it takes no question with its answer."""
        kept, question = None if tools is None else tuple(tools), {"role": "user", "content": "x"}
        try:
            closed, opened = renderer.closed_and_opened([question], tools=kept)
            messages = [question, {"role": "assistant", "content": _PROBE}, question]
            _, found, ending = renderer.render(messages, tools=kept, opened=True).rpartition(_PROBE)
        except Exception as error:  # templates are code: they add texts to what is none, for example
            raise TemplateRefused(
                f"the model's chat template does not take a user's message and an answer to it: {error}; use a model "
                "whose template does"
            ) from error
        opening = opened[len(closed) :] if opened.startswith(closed) else ""
        after = renderer.ids_of(ending) if found else []
        return cls(
            renderer=renderer,
            tools=kept,
            opening=opening,
            opening_ids=tuple(renderer.ids_of(opening)),
            end_id=after[0] if after and renderer.is_special(after[0]) else None,
        )

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation and the opening of the policy's turn. Raises TemplateRefused."""
        try:
            return self.renderer.render(messages, tools=self.tools, opened=True)
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise TemplateRefused(
                f"the model's chat template does not take messages of the roles {roles}: {error}; order them as the "
                "template expects, or use a model whose template takes them"
            ) from error

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, "array[int]"]:
        """The conversation and the opening of the policy's turn as text, and its ids, which are not to be changed. Many
        rollouts begin alike, and a game's positions come again and again: what was rendered lately is not rendered
        anew. Raises TemplateRefused."""
        key: object = tuple(tuple(message.items()) for message in messages)
        try:
            found = self._begun.pop(key, None)
        except TypeError:  # a list or a mapping in a message
            key, found = None, None
        if found is None:
            text = self.render(messages)
            found = text, array("i", self.renderer.ids_of(text))
        if key is not None and len(found[0]) <= MAX_CHARACTERS_AT_ONCE:
            self._begun[key] = found
            if len(self._begun) > NUM_BEGUN:
                self._begun.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTemplate(ChatTemplate):
    """No template: texts one after the other, for who writes prompts with control tokens themselves."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(message["content"] for message in messages)


class Templates:
    """The model's chat template, looked at once for each set of tools that was asked for lately."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._with_tools = functools.lru_cache(maxsize=MAX_KNOWN)(self._look)

    @functools.cached_property
    def raw(self) -> ChatTemplate:
        """Texts as they stand."""
        return RawTemplate(renderer=self.renderer, tools=None, opening="", opening_ids=(), end_id=None)

    @functools.cached_property
    def plain(self) -> ChatTemplate:
        """The template without tools; `raw` if it takes no question with its answer."""
        try:
            return self.of(None)
        except TemplateRefused:
            return self.raw

    def of(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Returns the template with these tools, whose texts cannot end a turn. Raises TemplateRefused."""
        return self._with_tools(json.dumps(tools))

    def _look(self, written: str) -> ChatTemplate:
        tools = json.loads(written)
        harmless = None if tools is None else [self.renderer.without_control(tool) for tool in tools]
        return ChatTemplate.of(self.renderer, harmless)
