"""What of the settings may differ when a run goes on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.errors import SettingsError
from grpo.configs.resuming import changes, differences, record_of
from grpo.transport.run import code_changes, create_run, join_run

from grpo.run_files import read_run

RUN = Path("outputs/run")


def test_differences_have_dotted_keys_and_members_of_a_list_the_lists() -> None:
    before = {"a": 1, "b": {"c": 2, "d": [{"e": 3}]}, "f": [1, 2], "gone": None}
    now = {"a": 1, "b": {"c": 5, "d": [{"e": 4}]}, "f": [1]}
    assert list(differences(before, now)) == [("b.c", 2, 5), ("b.d.e", 3, 4), ("f", [1, 2], [1])]


def test_what_only_says_where_and_how_long_may_differ() -> None:
    now = record_of({"max_steps": 20, "ckpt": {"interval": 2}, "seed": 1})
    assert changes("train", {}, now, run=RUN) == []
    earlier = {"settings": {"max_steps": 10, "ckpt": {"interval": 5}, "seed": 1}}
    assert changes("train", earlier, now, run=RUN) == [("ckpt.interval", 5, 2), ("max_steps", 10, 20)]
    assert changes("train", earlier | {"base_model": "m"}, now, run=RUN), "who knows no base model changes none"


@pytest.mark.parametrize(
    ("role", "settings", "base_model", "named"),
    [
        ("train", {"seed": 9}, "m", r"seed = 9: was 1 .*output_dir"),
        ("train", {"seed": 1, "model": "x"}, "other", r"model = 'x': .*base model"),
        ("orch", {"seed": 1, "env": [{"address": "a", "id": "b"}]}, "m", r"env = "),
        ("infer", {"seed": 1, "dtype": "float16"}, "m", r"dtype = 'float16': was None"),
    ],
)
def test_what_decides_the_result_must_stay_and_is_named(
    role: Any, settings: dict[str, Any], base_model: str, named: str
) -> None:
    earlier = {"settings": {"seed": 1}, "base_model": "m"}
    with pytest.raises(SettingsError, match=named):
        changes(role, earlier, record_of(settings, base_model), run=RUN)


def test_a_run_whose_code_has_changed_is_refused_or_with_a_word_taken_and_noted_with_the_step(tmp_path: Path) -> None:
    code, run = tmp_path / "mine.py", create_run(tmp_path / "run")

    def join(**more: Any) -> None:
        record = record_of({"env": [{"id": f"{code}:Env"}], "resume_with_changed_code": False} | more)
        compare = partial(changes, "orch", now=record, run=run.path)
        join_run(run.path, role="orch", record=record, compare=compare, timeout_s=1)

    code.write_text("reward = 1")
    for _ in range(2):
        join()
    code.write_text("reward = 2")
    (run.broadcasts / "step_000007").mkdir()
    with pytest.raises(SettingsError, match=r"env\.0\.id.*mine\.py.*resume_with_changed_code"):
        join()
    join(resume_with_changed_code=True)
    join()
    program = read_run(run.path).programs["orch"]
    [change] = [one for one in program["changes"] if one["key"].startswith("code ")]
    assert (change["step"], change["now"]) == (7, program["code"][f"env.0.id {code}"])
    assert change["before"] != change["now"]
    assert code_changes(read_run(run.path)) == {7: [str(code)]}
