"""Tools: their schemas from plain functions, and the calls that a policy writes in its answers.

What a policy writes is never an exception. A call that cannot be made is a value that says why, in words for the
policy; they hold nothing of what it wrote that could be read as a control token.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NotRequired, Protocol, get_type_hints

import docstring_parser
import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

UNCLOSED_CALL = "unclosed_call"
MALFORMED_JSON = "malformed_json"
MALFORMED_CALL = "malformed_call"
UNKNOWN_TOOL = "unknown_tool"
WRONG_ARGUMENTS = "wrong_arguments"
ERROR_KINDS = (UNCLOSED_CALL, MALFORMED_JSON, MALFORMED_CALL, UNKNOWN_TOOL, WRONG_ARGUMENTS)

_MAX_ECHO = 60
"""Characters of what the policy wrote that an error repeats."""
_MAX_PROBLEMS = 3
"""Wrong arguments that one error names."""


TOOL_ERROR = "tool_error"


class ToolFailed(Exception):
    """A tool raises it to say what kind of failure it is.

    Example: ``raise ToolFailed("There is no word zzz.", error_kind="unknown_word", hint_template_key="words")``
    """

    def __init__(self, message: str, *, error_kind: str = TOOL_ERROR, hint_template_key: str | None = None) -> None:
        """`hint_template_key` defaults to `error_kind`."""
        super().__init__(message)
        self.error_kind, self.hint_template_key = error_kind, hint_template_key or error_kind


# --- tools ---


class _PlainSchema(GenerateJsonSchema):
    """Makes schemas without titles, which say nothing that the keys do not."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a policy may call.

    Example: ``Tool.of(look_up)`` of ``def look_up(word: str) -> int`` with a docstring.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    function: Callable[..., Any]
    _arguments: TypeAdapter[dict[str, Any]]

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str | None = None) -> "Tool":
        """Describes a function, plain or async, whose parameters all have type hints. The first part of its docstring
        describes it; an `Args:` section (``word: what to look up``) or ``:param word:`` lines describe parameters.

        Raises ValueError where the function cannot be described.
        """
        name = name or function.__name__
        about = docstring_parser.parse(inspect.getdoc(function) or "")
        texts = {one.arg_name: " ".join((one.description or "").split()) or None for one in about.params}
        try:
            hints = get_type_hints(function, include_extras=True)
            parameters = inspect.signature(function).parameters.values()
            fields = {one.name: _field(one, hints.get(one.name), texts.get(one.name)) for one in parameters}
            make: Any = TypedDict  # of names that are not known before
            arguments = make(name, fields)
            arguments.__pydantic_config__ = ConfigDict(extra="forbid")
            adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
            schema = adapter.json_schema(schema_generator=_PlainSchema)
        except (PydanticUserError, NameError, TypeError) as error:
            raise ValueError(
                f"{name} cannot be a tool: {error}; give every parameter a type hint that JSON can hold"
            ) from error
        del schema["title"]
        return cls(
            name=name,
            description=" ".join(f"{about.short_description or ''} {about.long_description or ''}".split()),
            parameters={"type": "object", "properties": {}, **schema},
            function=function,
            _arguments=adapter,
        )

    @classmethod
    def of_schema(
        cls, name: str, function: Callable[..., Any], *, parameters: Mapping[str, Any], description: str = ""
    ) -> "Tool":
        """Describes a function by the JSON schema of its arguments, an object, as servers of tools give it. The
        function is called with the arguments by name; it checks them itself."""
        return cls(
            name=name,
            description=description,
            parameters={"type": "object", "properties": {}, **parameters},
            function=function,
            _arguments=TypeAdapter(dict[str, Any]),
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the OpenAI tools format, as chat templates show it."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": about}

    def arguments(self, given: str) -> dict[str, Any]:
        """Returns arguments, `given` as JSON, as the function takes them. Raises pydantic.ValidationError."""
        return self._arguments.validate_json(given, strict=True)

    def arguments_from_text(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Returns arguments that the policy wrote as words: "3" is a number for a function that takes one. Raises
        pydantic.ValidationError."""
        return self._arguments.validate_python(dict(given), strict=False)


class ToolSource(Protocol):
    """Tools that are known only while something is open, such as a server: `ToolEpisode(sources=[...])` has them beside
    its own. One source serves all rollouts of a worker at the same time. See `McpServer`."""

    async def open(self) -> Mapping[str, Tool]:
        """Returns the tools by name, and opens what they need unless it is open already. It is called at the beginning
        of each rollout. Raises ValueError where it cannot, which costs the rollout."""


def tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Returns tools by name. Raises ValueError where two have one name, or one cannot be a tool."""
    tools: dict[str, Tool] = {}
    for tool in map(Tool.of, functions):
        if tool.name in tools:
            raise ValueError(f"two tools are called {tool.name}; rename one")
        tools[tool.name] = tool
    return tools


def _field(parameter: inspect.Parameter, hint: Any, about: str | None) -> Any:
    """Returns a parameter's type with what its schema says beside it."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or hint is None:
        raise TypeError(f"its parameter {parameter} has no type hint, or cannot be given by name")
    default = parameter.default
    if default is parameter.empty:
        return Annotated[hint, Field(description=about)]
    shown: Any = {"default": default} if isinstance(default, str | int | float | bool | None) else None
    return NotRequired[Annotated[hint, Field(description=about, json_schema_extra=shown)]]


# --- calls ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that can be made. Example: ``ToolCall(name="look_up", arguments={"word": "cat"}, text="LOOKUP[cat]")``"""

    name: str
    arguments: Mapping[str, Any]
    """Arguments as the function takes them; those with a default may be missing."""
    text: str
    """The call as the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallError:
    """A call that cannot be made.

    Example: ``ToolCallError(error_kind="unknown_tool", message="There is no tool ad; there are add.", text="AD[1]")``
    """

    error_kind: str
    """One of `ERROR_KINDS`."""
    message: str
    """For the policy: what is wrong, and what is expected."""
    text: str
    """The call as the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer taken apart."""

    content: str
    """The text without its calls, and without white space around it."""
    calls: tuple[ToolCall | ToolCallError, ...]
    """Calls in the order in which the policy wrote them."""

    @property
    def errors(self) -> tuple[ToolCallError, ...]:
        """Calls that cannot be made."""
        return tuple(call for call in self.calls if isinstance(call, ToolCallError))


CallParser = Callable[[str, Mapping[str, Tool]], ParsedAnswer]
"""`(answer, tools by name) -> parsed`"""

_TAGGED = re.compile(r"<tool_call>((?:(?!</?tool_call>).)*)(</tool_call>)?", re.DOTALL)


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """A call between tags."""

    name: str
    arguments: dict[str, Any] = {}


def parse_tagged(text: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
    """Calls as Hermes and Qwen models write them: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``."""
    calls = tuple(_tagged_call(found, tools) for found in _TAGGED.finditer(text))
    return ParsedAnswer(content=_TAGGED.sub("", text).strip(), calls=calls)


def _tagged_call(found: re.Match[str], tools: Mapping[str, Tool]) -> ToolCall | ToolCallError:
    wrong = partial(ToolCallError, text=found[0])
    if found[2] is None:
        return wrong(error_kind=UNCLOSED_CALL, message="The tool call is not closed; end it with </tool_call>.")
    try:
        call = msgspec.json.decode(found[1], type=_Written)
        given = json.dumps(call.arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        kind = MALFORMED_CALL if isinstance(error, msgspec.ValidationError) else MALFORMED_JSON
        expected = '{"name": ..., "arguments": {...}}'
        return wrong(error_kind=kind, message=f"The tool call is wrong ({_echo(str(error))}); expected {expected}.")
    if (tool := tools.get(call.name)) is None:
        return _unknown(call.name, found[0], tools)
    try:
        return ToolCall(name=call.name, arguments=tool.arguments(given), text=found[0])
    except ValidationError as error:
        return _wrong_arguments(tool, error, found[0])


def _unknown(name: str, text: str, tools: Mapping[str, Tool]) -> ToolCallError:
    there = f"there are {', '.join(tools)}" if tools else "there are none"
    return ToolCallError(error_kind=UNKNOWN_TOOL, message=f"There is no tool {_echo(name)}; {there}.", text=text)


def _wrong_arguments(tool: Tool, error: ValidationError, text: str) -> ToolCallError:
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    told = [_problem(one["type"], one["loc"], one["msg"]) for one in wrong[:_MAX_PROBLEMS]]
    if len(wrong) > _MAX_PROBLEMS:
        told.append(f"{len(wrong) - _MAX_PROBLEMS} more")
    expected = ", ".join(tool.parameters["properties"]) or "no arguments"
    message = f"Wrong arguments for {tool.name}: {'; '.join(told)}. It takes {expected}."
    return ToolCallError(error_kind=WRONG_ARGUMENTS, message=message, text=text)


def _problem(kind: str, loc: Sequence[int | str], message: str) -> str:
    place = ".".join(_echo(str(part)) for part in loc)
    known = {"missing": "is missing", "extra_forbidden": "is not one of them"}
    return f"{place} {known[kind]}" if kind in known else f"{place}: {message}"


def _echo(written: str) -> str:
    """Returns what the policy wrote, short and harmless."""
    plain = "".join(letter if letter.isalnum() or letter in "_-. `" else "?" for letter in written[:_MAX_ECHO])
    return plain + ("..." if len(written) > _MAX_ECHO else "")


# --- plain text ---

_BRACKETED = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*)\[([^\[\]\n]*)(\])?")


def parse_bracketed(text: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
    """Calls as plain text has them: ``LOOKUP[apple]``, ``ADD[1, 2]``, quotes around an argument or not.

    A tool's name may be written in any case. A name that is no tool's is taken for a call only if it is all in capital
    letters, since plain text may well hold ``a[0]``.
    """
    by_name = {name.lower(): tool for name, tool in tools.items()}
    calls: list[ToolCall | ToolCallError] = []
    content: list[str] = []
    at = 0
    for found in _BRACKETED.finditer(text):
        tool = by_name.get(found[1].lower())
        if tool is None and not (found[1].isupper() and len(found[1]) > 1 and found[3]):
            continue
        content.append(text[at : found.start()])
        at = found.end()
        calls.append(_unknown(found[1], found[0], tools) if tool is None else _bracketed_call(tool, found))
    return ParsedAnswer(content="".join([*content, text[at:]]).strip(), calls=tuple(calls))


def _bracketed_call(tool: Tool, found: re.Match[str]) -> ToolCall | ToolCallError:
    names, text = list(tool.parameters["properties"]), found[0]
    if found[3] is None:
        message = f"The call of {tool.name} is not closed; write it as {_bracketed_shape(tool)}."
        return ToolCallError(error_kind=UNCLOSED_CALL, message=message, text=text)
    given = [found[2]] if len(names) == 1 else found[2].split(",")
    values = [_unquoted(value) for value in given]
    if values == [""]:
        values = []
    if len(values) > len(names):
        message = f"Wrong arguments for {tool.name}: {len(values)} are too many; write it as {_bracketed_shape(tool)}."
        return ToolCallError(error_kind=WRONG_ARGUMENTS, message=message, text=text)
    try:
        arguments = tool.arguments_from_text(dict(zip(names, values, strict=False)))
    except ValidationError as error:
        return _wrong_arguments(tool, error, text)
    return ToolCall(name=tool.name, arguments=arguments, text=text)


def _bracketed_shape(tool: Tool) -> str:
    return f"{tool.name}[{', '.join(tool.parameters['properties'])}]"


def _unquoted(value: str) -> str:
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value
