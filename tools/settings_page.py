"""docs/settings.md, the table of all settings: `python -m tools.settings_page > docs/settings.md`."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from grpo.configs.common import ProcessSettings
from grpo.configs.help import Row, one_line, rows
from grpo.configs.infer import InferSettings, TeacherServerSettings
from grpo.configs.orch import OrchSettings
from grpo.configs.run import PROGRAMS, SHARED, RunSettings
from grpo.configs.train import TrainSettings
from pydantic import BaseModel

_HEAD = """# Settings

Made from the settings models by `python -m tools.settings_page > docs/settings.md`.

A `run.yaml` has shared keys at its top, and below `train`, `infer`, `orch` and `teacher` each program's own, which come
first. A file for one program has all its keys at the top. `env` at the top stands for `orch.env`; an id alone is
enough. No file is needed: `grpo --model MODEL --env ENVIRONMENT`.

Every key is also an option (`grpo quickstart --train.learning_rate 1e-3`, `grpo-train train.yaml --learning_rate
1e-3`) and an environment variable (`GRPO_TRAIN_LEARNING_RATE=1e-3`, `GRPO_TRAIN_LOSS__ADV_TAU=0`,
`GRPO_RUN_MAX_STEPS=20`). Options come before variables, variables before files, files before defaults. With a file
per program (`grpo --train train.yaml --infer infer.yaml --orch orch.yaml`), keys that must agree need to be in one
only.

Paths in a file are relative to it (values of `args` if they begin with `./` or `../`); `output_dir` is relative to the
current directory. Unknown keys, keys given twice, keys without effect, and `GRPO_` variables that nothing reads
(except `…_KEY` and `…_TOKEN`) are refused, with their origin and the remedy.

A key whose default is `null` takes `null` besides its type.
"""

REFERENCE = Path(__file__).parents[1] / "tests" / "configs" / "reference_defaults.yaml"
"""All rows of the reference of the pipeline that this one implements."""
_GIVEN = "the programs share one folder"
REASONS = {
    "infer.host": "nobody else should reach a server",
    "infer.max_loras": "as many as `max_off_policy_steps` 8 can need",
    "orch.model.name": "a guess would train another model",
    "orch.rollouts_per_example": "a group of one teaches nothing",
    "orch.output_dir": _GIVEN,
    "orch.ckpt.interval": "without checkpoints a killed run begins again",
    "orch.ckpt.keep_last": "`null` would fill the disk",
    "orch.eval.num_examples": "a large data set would take long",
    "orch.report_to.project": "the product's own name",
    "train.sequence_len": "the orchestrator's `seq_len`",
    "train.learning_rate": "what others take for adapters of 0.5 to 8 billion weights",
    "train.optimizer": "adapters are small, and 8-bit state is slower",
    "train.recipe": "fp32 on a CPU, where trainer and server then agree best",
    "train.gradient_accumulation_steps": "a batch makes one step",
    "train.per_device_train_batch_size": "a micro-batch is one packed sequence",
    "train.output_dir": _GIVEN,
    "train.transport_type": "follows `rollout_transport.type`",
    "train.max_async_level": "follows the orchestrator's",
}
"""Why a default is not that of the reference."""
ALIKE = {"preferences.teachers[]": "hints.model", "preferences.judge": "hints.model", "eval.env[]": "env[]"}
"""Sections with the keys of an earlier one, which the page lists once."""
NONE = frozenset[Row]()
_DIFFERING = """
## Defaults that are not the reference's

All 124 rows of the pipeline's reference are keys here; these have other defaults. Without an `eval` section the
training environments are evaluated before the first and after the last step. A run without `max_steps` ends after 200.
"""


def differing() -> list[tuple[str, str, str]]:
    """Each key whose default is not that of the reference, both defaults as they are written in a file. Raises
    AssertionError where REASONS has others."""
    found = []
    for role, keys in yaml.safe_load(REFERENCE.read_text()).items():
        ours: dict[str, list[str]] = {}
        for key, _, value, _ in rows(PROGRAMS[role]):
            ours.setdefault(key, []).append(value)
        for key, theirs in keys.items():
            if theirs != "none" and theirs not in map(yaml.safe_load, ours[key]):
                text = "null" if theirs is None else str(theirs)
                found.append((f"{role}.{key}", text, ours[key][0]))
    assert {key for key, _, _ in found} == REASONS.keys(), f"REASONS must have {[key for key, _, _ in found]}"
    return found


def _table(
    title: str, cls: type[BaseModel], about: str, left_out: frozenset[str] = frozenset(), told: frozenset[Row] = NONE
) -> Iterator[str]:
    """The table of one program. Keys of equal type, default and meaning share a row; rows that another table has told
    are left out."""
    found = [row for row in rows(cls) if row[0].split(".")[0] not in left_out]
    again = ", ".join(f"`{row[0]}`" for row in found if row in told)
    yield f"\n## {title}\n"
    yield f"{one_line(cls.__doc__)} {about}{f' {again} are as in grpo-train.' if again else ''}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        section = next((one for one in ALIKE if row[0].startswith(f"{one}.")), None)
        if section is None and row not in told:
            alike.setdefault(row[1:], []).append(f"`{row[0]}`")
        elif section is not None and row[0] == f"{section}.{_keys(found, section)[0][0]}":
            assert _keys(found, section) == _keys(found, ALIKE[section]), f"{section} is not like {ALIKE[section]}"
            alike.setdefault(("", "", f"The keys of `{ALIKE[section]}`."), []).append(f"`{section}.…`")
    for (what, value, meaning), keys in alike.items():
        cells = [", ".join(keys), _types(what, value), f"`{value}`" if value else "", meaning.replace("|", "\\|")]
        yield f"| {' | '.join(cells)} |"


def _types(what: str, value: str) -> str:
    """A setting's types; a default of null is one of them anyway."""
    return (what.removesuffix(" or null") if value == "null" else what).replace(" or ", ", ")


def _keys(found: list[Row], section: str) -> list[Row]:
    """The rows of a section, by their keys in it."""
    return [(row[0].removeprefix(f"{section}."), *row[1:]) for row in found if row[0].startswith(f"{section}.")]


def reference() -> str:
    """The whole page."""
    programs: tuple[type[ProcessSettings], ...] = (TrainSettings, InferSettings, OrchSettings)
    lines = [_HEAD.rstrip("\n")]
    shared = "A key that several programs have is listed once, here."
    lines += _table(
        "What the programs share", RunSettings, shared, frozenset({"train", "infer", "orch", "teacher", "env[]"})
    )
    told = frozenset[Row]()
    for cls in programs:
        same = {key.partition(".")[0] for key, keys in SHARED.items() if f"{cls.role}.{key}" in keys}
        names = ", ".join(f"`{key}`" for key in sorted(same))
        about = f"Environment prefix: `{cls.env_prefix}`. A file of its own also has {names}, as above."
        lines += _table(f"grpo-{cls.role}", cls, about, frozenset(same), told)
        told |= frozenset(row for row in rows(cls) if row[0].startswith("ckpt."))
    about = (
        "Its keys are those of grpo-infer, except those for policy versions. Environment prefix: "
        f"`{TeacherServerSettings.env_prefix}`."
    )
    lines.append(f"\n## teacher\n\n{one_line(TeacherServerSettings.__doc__)} {about}")
    lines += [_DIFFERING, "| key | reference | here | why |\n|---|---|---|---|"]
    lines += [f"| `{key}` | `{theirs}` | `{ours}` | {REASONS[key]} |" for key, theirs, ours in differing()]
    return re.sub(r"`grpo docs (\w+)`", r"[\1.md](\1.md)", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
