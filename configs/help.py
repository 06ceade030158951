"""`--help` of the programs: a page of keys, and by section (`grpo-orch --help sampling`) all that is known of each."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from grpo.configs.common import OnlyWith
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.keys import find, is_list, sections_of, types_of, unknown
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_WIDTH = 118
Row = tuple[str, str, str, str]
"""Key, type, default and meaning of a setting."""


def page(cls: type[BaseModel], usage: Sequence[str], notes: Sequence[str]) -> str:
    """All keys with a sentence each, sections last."""
    keys, sections = list[str](), list[str]()
    for name, field in cls.model_fields.items():
        text = first_sentence(field.description)
        if sections_of(field.annotation):
            head = f"  {name}{'[]' if is_list(field.annotation) else ''}"
            sections += _line(head, text)
        else:
            shown = default(field) if len(default(field)) < 24 else "…"
            others = [one for one in choices(field.annotation) if one != shown]
            either = f"; or {', '.join(others)}" if others else ""
            keys += _line(f"  --{name}", f"{text} ({shown}{either})")
    about = textwrap.wrap(one_line(cls.__doc__), _WIDTH)
    ending = [line for note in notes for line in textwrap.wrap(note, _WIDTH)]
    listed = ["", "sections:", *sections] if sections else []
    return "\n".join([*usage, "", *about, "", *keys, *listed, "", *ending, ""])


def _line(head: str, text: str) -> list[str]:
    return textwrap.wrap(f"{head:<29} {text.rstrip('.')}.", _WIDTH, subsequent_indent=" " * 30)


def section_page(cls: type[BaseModel], key: str) -> str:
    """All that is known of a key or, where it is a section, of those below. Raises `SettingsError` where there is no
    such key."""
    found = [row for row in rows(cls) if f"{row[0]}.".replace("[]", "").startswith(f"{key}.")]
    if not found:
        raise SettingsError([Problem(origin="--help", key=key, value=None, message=unknown(cls, key))])
    field = find(cls, key) if key != found[0][0] else None
    lines = [] if field is None else textwrap.wrap(one_line(field.description), _WIDTH)
    for name, what, value, meaning in found:
        lines.append(f"{name if '[]' in name else f'--{name}'}  {what}, default {value}")
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, ""])


def rows(cls: type[BaseModel], prefix: str = "") -> Iterator[Row]:
    """Yields one row for each setting; `env[].id` stands for each member of a list."""
    for name, field in cls.model_fields.items():
        sections, key = sections_of(field.annotation), f"{prefix}{name}{'[]' if is_list(field.annotation) else ''}"
        if not sections:
            only = [f"Only with `{one}`." for one in field.metadata if isinstance(one, OnlyWith)]
            yield prefix + name, kind(field.annotation), default(field), " ".join([one_line(field.description), *only])
        elif len(sections) == 1:
            yield from rows(sections[0], f"{key}.")
        else:
            yield from _alternatives(sections, f"{key}.", getattr(field.get_default(), "type", "required"))


def _alternatives(sections: Sequence[type[BaseModel]], prefix: str, chosen: str) -> Iterator[Row]:
    """The rows of sections that `type` chooses among: what each is, then its keys, each once with the types that have
    it."""
    kinds = {" or ".join(types_of(section)): section for section in sections}
    about = " ".join(f"`{name}`: {one_line(section.__doc__)}" for name, section in kinds.items())
    yield f"{prefix}type", " or ".join(kinds), chosen, about
    having: dict[Row, list[str]] = {}
    for name, section in kinds.items():
        for row in rows(section, prefix):
            if row[0] != f"{prefix}type":
                having.setdefault(row, []).append(name)
    for (key, what, value, meaning), names in having.items():
        types = "" if len(names) == len(kinds) else f"With `type: {' or '.join(names)}`. "
        yield key, what, value, types + meaning


def first_sentence(text: str | None) -> str:
    """The first sentence without its stop, or its first part, and without what stands in brackets at its end."""
    sentence = re.split(r"\.(?= )", one_line(text), maxsplit=1)[0].rstrip(".")
    return re.sub(r" \([^()]*\)$", "", sentence).split("; ")[0]


def choices(annotation: Any) -> list[str]:
    """The words that a field takes one of; none of a field that takes others, too."""
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        found = [choices(one) for one in get_args(annotation) if one is not type(None)]
        return [word for words in found for word in words] if all(found) else []
    return []


def one_line(text: str | None) -> str:
    """Returns the text without line breaks."""
    return " ".join((text or "").split())


def kind(annotation: Any) -> str:
    """The type of a field's values in a few words."""
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        names = {"NoneType": "null", "str": "text", "int": "integer", "float": "number", "bool": "boolean"}
        return names.get(annotation.__name__, annotation.__name__)
    values = [str(a) if isinstance(a, str | int | bool) else kind(a) for a in get_args(annotation) if a is not ...]
    if get_origin(annotation) in (tuple, dict):
        return f"list of {' or '.join(values)}" if is_list(annotation) else "mapping"
    return " or ".join(values) or "any"


def default(field: FieldInfo) -> str:
    """A field's default, as it is written in a file."""
    value = field.get_default(call_default_factory=True, validated_data={"lora": True})
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if value is PydanticUndefined or value is None or isinstance(value, bool):
        return "required" if value is PydanticUndefined else "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
