"""Critiques, what becomes of the programs that they criticise, and what that earns them."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.environments.critique import feedback, operators
from grpo.environments.critique.critique import Critique
from grpo.environments.critique.operators import judgement_of
from grpo.environments.critique.testing import extract_program
from grpo.environments.sandbox.records import Limits, Result, SandboxError
from grpo.orchestrator.rollouts.play import play

from grpo import MockClient

JUDGED = "Overall judgment: Incorrect"
RIGHT = "print(int(input()) * 2)"
PROBLEM = {
    "id": "double",
    "question": "Double n.",
    "inputs": ["1", "2", "3", "4"],
    "outputs": ["2", "4", "6", "8"],
    "program": "print(int(input()) + 2)",
}


class FakeSandbox:
    """Runs `print(int(input()) * K)` by looking at it. Counts the runs; fails every one where told to."""

    def __init__(self, failure: SandboxError | None = None) -> None:
        self.failure, self.num_runs = failure, 0

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Result:
        self.num_runs += 1
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        out = str(int(stdin) * 2 if "* 2" in program else int(stdin) + 2).encode()
        return Result(exit_code=0, stdout=out, stderr=b"", limit=None)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Settings with one problem to train on and one to evaluate on."""
    for name in ("problems", "eval_problems"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PROBLEM))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("problems", "eval_problems")}


def critique(files: Mapping[str, Any], sandbox: FakeSandbox, *revisions: str, **args: Any) -> Critique:
    """`sandbox` stands in for the service, of which nothing is asked."""
    reviser = {"reviser": {"mock": [f"Here it is:\n```python\n{one}\n```" for one in revisions]}} if revisions else {}
    environment = Critique(**files, sandbox={"url": "http://127.0.0.1:1"}, **reviser, **args)
    environment.scorer.sandbox = sandbox
    return environment


@pytest.mark.parametrize(
    ("program", "counting", "reward"),
    [
        (RIGHT, "pass_rate", 1.0),
        (PROBLEM["program"], "all_or_nothing", 0.0),
        (PROBLEM["program"], "pass_rate", 0.25),  # n + 2 is right for 2 alone, one of four tests
    ],
)
async def test_the_share_of_tests_that_the_revision_passes_is_the_reward(
    files: Mapping[str, Any], program: str, counting: str, reward: float
) -> None:
    environment = critique(files, FakeSandbox(), program, counting=counting)
    [example] = environment.dataset("train")
    outcome = await play(environment, example, [JUDGED])
    assert outcome.rewards == {"policy": reward}
    assert outcome.metrics == {"tests_passed": reward, "judged": 1.0, "revised": 1.0}
    assert outcome.extras == {"problem": "double", "revision": f"{program}\n"}
    unjudged = await play(environment, example, ["It should be * 2."])
    assert unjudged.metrics == {"tests_passed": 0.0, "judged": 0.0, "revised": 0.0}


async def test_the_model_before_training_revises_and_sees_the_question_the_program_and_the_critique(
    files: Mapping[str, Any],
) -> None:
    asked: list[tuple[str, str]] = []

    def revise(model: str, messages: Sequence[Mapping[str, Any]]) -> str:
        asked.append((model, messages[0]["content"]))
        return f"```python\n{RIGHT}\n```"

    environment = critique(files, FakeSandbox())
    outcome = await play(environment, environment.dataset("train")[0], [f"Use {{k}} * 2. {JUDGED}"], asked=revise)
    [(model, prompt)] = asked
    assert model == "base"
    assert all(part in prompt for part in ("Double n.", PROBLEM["program"], f"Use {{k}} * 2. {JUDGED}"))
    assert outcome.rewards == {"policy": 1.0}


async def test_revisions_that_say_the_same_are_run_once_at_the_same_time_and_afterwards(
    files: Mapping[str, Any],
) -> None:
    sandbox = FakeSandbox()
    renamed = "number = int(input())  # a number\nprint(number * 2)"
    environment = critique(files, sandbox, *["n = int(input())\nprint(n * 2)", renamed] * 3)
    example = environment.dataset("train")[0]
    await asyncio.gather(*(play(environment, example, [JUDGED]) for _ in range(6)))
    outcome = await play(environment, example, [JUDGED])
    assert (sandbox.num_runs, outcome.rewards) == (4, {"policy": 1.0})  # one for each test


async def test_a_sandbox_that_fails_costs_the_rollout_and_is_tried_again_for_the_next(files: Mapping[str, Any]) -> None:
    sandbox = FakeSandbox(SandboxError("no room"))
    environment = critique(files, sandbox, RIGHT)
    example = environment.dataset("train")[0]
    results = await asyncio.gather(*(play(environment, example, [JUDGED]) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results)
    sandbox.failure = None
    assert (await play(environment, example, [JUDGED])).rewards == {"policy": 1.0}


def test_the_settings_of_the_page_are_understood(files: Mapping[str, Any], needs_bubblewrap: None) -> None:
    page = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    [given] = yaml.safe_load(block)["env"]
    assert given["id"] == "critique"
    assert len(Critique(**{**given["args"], **files}).dataset("eval")) == 1


# --- what is read of answers ---


@pytest.mark.parametrize(
    ("text", "judgement"),
    [
        ("Fine.\nOverall judgment: Correct", "correct"),
        ("Overall judgment: Correct? No. Overall judgment: Incorrect", "incorrect"),
        ("The program is correct.", None),
    ],
)
def test_the_judgement_of_a_critique(text: str, judgement: str | None) -> None:
    assert judgement_of(text) == judgement


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```python\n\n```", None),
        ("```python\n" * 20_001, None),
    ],
)
def test_the_program_of_an_answer(answer: str, program: str | None) -> None:
    assert extract_program(answer) == program


# --- the small problems ---


async def test_the_small_problems_reward_the_right_critique_in_all_styles(needs_bubblewrap: None) -> None:
    limits = {"wall_s": 60, "cpu_s": 30}
    environment = Critique(reviser="rule", prompt="{question}\n{program}", limits=limits, counting="all_or_nothing")
    first: dict[tuple[str, bool], Mapping[str, Any]] = {}
    for example in environment.dataset("train"):
        question, program = example["prompt"].split("\n")
        first.setdefault((program[:5], "Incorrect" in operators.right_critique(question, program)), example)
    assert len(first) == 6  # three styles, right and wrong programs
    for (_, wrong), example in first.items():
        right = await play(environment, example, [operators.right_critique(*example["prompt"].split("\n"))])
        unmended = await play(environment, example, ["Overall judgment: Correct"])
        assert (right.reward, unmended.reward) == (1.0, float(not wrong)), example["prompt"]


# --- data for a supervised stage ---


async def test_critiques_that_worked_are_kept_with_the_prompt_of_the_policy(files: Mapping[str, Any]) -> None:
    told: list[str] = []

    def write(messages: Sequence[Mapping[str, Any]]) -> str:
        told.append(messages[0]["content"])
        return ["No judgement.", f"Use * 2. {JUDGED}", f"Use * 2. {JUDGED}", "Overall judgment: Correct"][len(told) - 1]

    environment = critique(files, FakeSandbox(), RIGHT, "print(0)")
    [example] = environment.dataset("train")
    rows = await feedback.critiques(environment, MockClient(write), 4)
    assert rows == [{"prompt": example["prompt"], "answer": f"Use * 2. {JUDGED}"}]
    assert all("passes 25% of them" in prompt for prompt in told)
