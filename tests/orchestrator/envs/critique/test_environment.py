"""Critiques, what becomes of the programs that they criticise, and what that earns them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from orchestrator.envs.critique import Critique
from orchestrator.envs.critique.operators import right_critique
from orchestrator.rollouts.replay import play
from orchestrator.sandbox import Input, Limits, Result, SandboxError, SandboxMissing, SandboxUnreachable
from tests.orchestrator.sandbox.conftest import needs_bubblewrap

__all__ = ["needs_bubblewrap"]

JUDGED = "Overall judgment: Incorrect"
PROBLEM = {
    "id": "double",
    "question": "Double n.",
    "inputs": ["1", "2", "3", "4"],
    "outputs": ["2", "4", "6", "8"],
    "program": "print(int(input()) + 2)",
}
LIMITS = {"wall_s": 60, "cpu_s": 30}


class FakeSandbox:
    """Runs `print(int(input()) * K)` by looking at it. Counts the runs; fails every one where told to."""

    def __init__(self, failure: SandboxError | None = None) -> None:
        self.failure, self.num_runs = failure, 0
        self.began = asyncio.Event()

    async def run(self, program: str, *, stdin: Input = b"", limits: Limits | None = None) -> Result:
        self.num_runs += 1
        self.began.set()
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        given = int(stdin() if callable(stdin) else stdin)
        out = str(given * 2 if "* 2" in program else given + 2).encode()
        return Result(exit_code=0, stdout=out, stderr=b"", limit=None, wall_s=0.0)

    async def close(self) -> None: ...


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Settings with one problem to train on and one to evaluate on."""
    for name in ("problems", "eval_problems"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PROBLEM))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("problems", "eval_problems")}


def critique(files: Mapping[str, Any], sandbox: FakeSandbox, **args: Any) -> Critique:
    """`sandbox` stands in for the service, of which nothing is asked."""
    environment = Critique(**files, sandbox={"url": "http://127.0.0.1:1"}, **args)
    environment.sandbox = sandbox
    return environment


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```"


async def test_the_share_of_tests_that_the_revision_passes_is_the_reward(files: Mapping[str, Any]) -> None:
    # print(n + 2) is right for 2 alone, one of four tests.
    for program, pass_rate, all_or_nothing in (("print(int(input()) * 2)", 1.0, 1.0), (PROBLEM["program"], 0.25, 0.0)):
        for counting, reward in (("pass_rate", pass_rate), ("all_or_nothing", all_or_nothing)):
            environment = critique(files, FakeSandbox(), reviser={"mock": [block(str(program))]}, counting=counting)
            outcome = await play(environment, environment.dataset("train")[0], [JUDGED])
            assert outcome.rewards == {"policy": reward}
            assert outcome.metrics == {"tests_passed": reward, "judged": 1.0, "revised": 1.0}
            assert outcome.extras == {"problem": "double", "revision": f"{program}\n"}


async def test_a_critique_without_a_judgement_gets_nothing_and_is_not_followed(files: Mapping[str, Any]) -> None:
    sandbox = FakeSandbox()
    environment = critique(files, sandbox, reviser="base")
    outcome = await play(environment, environment.dataset("train")[0], ["It should be * 2."])
    assert outcome.rewards == {"policy": 0.0}
    assert outcome.metrics == {"tests_passed": 0.0, "judged": 0.0, "revised": 0.0}
    assert sandbox.num_runs == 0


async def test_the_model_before_training_revises_and_sees_the_question_the_program_and_the_critique(
    files: Mapping[str, Any],
) -> None:
    asked: list[tuple[str, str]] = []

    def revise(model: str, messages: Sequence[Mapping[str, Any]]) -> str:
        asked.append((model, messages[0]["content"]))
        return block("print(int(input()) * 2)")

    environment = critique(files, FakeSandbox(), reviser="base")
    outcome = await play(environment, environment.dataset("train")[0], [f"Use {{k}} * 2. {JUDGED}"], asked=revise)
    [(model, prompt)] = asked
    assert model == "base"
    for part in ("Double n.", "print(int(input()) + 2)", f"Use {{k}} * 2. {JUDGED}"):
        assert part in prompt
    assert outcome.rewards == {"policy": 1.0}


async def test_the_same_revision_is_run_once_at_the_same_time_and_afterwards(files: Mapping[str, Any]) -> None:
    sandbox = FakeSandbox()
    commented = block("print(int(input()) * 2)  # doubled")
    environment = critique(files, sandbox, reviser={"mock": [block("print(int(input()) * 2)")] * 6 + [commented]})
    example = environment.dataset("train")[0]
    await asyncio.gather(*(play(environment, example, [JUDGED]) for _ in range(6)))
    assert sandbox.num_runs == 4  # one for each test
    outcome = await play(environment, example, [JUDGED])
    assert (sandbox.num_runs, outcome.rewards) == (4, {"policy": 1.0})


async def test_verdicts_may_outlive_the_process(files: Mapping[str, Any], tmp_path: Path) -> None:
    for num_runs in (4, 0):
        sandbox = FakeSandbox()
        environment = critique(
            files, sandbox, reviser={"mock": [block("print(int(input()) * 2)")]}, cache=str(tmp_path / "cache.sqlite")
        )
        outcome = await play(environment, environment.dataset("train")[0], [JUDGED])
        assert (sandbox.num_runs, outcome.rewards) == (num_runs, {"policy": 1.0})
        await environment.close()


async def test_a_sandbox_that_fails_costs_the_rollout_and_is_tried_again_for_the_next(
    files: Mapping[str, Any],
) -> None:
    sandbox = FakeSandbox(SandboxError("no room"))
    environment = critique(files, sandbox, reviser={"mock": [block("print(int(input()) * 2)")]})
    example = environment.dataset("train")[0]
    results = await asyncio.gather(*(play(environment, example, [JUDGED]) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results)
    sandbox.failure = None
    assert (await play(environment, example, [JUDGED])).rewards == {"policy": 1.0}


async def test_a_rollout_that_is_cancelled_leaves_the_run_to_those_that_wait_with_it(files: Mapping[str, Any]) -> None:
    sandbox = FakeSandbox()
    environment = critique(files, sandbox, reviser={"mock": [block("print(int(input()) * 2)")]})
    example = environment.dataset("train")[0]
    first, second = (asyncio.create_task(play(environment, example, [JUDGED])) for _ in range(2))
    await asyncio.wait_for(sandbox.began.wait(), 30)
    first.cancel()
    assert (await asyncio.wait_for(second, 30)).rewards == {"policy": 1.0}
    assert (first.cancelled(), sandbox.num_runs) == (True, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"counting": "some"}, "counting"),
        ({"eval_problems": "a.jsonl"}, "eval_problems"),
        ({"reviser": "rules"}, "rules"),
        ({"reviser_max_tokens": 0}, "reviser_max_tokens"),
        ({"sandbox": "docker"}, "docker"),
        ({"sandbox": {"address": "http://127.0.0.1:1"}}, "local"),
        ({"limits": {"wall": 3}}, "wall_s"),
        ({"prompt": "{question}"}, "program"),
    ],
)
def test_what_cannot_be_honoured_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Critique(**{"sandbox": {"url": "http://127.0.0.1:1"}, **args})


def test_the_settings_of_the_page_are_understood(
    files: Mapping[str, Any], tmp_path: Path, needs_bubblewrap: None
) -> None:
    page = (Path(__file__).parents[4] / "docs" / "sandbox.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    [given] = yaml.safe_load(block)["env"]
    assert given["id"] == "critique"
    environment = Critique(**{**given["args"], **files, "cache": str(tmp_path / "verdicts.sqlite")})
    assert len(environment.dataset("eval")) == 1


def test_the_rule_revises_no_problems_of_others(files: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="rule"):
        critique(files, FakeSandbox(), reviser="rule")


def test_without_bubblewrap_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxMissing):
        Critique()


# --- in sandboxes ---


@pytest.mark.parametrize("status", [200, 403])
async def test_an_external_service_runs_the_revisions(files: Mapping[str, Any], status: int) -> None:
    """It prints 2 for every input, which one test of four expects; or it refuses, which is no fault of the critique."""
    run = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "2\n", "stderr": ""}

    async def run_code(request: web.Request) -> web.Response:
        return web.json_response({"status": "Success", "run_result": run}, status=status)

    service = web.Application()
    service.router.add_post("/run_code", run_code)
    async with TestServer(service) as server:
        url = str(server.make_url("/"))
        environment = Critique(**files, sandbox={"url": url}, reviser={"mock": [block("print(2)")]})
        playing = play(environment, environment.dataset("train")[0], [JUDGED])
        if status == 200:
            assert (await playing).rewards == {"policy": 0.25}
        else:
            with pytest.raises(SandboxUnreachable, match="403"):
                await playing
        await environment.close()


@pytest_asyncio.fixture
async def small_problems(needs_bubblewrap: None) -> AsyncIterator[Critique]:
    environment = Critique(
        reviser="rule", prompt="{question}\n{program}", parallel=2, limits=LIMITS, counting="all_or_nothing"
    )
    yield environment
    await environment.close()


async def test_the_small_problems_reward_the_right_critique_in_all_styles(small_problems: Critique) -> None:
    first: dict[tuple[str, bool], Mapping[str, Any]] = {}
    for example in small_problems.dataset("train"):
        question, program = example["prompt"].split("\n")
        wrong = "Incorrect" in right_critique(question, program)
        first.setdefault((program[:5], wrong), example)
    assert len(first) == 6  # three styles, right and wrong programs
    for example in first.values():
        critique = right_critique(*example["prompt"].split("\n"))
        right = await play(small_problems, example, [critique])
        assert right.rewards == {"policy": 1.0}, example["prompt"]
        if "Incorrect" in critique:
            unmended = await play(small_problems, example, ["Overall judgment: Correct"])
            assert unmended.rewards == {"policy": 0.0}, example["prompt"]
