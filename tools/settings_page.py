"""docs/settings.md, all settings: `python -m tools.settings_page > docs/settings.md`."""

import re
from collections.abc import Iterator

from grpo.configs.common import ProcessSettings
from grpo.configs.help import Row, one_line, rows
from grpo.configs.infer import InferSettings, TeacherServerSettings
from grpo.configs.orch import OrchSettings
from grpo.configs.run import SHARED, RunSettings
from grpo.configs.train import TrainSettings
from pydantic import BaseModel

_HEAD = """# Settings

Made from the settings models by `python -m tools.settings_page > docs/settings.md`.

A `run.yaml` has shared keys at its top, and below `train`, `infer`, `orch` and `teacher` each program's own, which come
first. A file for one program has all its keys at the top, with the shared ones that its `--help` lists. `env` at
the top stands for `orch.env`; an id alone is enough. No file is needed: `grpo --model MODEL --env ENVIRONMENT`.

Every key is also an option (`grpo quickstart --train.learning_rate 1e-3`, `grpo-train train.yaml --learning_rate
1e-3`) and an environment variable (`GRPO_TRAIN_LEARNING_RATE=1e-3`, `GRPO_TRAIN_LOSS__ADV_TAU=0`,
`GRPO_RUN_MAX_STEPS=20`). Options come before variables, variables before files, files before defaults. With a file
per program (`grpo --train train.yaml --infer infer.yaml --orch orch.yaml`), keys that must agree need to be in one
only.

Paths in a file are relative to it (values of `args` if they begin with `./` or `../`); `output_dir` is relative to the
current directory. Unknown keys, keys given twice, keys without effect, and `GRPO_` variables that nothing reads
(except `…_KEY` and `…_TOKEN`) are refused, with their origin and the remedy.

Behind a key stands its default, in brackets what else it takes. A key without a default is required or else `null`.
Without an `eval` section the training environments are evaluated before the first and after the last step.
"""

ALIKE = {"preferences.teachers[]": "hints.model", "preferences.judge": "hints.model", "eval.env[]": "env[]"}
"""Sections with the keys of an earlier one, which the page lists once."""
NONE = frozenset[Row]()


def _list(
    title: str, cls: type[BaseModel], about: str, left_out: frozenset[str] = frozenset(), told: frozenset[Row] = NONE
) -> Iterator[str]:
    """The keys of one program. Those of equal type, default and meaning share a line; those that another list has told
    are left out."""
    found = [row for row in rows(cls) if row[0].split(".")[0] not in left_out]
    again = ", ".join(f"`{row[0]}`" for row in found if row in told)
    yield f"\n## {title}\n"
    yield f"{one_line(cls.__doc__)} {about}{f' {again} are as in grpo-train.' if again else ''}\n"
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        section = next((one for one in ALIKE if row[0].startswith(f"{one}.")), None)
        if section is None and row not in told:
            alike.setdefault(row[1:], []).append(row[0])
        elif section is not None and row[0] == f"{section}.{_keys(found, section)[0][0]}":
            assert _keys(found, section) == _keys(found, ALIKE[section]), f"{section} is not like {ALIKE[section]}"
            alike.setdefault(("", "", f"The keys of `{ALIKE[section]}`."), []).append(f"{section}.…")
    for (what, value, meaning), keys in alike.items():
        yield f"- {_given(keys, what, value)}: {meaning}"


def _given(keys: list[str], what: str, value: str) -> str:
    """Keys as they stand on the page: the last with its default, then what it takes as far as the default does not
    show it."""
    shown = {value, "text", "boolean", "mapping", "integer" if value.lstrip("-").isdecimal() else "number"}
    takes = what.split(" or ") + ["required"] * (value == "required")
    if value in {"null", "required"}:
        shown, value = {"null"}, ""
    takes = [one for one in takes if one not in shown]
    names = [f"`{key}`" for key in keys[:-1]] + [f"`{keys[-1]}: {value}`" if value else f"`{keys[-1]}`"]
    return ", ".join(names) + (f" ({', '.join(takes)})" if what and takes else "")


def _keys(found: list[Row], section: str) -> list[Row]:
    """The rows of a section, by their keys in it."""
    return [(row[0].removeprefix(f"{section}."), *row[1:]) for row in found if row[0].startswith(f"{section}.")]


def reference() -> str:
    """The whole page."""
    programs: tuple[type[ProcessSettings], ...] = (TrainSettings, InferSettings, OrchSettings)
    lines = [_HEAD.rstrip("\n")]
    shared = "A key that several programs have is listed once, here."
    lines += _list(
        "What the programs share", RunSettings, shared, frozenset({"train", "infer", "orch", "teacher", "env[]"})
    )
    told = frozenset[Row]()
    for cls in programs:
        same = {key.partition(".")[0] for key, keys in SHARED.items() if f"{cls.role}.{key}" in keys}
        about = f"Environment prefix: `{cls.env_prefix}`."
        lines += _list(f"grpo-{cls.role}", cls, about, frozenset(same), told)
        told |= frozenset(row for row in rows(cls) if row[0].startswith("ckpt."))
    about = (
        "Its keys are those of grpo-infer, except those for policy versions. Environment prefix: "
        f"`{TeacherServerSettings.env_prefix}`."
    )
    lines.append(f"\n## teacher\n\n{one_line(TeacherServerSettings.__doc__)} {about}")
    return re.sub(r"`grpo docs (\w+)`", r"[\1.md](\1.md)", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
