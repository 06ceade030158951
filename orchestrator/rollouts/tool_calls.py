"""Tools: their schemas from plain functions, and the calls that a policy writes in its answers.

What a policy writes is never an exception. A call that cannot be made is a value that says why, in words for the
policy; they hold nothing of what it wrote that could be read as a control token.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NoReturn, NotRequired, get_type_hints

import docstring_parser
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

_MAX_ECHO = 40
"""Characters of what the policy wrote that an error repeats."""
_MAX_PROBLEMS = 3
"""Wrong arguments that one error names."""


# --- tools ---


class _PlainSchema(GenerateJsonSchema):
    """Without titles, which say nothing that the keys do not."""

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
        """Of a function, plain or async, whose parameters all have type hints. The first part of its docstring
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

    @property
    def schema(self) -> dict[str, Any]:
        """As the OpenAI tools format has it, and chat templates show it."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": about}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` as the function takes them. Raises ValidationError."""
        return self._arguments.validate_json(json.dumps(given), strict=True)

    def arguments_from_text(self, given: Mapping[str, str]) -> dict[str, Any]:
        """The same where the policy wrote words: "3" is a number for a function that takes one. Raises
        ValidationError."""
        return self._arguments.validate_python(dict(given), strict=False)


def tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name. Raises ValueError where two have one name, or one cannot be a tool."""
    tools: dict[str, Tool] = {}
    for tool in map(Tool.of, functions):
        if tool.name in tools:
            raise ValueError(f"two tools are called {tool.name}; rename one")
        tools[tool.name] = tool
    return tools


def _field(parameter: inspect.Parameter, hint: Any, about: str | None) -> Any:
    """A parameter's type with what its schema says beside it."""
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
    """As the function takes them; what has a default may be missing."""
    text: str
    """As the policy wrote it."""


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
    """As the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer taken apart."""

    content: str
    """What is no call, without white space around it."""
    calls: tuple[ToolCall | ToolCallError, ...]
    """In the order in which the policy wrote them."""

    @property
    def errors(self) -> tuple[ToolCallError, ...]:
        """Calls that cannot be made."""
        return tuple(call for call in self.calls if isinstance(call, ToolCallError))


Parser = Callable[[str, Mapping[str, Tool]], ParsedAnswer]
"""`(answer, tools by name) -> parsed`"""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_SHAPE = '{"name": ..., "arguments": {...}}'
_MAX_FAILURES = 16
"""Each costs a look at all of the answer, so that a long one full of them would take minutes."""


def parse_tagged(text: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
    """Calls as Hermes and Qwen models write them: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``."""
    calls: list[ToolCall | ToolCallError] = []
    content: list[str] = []
    at = 0
    for start, end, payload in _tagged(text):
        content.append(text[at:start])
        calls.append(_tagged_call(payload, text[start:end], tools))
        at = end
    return ParsedAnswer(content="".join([*content, text[at:]]).strip(), calls=tuple(calls))


def _tagged(text: str) -> Iterator[tuple[int, int, str | None]]:
    """(begin, end, what is between the tags; None where the call is not closed) of each call. A tag within one of the
    JSON's own strings is no tag, unless the answer has many that are not well formed."""
    tags = [*_TAG.finditer(text)]
    end, num_failures = 0, 0
    for place, tag in enumerate(tags):
        if tag.start() < end or tag[0] == _CLOSE:
            continue
        after = _end_of_json(text, tag.end()) if num_failures < _MAX_FAILURES else None
        num_failures += after is None
        following = tags[place + 1] if place + 1 < len(tags) else None
        if after is not None:
            payload, end = text[tag.end() : after], after + len(_CLOSE)
        elif following is not None and following[0] == _CLOSE:
            payload, end = text[tag.end() : following.start()], following.end()
        else:
            yield tag.start(), len(text) if following is None else following.start(), None
            continue
        yield tag.start(), end, payload


def _end_of_json(text: str, begin: int) -> int | None:
    """Where the closing tag begins, behind well-formed JSON."""
    while begin < len(text) and text[begin].isspace():
        begin += 1
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    while end < len(text) and text[end].isspace():
        end += 1
    return end if text.startswith(_CLOSE, end) else None


def _tagged_call(payload: str | None, text: str, tools: Mapping[str, Tool]) -> ToolCall | ToolCallError:
    wrong = partial(ToolCallError, text=text)
    if payload is None:
        return wrong(error_kind=UNCLOSED_CALL, message=f"The tool call is not closed; end it with {_CLOSE}.")
    try:
        call = json.loads(payload, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
        json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        about = getattr(error, "msg", None) or _ABOUT.get(type(error)) or str(error)
        return wrong(
            error_kind=MALFORMED_JSON, message=f"The tool call is not valid JSON ({about}); expected {_SHAPE}."
        )
    if (fault := _wrong_shape(call)) is not None:
        return wrong(error_kind=MALFORMED_CALL, message=f"The tool call {fault}; expected {_SHAPE}.")
    name = call["name"]
    if (tool := tools.get(name)) is None:
        return _unknown(name, text, tools)
    try:
        return ToolCall(name=name, arguments=tool.arguments(call.get("arguments", {})), text=text)
    except ValidationError as error:
        return _wrong_arguments(tool, error, text)
    except RecursionError:
        return wrong(error_kind=WRONG_ARGUMENTS, message=f"The arguments for {name} are nested too deeply.")


_ABOUT = {RecursionError: "nested too deeply", UnicodeEncodeError: "half of a surrogate pair"}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _wrong_shape(call: Any) -> str | None:
    if not isinstance(call, dict):
        return "is no object"
    if not isinstance(call.get("name"), str):
        return "has no name that is a string"
    if not isinstance(call.get("arguments", {}), dict):
        return "has arguments that are no object"
    if others := sorted(call.keys() - {"name", "arguments"}):
        return f"has the key {_echo(others[0])}"
    return None


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
    """What the policy wrote, short and harmless."""
    plain = "".join(letter if letter.isalnum() or letter in "_-." else "?" for letter in written[:_MAX_ECHO])
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


ANSWER_TAG = "[ANSWER]"


def tagged_answer(text: str) -> str | None:
    """What stands behind the last `[ANSWER]`, to the end of its line; None where there is no tag."""
    _, tag, answer = text.rpartition(ANSWER_TAG)
    return answer.lstrip().partition("\n")[0].strip() if tag else None


_INTEGER = re.compile(re.escape(ANSWER_TAG) + r"\s*(-?[0-9]{1,18})(?![0-9])")


def tagged_integer(text: str) -> int | None:
    """The whole number behind the last `[ANSWER]` that has one; None where none has."""
    found = _INTEGER.findall(text)
    return int(found[-1]) if found else None
