"""docs/settings.md, the table of all settings: `python -m tools.settings_page > docs/settings.md`."""

from collections.abc import Iterator

from pydantic import BaseModel

from configs.common import ProcessSettings
from configs.help import one_line, rows
from configs.infer import InferSettings, TeacherServerSettings
from configs.orch import OrchSettings
from configs.run import SHARED, RunSettings
from configs.train import TrainSettings

_HEAD = """# Settings

Made from the settings models by `python -m tools.settings_page > docs/settings.md`; a test compares the two.

`run.yaml` has what the programs share at its top, and below `train`, `infer`, `orch` and `teacher` the keys of one
program. A file of one program alone has its keys at the top, the shared ones included. Every key can also be given on
the command line (`grpo quickstart --train.learning_rate 1e-3`, `grpo-train train.yaml --learning_rate 1e-3`) and in the
environment (`GRPO_TRAIN_LEARNING_RATE=1e-3`, `GRPO_TRAIN_LOSS__ADV_TAU=0`, `GRPO_RUN_MAX_STEPS=20`). Precedence,
highest first: command line, environment, file, default. Of a program's key and the shared one that stands for it, the
program's holds. `env` at the top stands for `orch.env`; there and on the command line (`--env FILE:CLASS`) an id alone
is enough. With a file for each program (`grpo --train train.yaml --infer infer.yaml --orch orch.yaml`), what one
of them says and another leaves open, though both must agree in it, holds for both.

A path in a file (of a model, a file of yours, or a value of `args` that begins with `./` or `../`) is relative to that
file; `output_dir` is relative to where the command is given. Unknown keys, keys given twice and keys without effect
are refused, with the file or variable, the key, the value and what to do; so are variables that begin with `GRPO_` and
that nothing reads (but those that end in `_KEY` or `_TOKEN`, whose names are settings).

Values are read by the sources of pydantic-settings: `YamlConfigSettingsSource`, `EnvSettingsSource` and, by dotted key,
`CliSettingsSource`. Two things they do not do were tried with version 2.16 and are done in `configs/loading.py`:
`BaseSettings` merges its sources and forgets which of them had a value, which every message here names; and
`CliSettingsSource` splits a command line by argparse, which takes the last of two `--seed` without a word, cannot have
a switch both with and without a value, and stops at its first error.
"""


def _table(title: str, cls: type[BaseModel], about: str, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield f"{one_line(cls.__doc__)} {about}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key, what, value, meaning in rows(cls):
        if key.split(".")[0] not in left_out:
            yield f"| `{key}` | {what} | `{value}` | {meaning.replace('|', chr(92) + '|')} |"


def reference() -> str:
    """The whole page."""
    programs: tuple[type[ProcessSettings], ...] = (TrainSettings, InferSettings, OrchSettings)
    lines = [_HEAD.rstrip("\n")]
    shared = "Keys that stand for several of the programs' keys are said once here."
    lines += _table(
        "What the programs share", RunSettings, shared, frozenset({"train", "infer", "orch", "teacher", "env[]"})
    )
    for cls in programs:
        same = {key.partition(".")[0] for key, keys in SHARED.items() if f"{cls.role}.{key}" in keys}
        names = ", ".join(f"`{key}`" for key in sorted(same))
        about = f"Environment prefix: `{cls.env_prefix}`. A file of its own also has {names}, as above."
        lines += _table(f"grpo-{cls.role}", cls, about, frozenset(same))
    about = (
        "Its keys are those of grpo-infer but what only a server of the policy can do; environment prefix "
        f"`{TeacherServerSettings.env_prefix}`."
    )
    lines.append(f"\n## teacher\n\n{one_line(TeacherServerSettings.__doc__)} {about}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
