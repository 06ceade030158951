"""`--help` of the programs: a page of keys, and by section (`grpo-orch --help sampling`) all that is known of each."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.common import OnlyWith, ProcessSettings
from configs.keys import find, is_list, sections_of, types_of, unknown

_WIDTH = 118


def help_text(cls: type[ProcessSettings], arguments: Sequence[str]) -> str:
    """The page for `--help`, or for `--help KEY`. Exits with 2 where there is no such key."""
    program = f"grpo-{cls.role}"
    if (key := _asked(arguments)) is not None:
        return section_help(cls, key, f"{program} --help")
    usage = [f"{program} [FILE.yaml | RUN] [--dry-run] [--KEY VALUE ...]"]
    more = [f"{program} --help KEY tells more of a key, or lists a section."]
    environment = f"environment ({cls.env_prefix}KEY, {cls.env_prefix}SECTION__KEY)"
    return _page(cls, usage, more, environment, cls.exit_codes)


def run_help(
    cls: type[BaseModel], arguments: Sequence[str], *, presets: Sequence[str], commands: Mapping[str, str]
) -> str:
    """As `help_text`, of `grpo`. `commands`: what its other commands do."""
    if (key := _asked(arguments)) is not None:
        return section_help(cls, key, "grpo --help")
    usage = [
        "grpo RUN [--dry-run] [--KEY VALUE ...]",
        "grpo --train FILE --infer FILE --orch FILE [--teacher FILE] [...]",
        *(f"{f'grpo {name} …':<20} {about}" for name, about in commands.items()),
    ]
    more = [
        f"RUN is a folder with run.yaml, such a file, or one of the presets {', '.join(presets)}.",
        "Keys of one program follow its name: --train.learning_rate 1e-3 --orch.sampling.max_tokens 64.",
        "grpo --help train lists the trainer's keys; grpo --help KEY tells more of a key.",
    ]
    environment = "environment (GRPO_TRAIN_KEY, GRPO_ORCH_SECTION__KEY, …)"
    codes = "0 done, 1 a program failed, 2 settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"
    return _page(cls, usage, more, environment, codes)


def _asked(arguments: Sequence[str]) -> str | None:
    """The key that follows --help."""
    position = next(i for i, one in enumerate(arguments) if one in ("--help", "-h"))
    following = arguments[position + 1 : position + 2]
    return following[0].removeprefix("--") if following and following[0] != "--dry-run" else None


def _page(cls: type[BaseModel], usage: Sequence[str], more: Sequence[str], environment: str, codes: str) -> str:
    lines = [
        *(f"{'usage:' if line == usage[0] else '':<6} {line}" for line in usage),
        "",
        *textwrap.wrap(one_line(cls.__doc__), _WIDTH),
        "",
        *table(cls),
        "",
        *(wrapped for line in more for wrapped in textwrap.wrap(line, _WIDTH)),
        "--dry-run prints the effective settings and stops.",
        f"Precedence, highest first: command line, {environment}, file, default.",
        *textwrap.wrap(f"exit codes: {codes}", _WIDTH),
        "",
    ]
    return "\n".join(lines)


def section_help(cls: type[BaseModel], key: str, command: str) -> str:
    """All that is known of a key or, where it is a section, of those below. Exits with 2 where there is no such key."""
    found = [row for row in rows(cls) if f"{row[0]}.".replace("[]", "").startswith(f"{key}.")]
    if not found:
        print(f"error: command line: {key}: {unknown(cls, key)}", file=sys.stderr)
        raise SystemExit(2)
    field = find(cls, key) if key != found[0][0] else None
    lines = [] if field is None else textwrap.wrap(one_line(field.description), _WIDTH)
    for name, what, value, meaning in found:
        lines.append(f"{name if '[]' in name else f'--{name}'}  {what}, default {value}")
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, "", f"{command} lists all keys.", ""])


Row = tuple[str, str, str, str]
"""Key, type, default and meaning of a setting."""


def rows(cls: type[BaseModel], prefix: str = "") -> Iterator[Row]:
    """One row for each setting; `env[].id` stands for each member of a list."""
    for name, field in cls.model_fields.items():
        sections, key = sections_of(field.annotation), f"{prefix}{name}{'[]' if is_list(field.annotation) else ''}"
        only = [f"Only with `{one}`." for one in field.metadata if isinstance(one, OnlyWith)]
        if not sections:
            yield prefix + name, kind(field.annotation), default(field), " ".join([one_line(field.description), *only])
        elif len(sections) == 1:
            yield from rows(sections[0], f"{key}.")
        else:
            chosen = getattr(field.get_default(), "type", "required")
            yield from _alternatives(sections, f"{key}.", chosen)


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


def table(cls: type[BaseModel]) -> Iterator[str]:
    """A line or two for each key, sections last."""
    sections = []
    for name, field in cls.model_fields.items():
        if sections_of(field.annotation):
            sections.append((f"  {name}{'[]' if is_list(field.annotation) else ''}", first_sentence(field)))
        else:
            value = default(field)
            yield from _line(f"  --{name}", f"{first_sentence(field)} ({value if len(value) < 24 else '…'})")
    if sections:
        yield from ("", "sections:")
    for head, text in sections:
        yield from _line(head, text)


def _line(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{head:<29} ", subsequent_indent=" " * 30)


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
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
