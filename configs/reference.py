"""The table of all settings in docs/settings.md: `python -m configs.reference > docs/settings.md`."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.common import ProcessSettings, sections_of
from configs.infer import InferSettings
from configs.orch import OrchSettings
from configs.train import TrainSettings

_HEAD = """# Settings

Made from the settings models by `python -m configs.reference > docs/settings.md`; a test compares the two.
Every key can be set in the program's YAML file, on its command line (`--key value`) and in the environment.
"""


def rows(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every setting; `env[].id` stands for each element of a list."""
    for name, field in cls.model_fields.items():
        sections = sections_of(field.annotation)
        if not sections:
            yield prefix + name, _type(field.annotation), _default(field), _one_line(field.description)
        for section in sections:
            many = "[]" if get_origin(field.annotation) is tuple else ""
            yield from rows(section, f"{prefix}{name}{many}.")


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        return "null" if annotation is type(None) else annotation.__name__
    values = [repr(a) if isinstance(a, str | int | bool) else _type(a) for a in get_args(annotation) if a is not ...]
    name = getattr(annotation, "__name__", "")
    return f"{name}[{', '.join(values)}]" if name in ("tuple", "dict", "list") else " or ".join(values)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _table(cls: type[ProcessSettings]) -> Iterator[str]:
    yield f"\n## grpo-{cls.role}\n"
    yield f"{_one_line(cls.__doc__)} Environment prefix: `{cls.model_config['env_prefix']}`.\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key, kind, default, meaning in rows(cls):
        yield f"| `{key}` | {kind.replace('|', 'or')} | `{default}` | {meaning} |"


def reference() -> str:
    """The whole page."""
    lines = [_HEAD, *(line for cls in (TrainSettings, InferSettings, OrchSettings) for line in _table(cls))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
