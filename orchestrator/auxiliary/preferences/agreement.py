"""Actions of teachers and of the policy: when two are the same, and which one teachers prefer."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo.orchestrator.endpoints import EndpointError

Tools = Sequence[Mapping[str, Any]] | None
"""Tools that could be called, in the OpenAI format; None: none."""
Judge = Callable[[str, str], Awaitable[bool]]
"""Returns whether two texts do the same. Raises EndpointError."""
SkipReason = Literal["all_disagree", "agrees_with_student", "too_few_answers", "tie", "empty", "judge_failed"]
"""Reasons why teachers prefer nothing.

- `all_disagree`: no action has enough teachers for it; `tie`: two actions have equally many, and none has more.
- `agrees_with_student`: teachers would have done what the policy did.
- `too_few_answers`: fewer teachers answered than must agree; `empty`: enough did, but too few with anything that could
  be preferred.
- `judge_failed`: the judge of which actions are the same did not answer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An answer. Example: ``Action(text="LOOKUP[cat]")``"""

    text: str
    """Its text without control tokens, calls that the policy writes included."""
    tool_calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Name and arguments of calls that an API gave apart from the text."""

    def written(self) -> str:
        """Returns the text and the calls, which Hermes and Qwen models write between <tool_call> and </tool_call>."""
        calls = [json.dumps({"name": name, "arguments": sent}, ensure_ascii=False) for name, sent in self.tool_calls]
        text = [self.text] if self.text else []
        return "\n".join([*text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


# --- the same words ---

_MINUS = str.maketrans("−‐‑–", "----")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_CALL = re.compile(r"(?<=<tool_call>).*?(?=</tool_call>|\Z)", re.DOTALL)
_WORD = re.compile(
    r"\d+(?:\.\d+)+|\.\d+|[^\W_]+"  # 3.5, .5, words and numbers
    r"|!=|(?<=\d)\s*\*+\s*(?=\d)"  # marks that are none of prose
    r"|(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})"  # a minus: any that is not between two words
    r"""|[^\w\s.,;:!?"'`´‘’“”«»…*-]"""  # what is no mark of prose, = and % for example
)


def words(text: str) -> list[str]:
    """Returns the words, numbers and signs of a text. White space, case, marks of prose and Markdown's stars,
    underscores and backticks make no difference, nor do commas between thousands, hyphens between words and the order
    of a call's arguments; signs, operators, points within numbers and brackets do.

    Example: ``"X = -1,000.5 %!"`` and ``"**x=-1000.5%**"`` are both ``["x", "=", "-", "1000.5", "%"]``
    """
    ordered = _CALL.sub(lambda call: _ordered(call[0]), text)
    plain = unicodedata.normalize("NFC", ordered).casefold().translate(_MINUS)
    plain = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), plain)
    return [word.strip() for word in _WORD.findall(plain)]


def _ordered(call: str) -> str:
    try:
        return json.dumps(json.loads(call), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return call


# --- agreement ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Teachers prefer one action to the policy's."""

    chosen: Action
    """The action of the first of the teachers that agree."""
    source: str
    """Who agrees: `2 of 3 teachers: a, b`."""
    score_gap: float = 1.0
    """The share of the teachers that would have done it less the share that would have done what the policy did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A turn gives no pair. Example: ``Skipped(reason="tie")``"""

    reason: str
    message: str = ""
    """More about it, for people."""


async def preferred(
    answers: Mapping[str, Action | None], student: Action, *, num_agreeing: int, judge: Judge | None = None
) -> Preference | Skipped:
    """Returns the action that most teachers agree on, where they are at least `num_agreeing` and the policy did another
    one. With `num_agreeing` 1 one teacher suffices, whatever the others did: more pairs, and noisier ones.

    `answers`: actions by teacher, None where one did not answer. Two are the same where their `words` are, or the
    `judge` says so; each is compared with the first of every group, because a judge's opinion is no equivalence.
    """
    received = {name: action for name, action in answers.items() if action is not None}
    usable = {name: action for name, action in received.items() if words(action.written())}
    if len(usable) < num_agreeing:
        return _skipped("empty" if len(received) >= num_agreeing else "too_few_answers")
    try:
        groups = await _groups(usable, judge)
        large = sorted((one for one in groups if len(one) >= num_agreeing), key=len, reverse=True)
        if not large:
            return _skipped("all_disagree")
        if num_agreeing > 1 and len(large) > 1 and len(large[0]) == len(large[1]):
            return _skipped("tie")
        for group in large if num_agreeing == 1 else large[:1]:
            if not await _same(usable[group[0]], student, judge):
                source = f"{len(group)} of {len(usable)} teachers: {', '.join(group)}"
                own = words(student.written())
                num_own = sum(words(action.written()) == own for action in usable.values())
                gap = (len(group) - num_own) / len(usable)
                return Preference(chosen=usable[group[0]], source=source, score_gap=gap)
    except EndpointError as error:
        return Skipped(reason="judge_failed", message=str(error))
    return _skipped("agrees_with_student")


def consensus(answers: Mapping[str, Action], student: Action) -> float:
    """Returns the share of the answers, at least one, that are the student's less the largest share that is one other
    action: 1 where all teachers would have done the same, -1 where all would have done one other thing. Two actions are
    the same where their `words` are."""
    own, found = words(student.written()), Counter(tuple(words(action.written())) for action in answers.values())
    same = found.pop(tuple(own), 0)
    return (same - max(found.values(), default=0)) / len(answers)


async def _groups(usable: Mapping[str, Action], judge: Judge | None) -> list[list[str]]:
    groups: list[list[str]] = []
    for name, action in usable.items():
        for group in groups:
            if await _same(usable[group[0]], action, judge):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


async def _same(one: Action, other: Action, judge: Judge | None) -> bool:
    if words(one.written()) == words(other.written()):
        return True
    return judge is not None and await judge(one.written(), other.written())


def _skipped(reason: SkipReason) -> Skipped:
    return Skipped(reason=reason)
