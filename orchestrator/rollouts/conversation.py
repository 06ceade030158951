"""A conversation that keeps the tokens it sampled.

What the policy sampled is never decoded and tokenized again. What comes after it (the end of its turn, messages of
others, the opening of its next turn) is tokenized alone and appended. Where the template would write the conversation
so far differently than it stands in the row, the row ends, and a new one begins from the conversation as the template
writes it now.

Legend: `L` tokens of one row.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from grpo.orchestrator.rollouts.records import TrainingRow, Turn, add_versions, opening_at
from grpo.orchestrator.rollouts.templates import ChatTemplate
from grpo.transport.http import Choice

ChatMessage = Mapping[str, Any]
"""`{"role": "tool", "content": "42"}`, with what else the template reads."""


@dataclass(slots=True)
class _Row:
    """A row while it grows."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    turns: list[Turn] = field(default_factory=list)
    answers: list[tuple[Choice, float]] = field(default_factory=list)
    """Each turn's completion and temperature."""
    versions: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        before: "array[int]",
        completion: Choice,
        *,
        index: int,
        opening: Sequence[int],
        version: int,
        temperature: float,
    ) -> None:
        """Adds an answer, and the tokens before it. Raises ValueError if the completion contradicts itself."""
        add_versions(self.versions, completion, requested=version, num_before=len(before))
        self.token_ids.extend(before)
        opens, begins = opening_at(self.token_ids, opening), len(self.token_ids)
        self.token_ids.frombytes(completion.token_ids.tobytes())
        ends, finish_reason = len(self.token_ids), completion.finish_reason
        self.turns.append(Turn(index=index, opens=opens, begins=begins, ends=ends, finish_reason=finish_reason))
        self.answers.append((completion, temperature))

    def take_back(self) -> None:
        """Removes the newest answer and the tokens before it."""
        self.turns.pop()
        self.answers.pop()
        length = self.turns[-1].ends if self.turns else 0
        num, self.token_ids = len(self.token_ids) - length, self.token_ids[:length]
        while num:
            version, count = self.versions.pop()
            if count > num:
                self.versions.append((version, count - num))
            num -= min(num, count)

    def finished(self, steps: tuple[int, ...]) -> TrainingRow:
        length = len(self.token_ids)
        sampled = np.zeros(length, np.bool_)
        logprobs, temperatures = np.zeros(length, np.float32), np.empty(length, np.float32)
        start = 0
        for turn, (completion, temperature) in zip(self.turns, self.answers, strict=True):
            sampled[turn.begins : turn.ends] = True
            logprobs[turn.begins : turn.ends] = completion.logprobs
            temperatures[start : turn.ends] = temperature
            start = turn.ends
        return TrainingRow(
            token_ids=np.array(self.token_ids, np.int32),
            sampled=sampled,
            logprobs=logprobs,
            temperatures=temperatures,
            versions=tuple(self.versions),
            turns=tuple(self.turns),
            steps=steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Next:
    """The tokens and the text that follow the newest answer."""

    token_ids: "array[int]"
    """The tokens that follow in the row, or the whole prompt of a new row."""
    new_row: bool
    text: str
    """All of the conversation as the template writes it, up to where the policy answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTexts:
    """An answer of the policy as text."""

    plain: str
    """Without control tokens."""
    raw: str
    """With all of them."""
    content: str
    """`raw` without the control token that ended it."""
    end_id: int | None
    """The control token that ended it; None where it was cut short."""


class Conversation:
    """The policy's side of a conversation: its prompts, and what it sampled.

    Example::

        conversation = Conversation(template, [{"role": "user", "content": "What is 2 + 3?"}])
        completion = sample(conversation.prompt_ids())
        conversation.answer(completion, version=7, temperature=1.0)
        conversation.add({"role": "user", "content": "Are you sure?"})
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[ChatMessage]) -> None:
        """`messages` come before the first answer."""
        if not messages:
            raise ValueError("a conversation without messages asks the policy nothing; give at least one message")
        self._template = template
        self._messages: list[ChatMessage] = list(messages)
        self._raw = ""
        """The newest answer as text, control tokens included."""
        self._end_id: int | None = None
        """The control token that ended it; None where it was cut short."""
        self._rows = [_Row()]
        self._next: _Next | None = None
        self._text = ""
        """The text before the newest answer, as the template wrote it."""
        self.calls: list[int] = []
        """The caller's number for each answer of the policy."""

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All messages so far, the policy's answers included, these as text with their control tokens, but for the
        one that ended them."""
        return tuple(self._messages)

    @property
    def num_characters(self) -> int:
        """Characters of the conversation as the template wrote it, up to the newest answer's end."""
        return len(self._text) + len(self._raw)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """The tools that the policy may call; None if it has none."""
        return self._template.tools

    @property
    def opening(self) -> str:
        """The text that opens the policy's turn."""
        return self._template.opening

    def add(self, *messages: ChatMessage) -> None:
        """Messages of anyone but the policy."""
        self._messages += messages
        self._next = None

    def prompt_ids(self) -> "array[int]":
        """Returns the token ids that the server continues. Raises TemplateRefused."""
        following = self._following()
        before = array("i") if following.new_row else self._rows[-1].token_ids
        return before + following.token_ids

    def texts_of(self, completion: Choice) -> AnswerTexts:
        """Returns an answer to `prompt_ids` as text. It changes nothing, so that a thread may call it."""
        renderer, ids = self._template.renderer, completion.token_ids
        last = ids[-1] if len(ids) else None
        ended = last is not None and (
            last == self._template.end_id or (completion.finish_reason == "stop" and renderer.is_special(last))
        )
        said, raw = ids[:-1] if ended else ids, renderer.raw_text(ids)
        content = renderer.raw_text(said) if ended else raw
        return AnswerTexts(
            plain=content if renderer.is_plain(said) else renderer.texts([completion])[0],
            raw=raw,
            content=content,
            end_id=int(last) if ended and last is not None else None,
        )

    def answer(
        self,
        completion: Choice,
        *,
        version: int,
        temperature: float,
        call: int = -1,
        texts: AnswerTexts | None = None,
    ) -> str:
        """Adds the policy's answer to `prompt_ids`; `version` is the one that was asked for, `call` the caller's
        number, `texts` what `texts_of` has returned for it. Returns its text without control tokens. Raises ValueError
        where the completion contradicts itself."""
        following = self._following()
        if following.new_row and self._rows[-1].turns:
            self._rows.append(_Row())
        self._rows[-1].add(
            following.token_ids,
            completion,
            index=len(self.calls),
            opening=self._template.opening_ids,
            version=version,
            temperature=temperature,
        )
        self.calls.append(call)
        texts = texts or self.texts_of(completion)
        self._end_id, self._raw = texts.end_id, texts.raw
        self._messages.append({"role": "assistant", "content": texts.content})
        self._text, self._next = following.text, None
        return texts.plain

    def take_back(self) -> None:
        """Takes the newest answer out of what is trained. The conversation must not go on."""
        self._rows[-1].take_back()
        self.calls.pop()

    def rows(self, steps: Mapping[int, int] | None = None) -> list[TrainingRow]:
        """Returns what was sampled so far, for training; none before the first answer. Messages after the newest answer
        are in no row. `steps`: the index of each call's step in its rollout."""
        return [
            row.finished(tuple(steps[self.calls[turn.index]] for turn in row.turns) if steps else ())
            for row in self._rows
            if row.turns
        ]

    # --- how it goes on ---

    def _following(self) -> _Next:
        """The row goes on where the template writes what stands in it; otherwise all of the conversation is the prompt
        of a new one."""
        if self._next is None:
            if self.calls:
                before, text = self._text, self._template.render(self._messages)
                goes_on = text.startswith(before) and text.startswith(self._raw, len(before))
                renderer, written = self._template.renderer, len(before) + len(self._raw)
                ended = "" if self._end_id is None else renderer.raw_text([self._end_id])
                ids = array("i", renderer.ids_behind(ended, text[written:]) if goes_on else renderer.ids_of(text))
            else:
                goes_on, (text, ids) = False, self._template.begin(self._messages)
            if not (ids or goes_on):
                raise ValueError("the model's chat template makes nothing of the conversation, expected a prompt")
            self._next = _Next(token_ids=ids, new_row=not goes_on, text=text)
        return self._next
