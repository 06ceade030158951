"""Tools: their schemas from plain functions, and the calls that a policy writes in its answers.

What a policy writes is never an exception. A call that cannot be made is a value that says why, in words for the
policy; they hold nothing of what it wrote that could be read as a control token.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, NotRequired, cast, get_type_hints

import docstring_parser
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
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
        try:
            return cls._of(function, name)
        except (PydanticUserError, NameError, TypeError) as error:
            raise ValueError(
                f"{name} cannot be a tool: {error}; give every parameter a type hint that JSON can hold"
            ) from error

    @classmethod
    def _of(cls, function: Callable[..., Any], name: str) -> "Tool":
        description, descriptions = _described(inspect.getdoc(function) or "")
        hints, fields = get_type_hints(function, include_extras=True), {}
        defaults: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            _check_parameter(parameter, hints, name)
            kind: Any = hints[parameter.name]
            if (about := descriptions.get(parameter.name)) is not None:
                kind = Annotated[kind, Field(description=about)]
            if parameter.default is not parameter.empty:
                kind = NotRequired[kind]
                defaults[parameter.name] = parameter.default
            fields[parameter.name] = kind
        make: Any = TypedDict  # of names that are not known before
        arguments = make(name, fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid")
        adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        schema = _without_titles(adapter.json_schema())
        for field, default in defaults.items():
            if _is_json(default):
                schema["properties"][field]["default"] = default
        return cls(
            name=name,
            description=description,
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


def _check_parameter(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"its parameter {parameter} cannot be given by name")
    if parameter.name not in hints:
        raise TypeError(f"its parameter {parameter.name} has no type hint")


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring's description, and those of parameters by name."""
    parsed = docstring_parser.parse(docstring)
    texts = [parsed.short_description or "", parsed.long_description or ""]
    parameters = {one.arg_name.lstrip("*"): " ".join((one.description or "").split()) for one in parsed.params}
    return " ".join(" ".join(texts).split()), {name: about for name, about in parameters.items() if about}


def _without_titles(schema: Any) -> Any:
    """Pydantic names every part; the names say nothing that the keys do not."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if key != "title" or not isinstance(part, str)}
    return {
        key: {name: _without_titles(one) for name, one in part.items()}
        if key in ("properties", "$defs")
        else part
        if key in ("default", "enum", "const", "examples")
        else _without_titles(part)
        for key, part in kept.items()
    }


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


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
    close, end, num_failures = text.find(_CLOSE), 0, 0
    while (start := text.find(_OPEN, end)) >= 0:
        begin = start + len(_OPEN)
        if num_failures < _MAX_FAILURES:
            if (after := _end_of_json(text, begin)) is not None:
                end = after + len(_CLOSE)
                yield start, end, text[begin:after]
                continue
            num_failures += 1
        if -1 < close < begin:
            close = text.find(_CLOSE, begin)
        reopened = text.find(_OPEN, begin)
        if close == -1 or -1 < reopened < close:
            end = len(text) if reopened == -1 else reopened
            yield start, end, None
        else:
            end = close + len(_CLOSE)
            yield start, end, text[begin:close]


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
    if payload is None:
        return ToolCallError(
            error_kind=UNCLOSED_CALL, message=f"The tool call is not closed; end it with {_CLOSE}.", text=text
        )
    try:
        call = json.loads(payload, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
        json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        about = error.msg if isinstance(error, json.JSONDecodeError) else _ABOUT.get(type(error), str(error))
        message = f"The tool call is not valid JSON ({about}); expected {_SHAPE}."
        return ToolCallError(error_kind=MALFORMED_JSON, message=message, text=text)
    if (wrong := _wrong_shape(call)) is not None:
        return ToolCallError(error_kind=MALFORMED_CALL, message=f"{wrong}; expected {_SHAPE}.", text=text)
    return _made(call["name"], call.get("arguments", {}), text, tools)


_ABOUT: dict[type[Exception], str] = {
    RecursionError: "nested too deeply",
    UnicodeEncodeError: "half of a surrogate pair",
}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _wrong_shape(call: Any) -> str | None:
    if not isinstance(call, dict):
        return "The tool call is no object"
    if not isinstance(call.get("name"), str):
        return "The tool call has no name" if "name" not in call else "The tool call's name is no string"
    if not isinstance(call.get("arguments", {}), dict):
        return "The tool call's arguments are no object"
    if others := sorted(call.keys() - {"name", "arguments"}):
        return f"The tool call has the key {_echo(others[0])}"
    return None


def _made(name: str, arguments: Mapping[str, Any], text: str, tools: Mapping[str, Tool]) -> ToolCall | ToolCallError:
    if (tool := tools.get(name)) is None:
        return _unknown(name, text, tools)
    try:
        return ToolCall(name=name, arguments=tool.arguments(arguments), text=text)
    except ValidationError as error:
        return _wrong_arguments(tool, error, text)
    except RecursionError:
        message = f"The arguments for {name} are nested too deeply."
        return ToolCallError(error_kind=WRONG_ARGUMENTS, message=message, text=text)


def _unknown(name: str, text: str, tools: Mapping[str, Tool]) -> ToolCallError:
    there = f"there are {', '.join(tools)}" if tools else "there are none"
    return ToolCallError(error_kind=UNKNOWN_TOOL, message=f"There is no tool {_echo(name)}; {there}.", text=text)


def _wrong_arguments(tool: Tool, error: ValidationError, text: str) -> ToolCallError:
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    told = [_problem(cast(Mapping[str, Any], one)) for one in wrong[:_MAX_PROBLEMS]]
    if len(wrong) > _MAX_PROBLEMS:
        told.append(f"{len(wrong) - _MAX_PROBLEMS} more")
    expected = ", ".join(tool.parameters["properties"]) or "no arguments"
    message = f"Wrong arguments for {tool.name}: {'; '.join(told)}. It takes {expected}."
    return ToolCallError(error_kind=WRONG_ARGUMENTS, message=message, text=text)


def _problem(wrong: Mapping[str, Any]) -> str:
    place = ".".join(_echo(str(part)) for part in wrong["loc"])
    if wrong["type"] == "missing":
        return f"{place} is missing"
    if wrong["type"] == "extra_forbidden":
        return f"{place} is not one of them"
    return f"{place}: {wrong['msg']}" if place else str(wrong["msg"])


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
