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


def is_nested(annotation: Any) -> bool:
    """Whether a field holds a section, a list or a mapping."""
    origin = get_origin(annotation)
    return origin in (dict, tuple) or bool(sections_of(annotation)) or any(map(is_nested, get_args(annotation)))


def fields_at(sections: Sequence[type[BaseModel]], name: str) -> list[FieldInfo]:
    """The fields of this name in a section or its alternatives."""
    return [section.model_fields[name] for section in sections if name in section.model_fields]


def known_keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys, sections included (`sampling`, `sampling.max_tokens`); keys of a list's members have the list's
    key."""
    keys = []
    for name, field in cls.model_fields.items():
        keys.append(prefix + name)
        for section in sections_of(field.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def find(cls: type[BaseModel], key: str) -> FieldInfo | None:
    """The field of a dotted key; None where there is none, or it belongs to a list's members."""
    sections: list[type[BaseModel]] = [cls]
    found: list[FieldInfo] = []
    for name in key.split("."):
        if (found and is_list(found[0].annotation)) or not (found := fields_at(sections, name)):
            return None
        sections = [section for field in found for section in sections_of(field.annotation)]
    return found[0]


_NOT_FOLLOWED = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


def unknown(cls: type[BaseModel], key: str) -> str:
    """What to say of a key that is not known: an alternative that has it, or the nearest known key."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    if message := _of_other_type(cls, parts):
        return message
    for length in range(len(parts) - 1, 0, -1):
        field = find(cls, ".".join(parts[:length]))
        if field is not None and is_list(field.annotation) and not any(part.isdigit() for part in key.split(".")):
            whole = ".".join(parts[:length])
            return f"{whole} is a list; give it whole, as in --{whole} '[{{\"{parts[length]}\": …}}]', or in a file"
    if parts[-1] in _NOT_FOLLOWED:
        return "is refused: it changes the distribution that tokens are drawn from, which the trainer could not follow"
    plain = ".".join(parts)
    known = [name for name in known_keys(cls) if not plain.startswith(f"{name}.")]
    if close := difflib.get_close_matches(plain.lower(), known, n=1, cutoff=0.75):
        return f"unknown key; did you mean {close[0]}?"
    last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(parts[-1].lower(), last, n=1, cutoff=0.6)
    return f"unknown key; did you mean {last[close[0]]}?" if close else "unknown key; --help lists the known ones"


def _of_other_type(cls: type[BaseModel], parts: Sequence[str]) -> str | None:
    """Where a section has alternatives by `type`: which of them have the key."""
    sections: list[type[BaseModel]] = [cls]
    for name in parts[:-1]:
        sections = [s for field in fields_at(sections, name) for s in sections_of(field.annotation)]
    having = [section for section in sections if parts[-1] in section.model_fields and "type" in section.model_fields]
    if not having:
        return None
    types_ = [str(one) for section in having for one in types_of(section)]
    return f"is a key of type: {' or '.join(dict.fromkeys(types_))} only; remove it, or set that type"


def types_of(section: type[BaseModel]) -> tuple[Any, ...]:
    """The values of `type` by which a section is chosen among its alternatives."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def key_of(cls: type[BaseModel], loc: Sequence[str | int]) -> str:
    """The dotted key of the place that pydantic's error names, which has the `type` of alternatives in between."""
    sections: list[type[BaseModel]] = [cls]
    parts: list[str] = []
    for position, part in enumerate(loc):
        found = fields_at(sections, str(part))
        is_type = not found and any(part in types_of(section) for section in sections)
        if is_type and position < len(loc) - 1:
            sections = [section for section in sections if part in types_of(section)]
            continue
        if not is_type or position < len(loc) - 1:
            parts.append(str(part))
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


def tree_of(key: str, value: Any) -> dict[str, Any]:
    """The tree of one dotted key."""
    tree: dict[str, Any] = {}
    put(tree, key, value)
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
