"""User code in processes of its own: whatever it does costs one rollout."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from orchestrator.episodes.types import Failure, Score, Task
from orchestrator.workers.process import EnvironmentFailed, EnvironmentProcess, FailureRate

HOSTILE = """
import os, time
from orchestrator.envs import Environment, Rubric

def reward(completion, example):
    if completion == "raise": raise KeyError("my key")
    if completion == "nan": return float("nan")
    if completion == "block": time.sleep(1000)
    if completion == "exit": os._exit(3)
    if completion == "sys.exit": raise SystemExit(4)
    if completion == "print": print("noise")
    if completion == "pid": return os.getpid()
    return 1.0

class Hostile(Environment):
    rubric = Rubric([reward])
    def __init__(self, prompt="hi"):
        self.prompt = prompt
    def dataset(self, split):
        if split == "slow": time.sleep(1000)
        if split == "empty": return []
        return [{"prompt": self.prompt}]
"""

TASK = Task(env="hostile", split="train", index=0, messages=({"role": "user", "content": "hi"},))


def process(folder: Path, timeout_s: float = 20.0, code: str = HOSTILE, **args: object) -> EnvironmentProcess:
    path = folder / "hostile.py"
    path.write_text(code)
    return EnvironmentProcess(label="hostile", env_id=f"{path}:Hostile", args=args, timeout_s=timeout_s)


@pytest_asyncio.fixture
async def hostile(tmp_path: Path) -> AsyncIterator[EnvironmentProcess]:
    environment = process(tmp_path, timeout_s=2)
    yield environment
    await environment.close()


@pytest.mark.parametrize(
    ("completion", "reason", "message"),
    [
        ("raise", "env_error", "KeyError: 'my key'"),
        ("nan", "reward_not_finite", "reward returned nan"),
        ("block", "env_timeout", "longer than reward_timeout = 2 s"),
        ("exit", "env_crashed", "exit code 3"),
        ("sys.exit", "env_error", "SystemExit: 4"),
    ],
)
async def test_what_user_code_does_costs_that_rollout_only(
    hostile: EnvironmentProcess, completion: str, reason: str, message: str
) -> None:
    before, broken, after = await hostile.score(TASK, ["ok", completion, "print"])
    assert before == after == Score(reward=1.0, accuracy=1.0, metrics={"reward": 1.0})
    assert isinstance(broken, Failure)
    assert broken.reason == reason
    assert message in broken.message


async def test_prompts_are_chat_messages(hostile: EnvironmentProcess) -> None:
    assert await hostile.prompts("train") == [({"role": "user", "content": "hi"},)]


async def test_a_prompt_that_is_none_says_what_is_expected(tmp_path: Path) -> None:
    environment = process(tmp_path, prompt=5)
    with pytest.raises(EnvironmentFailed, match="example 0 has prompt = 5, expected a text or a list of messages"):
        await environment.prompts("train")
    await environment.close()


async def test_a_dataset_that_blocks_or_is_empty_stops_the_run(tmp_path: Path) -> None:
    environment = process(tmp_path, timeout_s=1)
    with pytest.raises(EnvironmentFailed, match=r"dataset\('slow'\).*longer than reward_timeout = 1 s"):
        await environment.prompts("slow")
    with pytest.raises(EnvironmentFailed, match=r"dataset\('empty'\) is empty"):
        await environment.prompts("empty")
    await environment.close()


async def test_a_dataset_that_changes_with_a_restart_is_an_error(tmp_path: Path) -> None:
    code = HOSTILE.replace("self.prompt}", "str(os.getpid())}")
    environment = process(tmp_path, code=code)
    await environment.prompts("train")
    with pytest.raises(EnvironmentFailed, match="gave other prompts than before"):
        await environment.score(TASK, ["exit", "ok"])
    await environment.close()


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("revers-text", "did you mean reverse-text"),
        ("nonsense", "Built in: reverse-text"),
        ("no_such_module:Env", "there is no module no_such_module"),
        ("no_such_file.py:Env", "no such file"),
        ("json:Env", "json has no Env"),
        ("json:JSONDecoder", "derive it from orchestrator.envs.Environment"),
    ],
)
async def test_an_id_that_leads_nowhere_says_what_there_is(env_id: str, message: str) -> None:
    environment = EnvironmentProcess(label=env_id, env_id=env_id, args={}, timeout_s=20)
    with pytest.raises(EnvironmentFailed, match=message):
        await environment.prompts("train")
    await environment.close()


async def test_closing_ends_the_process(hostile: EnvironmentProcess) -> None:
    [score] = await hostile.score(TASK, ["pid"])
    assert isinstance(score, Score)
    await hostile.close()
    assert not _alive(int(score.reward))


OWNER = """
import asyncio, sys
from orchestrator.workers.process import EnvironmentProcess
from tests.orchestrator.test_workers import TASK

async def main():
    environment = EnvironmentProcess(label="e", env_id=sys.argv[1], args={}, timeout_s=20)
    [score] = await environment.score(TASK, ["pid"])
    print(int(score.reward), flush=True)
    await environment.score(TASK, ["block"])

asyncio.run(main())
"""


def test_killing_the_orchestrator_ends_the_process_even_while_it_blocks(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, f"{path}:Hostile"], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    time.sleep(0.2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 5
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


async def test_a_group_is_scored_in_one_round_trip(hostile: EnvironmentProcess) -> None:
    await hostile.score(TASK, ["warm"])
    began_s = time.perf_counter()
    await asyncio.gather(*(hostile.score(TASK, ["x"] * 16) for _ in range(20)))
    assert 320 / (time.perf_counter() - began_s) > 1000


def test_too_many_failures_stop_the_run_with_the_last_message() -> None:
    rate = FailureRate(window=4, limit=0.5)
    failure = Failure(reason="env_error", message="Traceback: boom")
    for outcome in (failure, None, failure, None, None, failure, failure):
        rate.record(outcome)
    with pytest.raises(EnvironmentFailed, match=r"3 of the last 4 rollouts failed(.|\n)*Traceback: boom"):
        rate.record(failure)
