"""The dotted keys of settings: which there are, which one was meant, and what pydantic's errors are about."""

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's annotation mentions; several where there are alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def is_list(annotation: Any) -> bool:
    """Whether a field holds a list."""
    return get_origin(annotation) is tuple


def is_plain_list(field: FieldInfo) -> bool:
    """Whether a field holds a list of texts or numbers."""
    inner = [one for one in get_args(field.annotation) if one is not type(None)]
    return (is_list(field.annotation) or any(map(is_list, inner))) and not sections_of(field.annotation)


def is_switch(annotation: Any) -> bool:
    """Whether a field is true or false."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(is_switch(inner) for inner in get_args(annotation))
    return annotation is bool


def known_keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys, sections included (`sampling`, `sampling.max_tokens`); keys of a list's members have the list's
    key."""
    keys = []
    for name, field in cls.model_fields.items():
        keys.append(prefix + name)
        for section in sections_of(field.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def fields_at(cls: type[BaseModel], parts: Sequence[str]) -> list[FieldInfo]:
    """The fields of a dotted key, taken apart; several where a section above has alternatives."""
    sections, found = [cls], list[FieldInfo]()
    for name in parts:
        found = [section.model_fields[name] for section in sections if name in section.model_fields]
        sections = [section for field in found for section in sections_of(field.annotation)]
    return found


def _list_above(cls: type[BaseModel], parts: Sequence[str]) -> str | None:
    """The key of the list to whose members a key belongs."""
    above = [parts[:length] for length in range(1, len(parts))]
    return next((".".join(one) for one in above if any(is_list(f.annotation) for f in fields_at(cls, one))), None)


def find(cls: type[BaseModel], key: str) -> FieldInfo | None:
    """The field of a dotted key; None where there is none, or it belongs to a list's members."""
    parts = key.split(".")
    return None if _list_above(cls, parts) else next(iter(fields_at(cls, parts)), None)


_NOT_FOLLOWED = "is refused: it changes the distribution that tokens are drawn from, which the trainer could not follow"
_POLICY = "is for the server of the policy and its versions, and this one serves a teacher; remove it"
_INSTEAD = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "min_tokens"), _NOT_FOLLOWED),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _NOT_FOLLOWED),
    **{f"teacher.{key}": _POLICY for key in ("output_dir", "colocate", "sleep_mode", "enable_lora", "max_loras")},
    "teacher.model": "is given by the orchestrator's teacher_model.model.name; set that",
    "teacher.api_key_var": "is given by the orchestrator's teacher_model.client.api_key_var; set that",
}
"""What to say of keys that someone may look for here."""


def unknown(cls: type[BaseModel], key: str) -> str:
    """What to say of a key that is not known: an alternative that has it, or the nearest known key."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    plain = ".".join(parts)
    if message := _of_other_type(cls, parts) or _INSTEAD.get(plain) or _INSTEAD.get(parts[-1] if parts else ""):
        return message
    if plain == key and (whole := _list_above(cls, parts)) is not None:
        return f"{whole} is a list; give it whole, as in --{whole} '[{{\"{parts[-1]}\": …}}]', or in a file"
    known = [name for name in known_keys(cls) if not plain.startswith(f"{name}.")]
    if close := difflib.get_close_matches(plain.lower(), known, n=1, cutoff=0.75):
        return f"unknown key; did you mean {close[0]}?"
    last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(parts[-1].lower() if parts else "", last, n=1, cutoff=0.6)
    return f"unknown key; did you mean {last[close[0]]}?" if close else "unknown key; --help lists the known ones"


def _of_other_type(cls: type[BaseModel], parts: Sequence[str]) -> str | None:
    """Where a section has alternatives by `type`: which of them have the key."""
    sections = [section for field in fields_at(cls, parts[:-1]) for section in sections_of(field.annotation)]
    types_ = [one for section in sections if parts[-1] in section.model_fields for one in types_of(section)]
    return (
        f"is a key of type: {' or '.join(dict.fromkeys(types_))} only; remove it, or set that type" if types_ else None
    )


def types_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `type` by which a section is chosen among its alternatives."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def key_of(cls: type[BaseModel], loc: Sequence[str | int]) -> str:
    """The dotted key of the place that pydantic's error names, which has the `type` of alternatives in between."""
    sections = [cls]
    parts: list[str] = []
    for part in map(str, loc):
        found = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not found and any(part in types_of(section) for section in sections):
            sections = [section for section in sections if part in types_of(section)]
            continue
        parts.append(part)
        if found:
            sections = [section for field in found for section in sections_of(field.annotation)]
    return ".".join(parts)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a tree."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def get(tree: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in a tree, or `default` where it is not there."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of a tree, unless it is there, or stands below a value that is no section."""
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return
    tree.setdefault(last, value)


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees in one; where both have a value, that of `high`."""
    tree = dict(low)
    for name, value in high.items():
        below = tree.get(name)
        tree[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return tree
