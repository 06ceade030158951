"""`grpo ablate` is refused at once where no environment marks the errors that hints are for."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

import deploy.launcher
from configs.orch import OrchSettings
from deploy.ablate import main
from deploy.compare import CannotCompare
from deploy.plan import Plan
from deploy.single_questions import only_single_questions
from tests.deploy.test_ablate import PAIRS, PRESET

EPISODES = {"id": "zorplex"}
QUESTIONS = {"id": "reverse-text"}


def only(*envs: dict[str, Any]) -> bool:
    settings = {"model": {"name": "m"}, "env": envs, "rollouts_per_example": 4}
    return only_single_questions(OrchSettings.model_validate(settings))


def test_one_environment_of_episodes_is_enough() -> None:
    assert only(QUESTIONS)
    assert not only(QUESTIONS, EPISODES)


def test_what_another_machine_serves_may_be_of_episodes() -> None:
    assert not only(QUESTIONS, EPISODES | {"address": "http://192.0.2.1:9"})


def test_an_environment_that_cannot_be_constructed_is_no_arm_s(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text("class Broken:\n    pass\n")
    with pytest.raises(CannotCompare, match=r"(?s)derive it from orchestrator.envs.Environment.*; the runs would end"):
        only({"id": f"{tmp_path / 'envs.py'}:Broken"})


def test_one_that_needs_more_memory_than_it_may_have_is_no_arm_s_either(tmp_path: Path) -> None:
    source = """
        from orchestrator.envs.base import Environment
        from orchestrator.episodes.rubric import Rubric

        class Large(Environment):
            def __init__(self):
                self.rows = bytearray(400_000_000)
                self.rubric = Rubric([lambda completion, example: 0.0])

            def dataset(self, split):
                return [{"prompt": "a", "answer": "b"}]
    """
    (tmp_path / "envs.py").write_text(textwrap.dedent(source))
    large = {"id": f"{tmp_path / 'envs.py'}:Large"}
    assert only(large)
    with pytest.raises(CannotCompare, match=r"(?s)MemoryError.*; the runs would end"):
        only(large | {"memory_gb": 0.2})


@pytest.mark.parametrize("option", [(), ("--dry-run",)])
def test_nothing_is_trained_where_the_arms_with_hints_could_not_be(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Plan] = []
    monkeypatch.setattr(deploy.launcher, "run_plan", started.append)
    with pytest.raises(SystemExit) as ended:
        main([PRESET, *PAIRS, *option])
    assert (ended.value.code, started) == (2, [])
    assert (
        "error: arm sdpo (default): loss.alpha_sdpo = 0.1: is above 0, and no environment marks errors: all are single "
        "questions"
    ) in capsys.readouterr().err
