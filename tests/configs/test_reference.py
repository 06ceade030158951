"""Files and keys of the pipeline's reference are taken as they are written there, and docs/settings.md is what the
models say."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.configs.errors import SettingsError
from grpo.configs.help import rows
from grpo.configs.keys import known_keys
from grpo.configs.loading import load
from grpo.configs.orch import OrchSettings
from grpo.configs.run import PROGRAMS, load_run

from tools.settings_page import reference

HERE = Path(__file__).parent
QUICK_START = [word for role in ("train", "infer", "orch") for word in (f"--{role}", f"{HERE}/quick_start/{role}.yaml")]
REFERENCE: dict[str, Any] = yaml.safe_load((HERE / "reference.yaml").read_text())
GIVEN = "the programs share one folder"
REASONS = {
    "infer.host": "nobody else should reach a server",
    "infer.max_loras": "as many as `max_off_policy_steps` 8 can need",
    "orch.model.name": "a guess would train another model",
    "orch.rollouts_per_example": "a group of one teaches nothing",
    "orch.output_dir": GIVEN,
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
    "train.output_dir": GIVEN,
    "train.transport_type": "follows `rollout_transport.type`",
    "train.max_async_level": "follows the orchestrator's",
}
"""Why a default is not that of the reference."""


def test_the_quick_starts_files_make_one_run_in_the_folder_that_one_of_them_names() -> None:
    run = load_run(None, [*QUICK_START, "--train.learning_rate", "1e-3"])
    assert run.train.settings.recipe == "fp8_hybrid"
    assert run.train.settings.learning_rate == 1e-3
    assert Path(run.infer.settings.output_dir) == Path(run.orch.settings.output_dir) == Path("outputs")
    assert (run.orch.settings.batch_size, run.orch.settings.sampling.max_tokens) == (128, 128)
    with pytest.raises(SettingsError) as caught:
        load_run(None, [*QUICK_START, "--train.sequence_len", "512"])
    [problem] = caught.value.problems
    assert (problem.origin, problem.key, problem.value) == (QUICK_START[-1], "seq_len", 2048)


@pytest.mark.parametrize("settings", [REFERENCE, *REFERENCE["examples"]])
def test_every_key_and_example_of_the_reference_is_taken(settings: dict[str, Any], tmp_path: Path) -> None:
    for role in ("train", "infer", "orch"):
        if role in settings:
            (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings[role]))
            load(PROGRAMS[role], file=tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("role", "given"),
    [
        ("train", "per_device_train_batch_size=2"),
        ("orch", "sampling.top_p=0.9"),
        ("train", "num_train_epochs=3"),
    ],
)
def test_what_cannot_be_honoured_says_why_instead_of_naming_another_key(role: str, given: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(PROGRAMS[role], file=HERE / "quick_start" / f"{role}.yaml", arguments=[f"--{given}"])
    [problem] = caught.value.problems
    assert problem.key == given.partition("=")[0]
    assert "did you mean" not in problem.message


def test_defaults_are_those_of_the_reference_but_where_there_is_a_reason() -> None:
    differing = set[str]()
    for role, keys in yaml.safe_load((HERE / "reference_defaults.yaml").read_text()).items():
        ours: dict[str, list[Any]] = {}
        for key, _, value, _ in rows(PROGRAMS[role]):
            ours.setdefault(key, []).append(yaml.safe_load(value))
        differing |= {f"{role}.{key}" for key, theirs in keys.items() if theirs not in ("none", *ours[key])}
    assert differing == REASONS.keys()


def test_the_page_is_up_to_date() -> None:
    page = HERE.parents[1] / "docs" / "settings.md"
    assert page.read_text() == reference(), "run: python -m tools.settings_page > docs/settings.md"


def test_every_key_has_a_row_with_its_meaning() -> None:
    listed = {key.replace("[]", ""): meaning for key, _, _, meaning in rows(OrchSettings)}
    keys = known_keys(OrchSettings)
    assert set(listed) == {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert all(listed.values())
    assert {"filters[].type", "env[].id"} <= {key for key, *_ in rows(OrchSettings)}
