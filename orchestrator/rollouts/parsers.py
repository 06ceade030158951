"""Parsers of what a policy answers: its thinking, and the answer itself in one of the usual forms."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo.orchestrator.rollouts.state import Reply

BOX = "\\boxed{"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A completion taken apart.

    Example: ``Parsed(answer="5", thinking="2 + 3 …")`` of ``<think>2 + 3 …</think> So it is \\boxed{5}.``
    """

    answer: str | None
    """The answer, without white space around it; None where there is none of the parser's form."""
    thinking: str = ""
    """The text between the tags of thinking; empty where there is none."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """The texts by tag, of an `XMLParser`."""


class Parser:
    """Takes a completion apart into the thinking and all that follows it, which is the answer. Subclasses find the
    answer in one of the usual forms in what follows; a form of one's own overrides `find`.

    Thinking that is not over when the completion ends is followed by no answer.

    Example: ``Rubric([right], parser=Parser())``
    """

    def __init__(self, *, thinking: tuple[str, str] = ("<think>", "</think>")) -> None:
        """`thinking`: the tags around it. The first may stand in the completion, or at the end of what the model's chat
        template writes before it."""
        self._begin, self._end = thinking

    def parse(self, completion: str | Reply) -> Parsed:
        """Takes a completion apart. Of a text alone it cannot be told whether the chat template has begun the thinking;
        of a `Reply`, such as `state.last`, it can."""
        thinking, text = self._split(completion)
        fields = self.fields(text)
        return Parsed(answer=self.find(text, fields), thinking=thinking.strip(), fields=fields)

    def behind(self, completion: str | Reply) -> str:
        """Returns what follows the thinking, as it was written; empty where the thinking is not over."""
        return self._split(completion)[1]

    def _split(self, completion: str | Reply) -> tuple[str, str]:
        """The thinking, and what follows it."""
        text, opening = (completion, "") if isinstance(completion, str) else (completion.text, completion.opening)
        if opening.rfind(self._begin) > opening.rfind(self._end):
            text = self._begin + text
        before, ended, behind = text.rpartition(self._end)
        before, begun, thinking = (before if ended else text).partition(self._begin)
        thinking = thinking if begun or not ended else before
        return thinking, behind if ended else "" if begun else text

    def fields(self, text: str) -> Mapping[str, str]:
        """Returns the texts by tag in what follows the thinking."""
        return {}

    def find(self, text: str, fields: Mapping[str, str]) -> str | None:
        """Returns the answer in what follows the thinking; None where there is none of this form."""
        return text.strip() or None

    def follows_format(self, parsed: Parsed) -> float:
        """A reward function: 1 where the answer has the parser's form."""
        return float(parsed.answer is not None)


class BoxedParser(Parser):
    """Finds what stands in the last `\\boxed{…}`, as mathematicians' models are asked to answer."""

    def find(self, text: str, fields: Mapping[str, str]) -> str | None:
        _, found, inner = text.rpartition(BOX)
        depth = 1
        for place, letter in enumerate(inner if found else ""):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if not depth:
                return inner[:place].strip() or None
        return None


class XMLParser(Parser):
    """Finds texts between tags; the answer is that of the last tag named.

    Example: ``XMLParser("reasoning", "answer")`` of ``<reasoning>2 + 3</reasoning><answer>5</answer>``
    """

    def __init__(self, *tags: str, thinking: tuple[str, str] = ("<think>", "</think>")) -> None:
        """Of a tag that stands there several times the last one counts. Raises ValueError for what is no name."""
        super().__init__(thinking=thinking)
        if not tags or not all(re.fullmatch(r"[A-Za-z_][\w.-]*", tag) for tag in tags):
            raise ValueError(f"the tags are {tags}, expected names, such as 'answer'")
        self.tags = tags

    def fields(self, text: str) -> Mapping[str, str]:
        found = {}
        for tag in self.tags:
            before, closed, _ = text.rpartition(f"</{tag}>")
            _, opened, inner = before.rpartition(f"<{tag}>")
            if closed and opened:
                found[tag] = inner.strip()
        return found

    def find(self, text: str, fields: Mapping[str, str]) -> str | None:
        return fields.get(self.tags[-1]) or None

    def follows_format(self, parsed: Parsed) -> float:
        """A reward function: 1 where each tag is there, and the answer is not empty."""
        return float(parsed.answer is not None and len(parsed.fields) == len(self.tags))


class MarkerParser(Parser):
    """Finds the text behind the last marker, to the end of its line.

    Example: ``MarkerParser("####")`` of ``2 + 3 is 5, so\\n#### 5``
    """

    def __init__(
        self, marker: str, *, pattern: str = r"[^\n]+", thinking: tuple[str, str] = ("<think>", "</think>")
    ) -> None:
        """`pattern`: a regular expression of the answer; a marker that is not followed by it does not count."""
        super().__init__(thinking=thinking)
        if not marker:
            raise ValueError("the marker is empty, expected a text, such as '####'")
        self.marker, self._pattern = marker, re.compile(rf"\s*({pattern})")

    def find(self, text: str, fields: Mapping[str, str]) -> str | None:
        place = len(text)
        while (place := text.rfind(self.marker, 0, place)) >= 0:
            if found := self._pattern.match(text, place + len(self.marker)):
                return found[1].strip() or None
        return None
