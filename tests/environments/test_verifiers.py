"""Environments of the `verifiers` library, with the package of `others/`."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if find_spec("verifiers") is None:
    pytest.skip("the extra verifiers is not installed", allow_module_level=True)
if TYPE_CHECKING:  # importing it takes seconds, which each process that looks for tests would spend
    from grpo.environments.verifiers import Verifiers

from grpo.orchestrator.rollouts.context import CallFailed
from grpo.orchestrator.rollouts.play import play
from grpo.orchestrator.rollouts.state import EpisodeState

# verifiers 0.4 asks the newest tenacity for what it is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")

PACKAGE = Path(__file__).parent / "others" / "backwards_env"
ENV_ID = "backwards-env"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGE))
        patch.setenv("PYTHONPATH", str(PACKAGE))  # for tool servers, which are processes
        yield


@asynccontextmanager
async def made(**settings: Any) -> AsyncIterator["Verifiers"]:
    from grpo.environments.verifiers import Verifiers

    environment = Verifiers(**{"env_id": ENV_ID, **settings})
    try:
        yield environment
    finally:
        await environment.close()


async def played(environment: "Verifiers", answers: Any) -> EpisodeState:
    return await play(environment, environment.dataset("train")[0], answers)


def calls(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CHECKED = """
import verifiers.v1 as vf

class CheckedTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content))

class CheckedTaskset(vf.Taskset[CheckedTask, vf.TasksetConfig]):
    def load(self):
        return [CheckedTask(vf.TaskData(prompt=f"Solve {number}")) for number in range(3)]

class CheckedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    helper: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()

class CheckedEnv(vf.Env[CheckedConfig]):
    async def setup(self, agents):
        agents.checker.trainable = False

    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.helper.run(task.with_data(prompt="Help with it"))
        await agents.helper.run(task.with_data(prompt="Help again"))
        await agents.checker.run(task.with_data(prompt="Is it right?"))

    async def finalize(self, task, episode):
        [check] = episode.by_agent["checker"]
        for trace in episode.by_agent["solver"]:
            trace.record_reward("checked", float("yes" in check.transcript))

__all__ = ["CheckedTaskset", "CheckedEnv"]
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs `checked-env`, and `flaky-env` with the same tasks."""
    (tmp_path / "checked_env.py").write_text(CHECKED)
    (tmp_path / "flaky_env.py").write_text(FLAKY)
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_agents_are_roles_and_one_that_is_not_trained_is_asked(checked: None) -> None:
    told = {"Solve 1": "ab", "Help with it": "abc", "Help again": "abcdefg"}
    async with made(env_id="checked-env", num_eval=1) as environment:
        [example, *_] = environment.dataset("train")
        outcome = await play(environment, example, lambda _, messages: told[messages[-1]["content"]], asked=["yes"])
    assert [reply.role for reply in outcome.trajectory] == ["solver", "helper", "helper"]
    assert outcome.rewards == {"solver": 2.0 + 1.0, "helper": (3.0 + 7.0) / 2}


FLAKY = """
import verifiers.v1 as vf
from checked_env import CheckedTaskset

class FlakyEnv(vf.SingleAgentEnv):
    num_starts = 0

    async def start(self):
        self.num_starts += 1
        if self.num_starts == 1:
            raise ConnectionError("no server yet")

__all__ = ["CheckedTaskset", "FlakyEnv"]
"""


async def test_tool_servers_that_did_not_start_are_started_again_for_the_next_rollout(checked: None) -> None:
    async with made(env_id="flaky-env", num_eval=1) as environment:
        with pytest.raises(ConnectionError):
            await played(environment, ["ab"])
        assert (await played(environment, ["ab"])).reward == 2.0


async def test_calls_that_fail_mark_their_answers_and_tell_the_policy() -> None:
    texts = [
        calls("words_word", number=1),
        calls("words_word", number=-1),
        calls("nothing"),
        calls("words_word", number="many"),
        '<tool_call>{"name": </tool_call>',
    ]
    async with made(env_args={"dictionary": True}, environment={"agent": {"max_turns": 5}}) as environment:
        outcome = await played(environment, texts)
    kinds = [reply.error and reply.error.error_kind for reply in outcome.trajectory]
    assert kinds == [None, "tool_error", "unknown_tool", "tool_error", "malformed_json"]
    first, second, third, *_ = outcome.trajectory
    assert second.messages[: len(first.messages) + 1] == (*first.messages, {"role": "assistant", "content": texts[0]})
    assert second.messages[-1]["content"] == "baa"
    assert "numbers begin at 0" in third.messages[-1]["content"]  # what their tool said


async def test_a_call_that_fails_and_one_of_their_hooks_that_raises_cost_the_rollout_with_their_reason() -> None:
    from grpo.environments.verifiers import RolloutFailed

    def answer(role: str, messages: list[dict[str, Any]]) -> str:
        raise CallFailed("no server is left")

    async with made() as environment:
        with pytest.raises(CallFailed):
            await played(environment, answer)
    async with made(env_args={"broken": True}, num_eval=1) as environment:
        with pytest.raises(RolloutFailed):
            await played(environment, [])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"env_args": {"size": 3}}, "size"),
        ({"environment": {"agent": {"retries": {"max_retries": 1}}}}, "agent.retries"),
        ({"environment": {"agent": {"client": {"type": "eval", "base_url": "http://a/v1"}}}}, "trained"),
        ({"num_eval": 0}, "num_eval"),
    ],
)
def test_settings_that_cannot_be_are_errors_that_say_what_to_do(settings: dict[str, Any], told: str) -> None:
    from grpo.environments.verifiers import Verifiers

    with pytest.raises(ValueError, match=told):
        Verifiers(env_id=ENV_ID, **settings)
