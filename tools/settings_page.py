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

A `run.yaml` has shared keys at its top and the keys of one program below `train`, `infer`, `orch` and `teacher`; a
file for one program has all its keys at the top. A program's own key comes before the shared one. `env` at the top
stands for `orch.env`; there and on the command line an id alone is enough. No file is needed: `grpo --model MODEL
--env ENVIRONMENT`.

Every key can also be an option (`grpo quickstart --train.learning_rate 1e-3`, `grpo-train train.yaml --learning_rate
1e-3`) or an environment variable (`GRPO_TRAIN_LEARNING_RATE=1e-3`, `GRPO_TRAIN_LOSS__ADV_TAU=0`,
`GRPO_RUN_MAX_STEPS=20`). Options come before variables, variables before files, files before defaults. With a file
per program (`grpo --train train.yaml --infer infer.yaml --orch orch.yaml`), keys that must agree need to be in one
only.

Paths in a file are relative to that file (values of `args` if they begin with `./` or `../`); `output_dir` is
relative to the current directory. Unknown keys, keys given twice, keys without effect, and `GRPO_` variables that
nothing reads (except `…_KEY` and `…_TOKEN`) are refused, with their origin and the remedy.
"""

REFERENCE = Path(__file__).parents[1] / "tests" / "configs" / "reference_defaults.yaml"
"""All rows of the reference of the pipeline that this one implements."""
_GIVEN = "the three programs share one folder, and all of them find a run without a name"
REASONS = {
    "infer.host": "nobody else should reach a server by default; `null` is all interfaces, as there",
    "infer.max_loras": "as many versions as can be in flight with `max_off_policy_steps` 8",
    "orch.model.name": "a guess would train another model",
    "orch.rollouts_per_example": "with the default advantage a group of one teaches nothing, and is refused",
    "orch.output_dir": _GIVEN,
    "orch.ckpt.interval": "without checkpoints a killed run begins again, and every batch stays on disk",
    "orch.ckpt.keep_last": "checkpoints of a long run would fill the disk; `null` keeps all, as there",
    "orch.eval.num_examples": "a large data set would take long before the first step; `-1` is all, as there",
    "orch.report_to.project": "the product's own name",
    "train.sequence_len": "it must agree with the orchestrator's `seq_len`",
    "train.learning_rate": "what others take for adapters of models of 0.5 to 8 billion weights; 1e-6 for all weights",
    "train.optimizer": "adapters are small, and 8-bit state is slower",
    "train.recipe": "`null` is bf16 on a GPU, and fp32 on a CPU, where trainer and server then agree best",
    "train.gradient_accumulation_steps": "a batch makes one step, however many micro-batches it has",
    "train.per_device_train_batch_size": "a micro-batch is one packed sequence; to compute more, make it longer",
    "train.output_dir": _GIVEN,
    "train.transport_type": "`null` follows `rollout_transport.type`, whose default is `filesystem`",
    "train.max_async_level": "`null` follows the orchestrator's, whose default is 1",
}
"""Why a default is not that of the reference."""
ALIKE = {"preferences.teachers[]": "hints.model", "preferences.judge": "hints.model", "eval.env[]": "env[]"}
"""Sections with the keys of an earlier one, which the page lists once."""
_DIFFERING = """
## Defaults that are not the reference's

All 124 rows of the pipeline's reference are keys here; those below have other defaults. Besides, without an `eval`
section the training environments are evaluated before the first and after the last step, and a run without
`max_steps` ends after 200.
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


def _table(title: str, cls: type[BaseModel], about: str, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield f"{one_line(cls.__doc__)} {about}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    found = [row for row in rows(cls) if row[0].split(".")[0] not in left_out]
    for key, what, value, meaning in found:
        section = next((one for one in ALIKE if key.startswith(f"{one}.")), None)
        if section is None:
            yield f"| `{key}` | {what} | `{value}` | {meaning.replace('|', chr(92) + '|')} |"
        elif key == f"{section}.{_keys(found, section)[0][0]}":
            assert _keys(found, section) == _keys(found, ALIKE[section]), f"{section} is not like {ALIKE[section]}"
            yield f"| `{section}.…` | | | The keys of `{ALIKE[section]}`. |"


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
    for cls in programs:
        same = {key.partition(".")[0] for key, keys in SHARED.items() if f"{cls.role}.{key}" in keys}
        names = ", ".join(f"`{key}`" for key in sorted(same))
        about = f"Environment prefix: `{cls.env_prefix}`. A file of its own also has {names}, as above."
        lines += _table(f"grpo-{cls.role}", cls, about, frozenset(same))
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
