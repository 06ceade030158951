"""What a teacher or the policy did in a state, and when two of them did the same."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NotRequired, Protocol, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from orchestrator.disagreement.normalising import normalised
from orchestrator.episodes.tool_calls import Parser, Tool, ToolCall, parse_tagged


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


Writer = Callable[[Action], str]
"""An action as the policy would write it."""


def write_tagged(action: Action) -> str:
    """The text, and its calls as Hermes and Qwen models write them: ``<tool_call>\\n{"name": ...}\\n</tool_call>``."""
    calls = (
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in action.tool_calls
    )
    text = [action.text] if action.text else []
    return "\n".join([*text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


class JudgeFailed(Exception):
    """Whoever judges whether two actions are the same could not say."""


class Agreement(ABC):
    """When two actions are the same."""

    @abstractmethod
    def usable(self, action: Action) -> bool:
        """Whether a teacher's action says anything that could be preferred to another one."""

    @abstractmethod
    async def same(self, one: Action, other: Action) -> bool:
        """Whether both do the same. Raises JudgeFailed."""


class _ByKey(Agreement):
    """Actions are the same where their keys are."""

    @abstractmethod
    def key(self, action: Action) -> str:
        """What is compared."""

    def usable(self, action: Action) -> bool:
        return bool(self.key(action))

    async def same(self, one: Action, other: Action) -> bool:
        return self.key(one) == self.key(other)


class Exact(_ByKey):
    """Letter by letter."""

    def key(self, action: Action) -> str:
        return write_tagged(action)

    def usable(self, action: Action) -> bool:
        return bool(self.key(action).strip())


class Normalised(_ByKey):
    """But for case, white space and punctuation, as `normalising.normalised` has it."""

    def key(self, action: Action) -> str:
        return normalised(write_tagged(action))


class SameCalls(Agreement):
    """The same tools with the same arguments in the same order, whatever is said around them; what has a default counts
    as given. Actions without calls are compared as `Normalised` does. A call that cannot be made makes a teacher's
    action unusable, and is never the same as another one.

    Example: ``SameCalls(tools_of_schemas(template.tools))``
    """

    def __init__(self, tools: Mapping[str, Tool], parse: Parser = parse_tagged) -> None:
        """`parse` finds the calls that are written in the text."""
        self._tools, self._parse = tools, parse

    def usable(self, action: Action) -> bool:
        return bool(self._key(action))

    async def same(self, one: Action, other: Action) -> bool:
        key = self._key(one)
        return key is not None and key == self._key(other)

    def _key(self, action: Action) -> str | None:
        """Canonical JSON of the calls, or the normalised text where there are none; None where one cannot be made."""
        parsed = self._parse(action.text, self._tools)
        if parsed.errors:
            return None
        calls = [self._canonical(call.name, call.arguments) for call in parsed.calls if isinstance(call, ToolCall)]
        for call in action.tool_calls:
            if (tool := self._tools.get(call.name)) is None:
                return None
            try:
                calls.append(self._canonical(call.name, tool.arguments(call.arguments)))
            except (ValidationError, RecursionError):
                return None
        return json.dumps(calls, sort_keys=True) if calls else normalised(parsed.content)

    def _canonical(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        about = self._tools[name].parameters["properties"]
        defaults = {key: one["default"] for key, one in about.items() if isinstance(one, Mapping) and "default" in one}
        return [name, _by_value({**defaults, **to_jsonable_python(dict(arguments))})]


def _by_value(value: Any) -> Any:
    """JSON in which a number is written in one way: a tool that takes 0.5 makes 2.0 of a 2, and of no default."""
    if isinstance(value, dict):
        return {key: _by_value(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_by_value(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Judged(Agreement):
    """Somebody says so: a model, for example. Actions that are the same letter by letter need nobody to say so."""

    def __init__(self, judge: Callable[[Action, Action], Awaitable[bool]], *, timeout_s: float = 60.0) -> None:
        """`judge` has `timeout_s` for each question."""
        self._judge, self._timeout_s, self._exact = judge, timeout_s, Exact()

    def usable(self, action: Action) -> bool:
        return self._exact.usable(action)

    async def same(self, one: Action, other: Action) -> bool:
        if await self._exact.same(one, other):
            return True
        try:
            async with asyncio.timeout(self._timeout_s):
                return bool(await self._judge(one, other))
        except TimeoutError:
            raise JudgeFailed(f"the judge did not answer within {self._timeout_s:g} s") from None
        except Exception as error:  # the caller's code
            raise JudgeFailed(f"the judge raised {type(error).__name__}: {error}") from error


class Judge(Protocol):
    """Says whether two actions are the same."""

    async def __call__(self, one: Action, other: Action, /, *, trace: str) -> bool:
        """`trace` is the rollout that it is for. What it raises costs the turn."""


AgreementOf = Callable[[Sequence[Mapping[str, Any]] | None, str], Agreement]
"""The agreement for turns in which these tools could be called, of the rollout with this id."""
AgreementName = Literal["exact", "normalised", "tool_calls", "judge"]
MAX_TOOL_SETS = 128
"""Sets of tools that are kept ready, those that were used last: environments may give each example its own."""


def agreement_of(
    name: str, *, parse: Parser = parse_tagged, judge: Judge | None = None, judge_timeout_s: float = 60.0
) -> AgreementOf:
    """By name. `parse` is how `tool_calls` reads calls, `judge` is whom `judge` asks, with `judge_timeout_s` for each
    question. Raises ValueError."""
    if name not in get_args(AgreementName):
        raise ValueError(f"there is no agreement {name!r}; there are {', '.join(get_args(AgreementName))}")
    if (name == "judge") != (judge is not None):
        raise ValueError(
            f"agreement is {name!r} with judge {judge!r}; the agreement judge, and no other one, takes a judge"
        )
    if judge is not None:
        return lambda _, trace: Judged(partial(judge, trace=trace), timeout_s=judge_timeout_s)
    if name == "tool_calls":
        return _calls_of_tools(parse)
    plain = Exact() if name == "exact" else Normalised()
    return lambda *_: plain


def _calls_of_tools(parse: Parser) -> AgreementOf:
    @lru_cache(maxsize=MAX_TOOL_SETS)
    def known(tools: str) -> Agreement:
        return SameCalls(tools_of_schemas(json.loads(tools) or ()), parse)

    return lambda tools, _: known(json.dumps(tools))


# --- tools, where only their schemas are known ---

_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool}


def tools_of_schemas(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    """Tools by name from their schemas in the OpenAI format: to read calls, not to make them; the functions are
    elsewhere. Of arguments, plain types are checked, and that all are there which must be. Raises ValueError."""
    tools = {}
    for schema in schemas:
        try:
            about = schema["function"]
            tools[about["name"]] = _read_only(about)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'a tool is {schema!r} ({error}), expected {{"type": "function", "function": {{"name": ..., '
                '"parameters": {...}}}'
            ) from error
    return tools


def _read_only(about: Mapping[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": {}, **about.get("parameters", {})}
    required, fields = set(parameters.get("required", ())), {}
    for name, one in parameters["properties"].items():
        named = one.get("type") if isinstance(one, Mapping) else None
        kind = _TYPES.get(named, Any) if isinstance(named, str) else Any
        fields[name] = kind if name in required else NotRequired[kind]
    make: Any = TypedDict  # of names that are not known before
    arguments = make(about["name"], fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    return Tool(
        name=about["name"],
        description=about.get("description", ""),
        parameters=parameters,
        function=_elsewhere,
        _arguments=TypeAdapter(arguments),
    )


def _elsewhere(**_: Any) -> None:
    raise RuntimeError("the tool is known by its schema alone; call it in the process of its environment")
