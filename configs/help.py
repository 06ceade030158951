"""`--help` of the programs: a page of keys, and by section (`grpo-orch --help sampling`) all that is known of each."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.common import OnlyWith, ProcessSettings
from configs.keys import fields_at, is_list, sections_of, types_of, unknown

_WIDTH = 118


def help_text(cls: type[ProcessSettings], arguments: Sequence[str]) -> str:
    """The page for `--help`, or for `--help SECTION` or `--help KEY`. Exits with 2 where there is no such key."""
    position = next(i for i, one in enumerate(arguments) if one in ("--help", "-h"))
    asked = arguments[position + 1] if len(arguments) > position + 1 else ""
    program = f"grpo-{cls.role}"
    if asked and not asked.startswith("-"):
        return section_help(cls, asked.removeprefix("--"), f"{program} --help")
    return "\n".join(
        [
            f"usage: {program} [FILE.yaml] [--dry-run] [--KEY VALUE ...]",
            "",
            *textwrap.wrap(one_line(cls.__doc__), _WIDTH),
            "",
            *table(cls),
            "",
            "--dry-run prints the effective settings and stops. "
            f"{program} --help KEY tells more of a key, or lists a section.",
            f"Precedence: command line, environment ({cls.env_prefix}KEY, SECTION__KEY), file, default.",
            *textwrap.wrap(f"Exit codes: {cls.exit_codes}.", _WIDTH),
            "",
        ]
    )


def section_help(cls: type[BaseModel], key: str, command: str) -> str:
    """All that is known of a key and, where it is a section, of those below. Exits with 2 where there is no such
    key."""
    sections: list[type[BaseModel]] = [cls]
    found: list[FieldInfo] = []
    for name in key.split("."):
        if not (found := fields_at(sections, name)):
            print(f"error: command line: {key}: {unknown(cls, key)}", file=sys.stderr)
            raise SystemExit(2)
        sections = [section for field in found for section in sections_of(field.annotation)]
    lines = _full(key, found[0])
    for section in sections:
        alternative = f"type: {' or '.join(types_of(section))}. " if len(sections) > 1 else ""
        lines += ["", *textwrap.wrap(alternative + one_line(section.__doc__), _WIDTH), ""]
        for name, field in section.model_fields.items():
            lines += _full(f"{key}.{name}", field)
    return "\n".join([*lines, "", f"{command} lists all keys.", ""])


def _full(key: str, field: FieldInfo) -> list[str]:
    only = [f"Only with {one}." for one in field.metadata if isinstance(one, OnlyWith)]
    text = " ".join([one_line(field.description), *only])
    head = f"--{key}" if not sections_of(field.annotation) else key
    head += f"  {kind(field.annotation)}, default {default(field)}" if not sections_of(field.annotation) else ""
    return [head, *textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")]


def table(cls: type[BaseModel]) -> Iterator[str]:
    """One line for each key, sections last."""
    plain = {name: field for name, field in cls.model_fields.items() if not sections_of(field.annotation)}
    for name, field in plain.items():
        yield _line(f"--{name}", field, default(field))
    yield ""
    yield "sections:"
    for name, field in cls.model_fields.items():
        if name not in plain:
            yield _line(f"  {name}{'[]' if is_list(field.annotation) else ''}", field, "")


def _line(head: str, field: FieldInfo, value: str) -> str:
    left = f"{head:<28} {value:<22}".rstrip() if value else head
    left = f"{left:<52}" if value else f"{head:<28}"
    return textwrap.shorten(f"{left}|{first_sentence(field)}", 400).replace("|", " ", 1) if False else _cut(left, field)


def _cut(left: str, field: FieldInfo) -> str:
    text = first_sentence(field)
    room = _WIDTH - len(left) - 1
    return f"{left} {text if len(text) <= room else text[: room - 1].rsplit(' ', 1)[0] + ' …'}"


def first_sentence(field: FieldInfo) -> str:
    """The beginning of a field's description, without what follows a colon, a semicolon or a parenthesis."""
    text = one_line(field.description)
    for end in (". ", "; ", " ("):
        text = text.split(end)[0]
    return text.rstrip(".") + "."


def one_line(text: str | None) -> str:
    """The same without line breaks."""
    return " ".join((text or "").split())


def kind(annotation: Any) -> str:
    """The type of a field's values in a few words."""
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        names = {"NoneType": "null", "str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
        return names.get(annotation.__name__, annotation.__name__)
    values = [str(a) if isinstance(a, str | int | bool) else kind(a) for a in get_args(annotation) if a is not ...]
    name = getattr(annotation, "__name__", "")
    if name == "tuple":
        return f"list of {' or '.join(values)}"
    return "mapping" if name == "dict" else " or ".join(values) or "any"


def default(field: FieldInfo) -> str:
    """A field's default, as it is written in a file."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, dict) else "{}"
