"""What a teacher or the policy did in a state, when two of them did the same, and what teachers prefer."""

import json
import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.endpoints import EndpointError

Tools = Sequence[Mapping[str, Any]] | None
"""What could be called, in the OpenAI format; None: nothing that anybody was told of."""
Judge = Callable[[str, str], Awaitable[bool]]
"""Says whether two texts do the same. Raises EndpointError."""
AgreementName = Literal["exact", "normalised", "tool_calls", "judge"]
SkipReason = Literal["all_disagree", "agrees_with_student", "too_few_answers", "tie", "empty", "judge_failed"]
"""Why teachers prefer nothing.

- `all_disagree`: no action has enough teachers for it; `tie`: two actions have equally many, and none has more.
- `agrees_with_student`: teachers would have done what the policy did.
- `too_few_answers`: fewer teachers answered than must agree; `empty`: enough did, but too few with anything that could
  be preferred.
- `judge_failed`: whoever says which actions are the same did not say.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call that an API gave apart from the text. Example: ``Call(name="look_up", arguments={"word": "cat"})``"""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An answer. Example: ``Action(text="LOOKUP[cat]")``"""

    text: str
    """Without control tokens; calls that the policy writes are in it."""
    tool_calls: tuple[Call, ...] = ()
    """Calls that are not in the text."""

    def written(self) -> str:
        """The text, and the calls as Hermes and Qwen models write them, between <tool_call> and </tool_call>."""
        calls = (
            json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in self.tool_calls
        )
        text = [self.text] if self.text else []
        return "\n".join([*text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


# --- the same text ---

_MINUS = str.maketrans("−‐‑–", "----")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_WORD = re.compile(
    r"\d+(?:\.\d+)+|\.\d+|[^\W_]+"  # 3.5, .5, words and numbers
    r"|!=|(?<=\d)\s*\*+\s*(?=\d)"  # marks that are none of prose
    r"|(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})"  # a minus: any that is not between two words
    r"""|[^\w\s.,;:!?"'`´‘’“”«»…*-]"""  # what is no mark of prose, = and % for example
)


def words(text: str) -> list[str]:
    """The words, numbers and signs of a text. White space, case, marks of prose and Markdown's stars, underscores and
    backticks make no difference, nor do commas between thousands and hyphens between words; signs, operators, points
    within numbers and brackets do.

    Example: ``"X = -1,000.5 %!"`` and ``"**x=-1000.5%**"`` are both ``["x", "=", "-", "1000.5", "%"]``
    """
    plain = unicodedata.normalize("NFC", text).casefold().translate(_MINUS)
    plain = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), plain)
    return [word.strip() for word in _WORD.findall(plain)]


# --- the same calls ---

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def calls_of(action: Action, tools: Tools) -> list[Any] | None:
    """[name, arguments with defaults] of each call, those written in the text first. None where one cannot be made: no
    JSON, a tool that there is not, an argument that is missing or that the tool does not take."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools or ()}
    calls = []
    try:
        written = [json.loads(found) for found in _TAGGED.findall(action.text)]
        for call in [*written, *({"name": one.name, "arguments": one.arguments} for one in action.tool_calls)]:
            about, given = schemas[call["name"]], call.get("arguments") or {}
            takes = about.get("properties", {})
            defaults = {name: one["default"] for name, one in takes.items() if "default" in one}
            if not set(about.get("required", ())) <= given.keys() <= takes.keys():
                return None
            calls.append([call["name"], {**defaults, **{name: _by_value(value) for name, value in given.items()}}])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return calls


def _by_value(value: Any) -> Any:
    """2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# --- agreement ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """When two actions are the same. Example: ``Agreement(name="normalised")``"""

    name: AgreementName
    """`exact`: letter by letter; `normalised`: the same `words`; `tool_calls`: the same calls in the same order,
    whatever is said around them, or without calls the same `words`; `judge`: letter by letter, or `judge` says so."""
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if (self.name == "judge") != (self.judge is not None):
            raise ValueError(
                f"agreement is {self.name!r} with judge {self.judge!r}; the agreement judge alone takes one"
            )

    def key(self, action: Action, tools: Tools) -> str | None:
        """What is compared; None for an action that says nothing, which is the same as no other."""
        if self.name == "tool_calls":
            if (calls := calls_of(action, tools)) is None:
                return None
            if calls:
                return json.dumps(calls, sort_keys=True)
        if self.name in ("normalised", "tool_calls"):
            return " ".join(words(action.written())) or None
        written = action.written()
        return written if written.strip() else None

    async def same(self, one: Action, other: Action, tools: Tools) -> bool:
        """Whether both do the same. Raises EndpointError where the judge does not say."""
        key = self.key(one, tools)
        if key is not None and key == self.key(other, tools):
            return True
        return self.judge is not None and await self.judge(one.written(), other.written())


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Teachers prefer one action to the policy's."""

    chosen: Action
    """Of the first of the teachers that agree."""
    source: str
    """For the pair: `2 of 3 teachers: a, b`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """No pair comes of a turn. Example: ``Skipped(reason="tie")``"""

    reason: str
    message: str = ""
    """For people, where there is more to say."""


async def preferred(
    answers: Mapping[str, Action | None], student: Action, agreement: Agreement, tools: Tools, *, at_least: int
) -> Preference | Skipped:
    """The action that most teachers agree on, where they are `at_least` so many, and the policy did another one.

    `answers`: actions by teacher, None where one did not answer. Each is compared with the first of every group, so
    that a judge's opinion, which is no equivalence, gives groups too.
    """
    given = {name: action for name, action in answers.items() if action is not None}
    usable = {name: action for name, action in given.items() if agreement.key(action, tools) is not None}
    if len(usable) < at_least:
        return _skipped("empty" if len(given) >= at_least else "too_few_answers")
    try:
        groups = await _groups(usable, agreement, tools)
        most = max(map(len, groups))
        if most < at_least:
            return _skipped("all_disagree")
        largest, *others = (group for group in groups if len(group) == most)
        if others:
            return _skipped("tie")
        if await agreement.same(usable[largest[0]], student, tools):
            return _skipped("agrees_with_student")
    except EndpointError as error:
        return _skipped("judge_failed", str(error))
    source = f"{len(largest)} of {len(usable)} teachers: {', '.join(largest)}"
    return Preference(chosen=usable[largest[0]], source=source)


async def _groups(usable: Mapping[str, Action], agreement: Agreement, tools: Tools) -> list[list[str]]:
    groups: list[list[str]] = []
    for name, action in usable.items():
        for group in groups:
            if await agreement.same(usable[group[0]], action, tools):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _skipped(reason: SkipReason, message: str = "") -> Skipped:
    return Skipped(reason=reason, message=message)
