"""User code in processes of its own: whatever it does costs one rollout."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio
from orchestrator.episodes.types import Failure, Score, Task
from orchestrator.workers.child import Host, identity_of
from orchestrator.workers.wire import HEADER, Dataset, ScoreOne

from orchestrator.episodes.messages import messages_of
from orchestrator.workers.failures import EnvironmentFailed, FailureRate
from orchestrator.workers.process import EnvironmentProcess

HOSTILE = """
import os, time
from grpo import Environment, Rubric

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


def process(
    folder: Path, timeout_s: float = 20.0, code: str = HOSTILE, hash_keys: tuple[str, ...] = (), **args: object
) -> EnvironmentProcess:
    path = folder / "hostile.py"
    path.write_text(code)
    where = f"{path}:Hostile"
    return EnvironmentProcess(label="hostile", env_id=where, args=args, timeout_s=timeout_s, hash_keys=hash_keys)


@pytest_asyncio.fixture
async def hostile(tmp_path: Path) -> AsyncIterator[EnvironmentProcess]:
    environment = process(tmp_path, timeout_s=5)
    yield environment
    await environment.close()


@pytest.mark.parametrize(
    ("completion", "reason", "message"),
    [
        ("raise", "env_error", "KeyError: 'my key'"),
        ("nan", "reward_not_finite", "reward returned nan"),
        ("block", "env_timeout", "longer than reward_timeout_s = 5 s"),
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


# --- identity ---

EXAMPLE = {"task": "t", "prompt": [{"role": "user", "content": "hi"}], "answer": 3, "level": None}


def test_an_identity_depends_on_the_fields_that_are_named_and_on_nothing_else() -> None:
    one = identity_of(EXAMPLE, ("task", "prompt"), 0)
    assert one == identity_of(EXAMPLE | {"answer": 4}, ("task", "prompt"), 5)
    assert one != identity_of(EXAMPLE | {"task": "u"}, ("task", "prompt"), 0)
    assert one != identity_of(EXAMPLE, ("task", "prompt", "answer"), 0)


def test_an_identity_is_the_same_in_every_process_and_release() -> None:
    # blake2b with 12 bytes of {"answer": 3, "task": "t"}
    assert identity_of(EXAMPLE, ("task", "answer"), 0) == "d6abf2451f9b11b8a08c07c5"


def test_a_field_that_is_missing_or_no_plain_data_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"example 7 has no 'id', which buffer\.hash_keys names; it has answer, level"):
        identity_of(EXAMPLE, ("task", "id"), 7)
    with pytest.raises(ValueError, match="example 7 cannot be known by answer: Object of type object is not JSON"):
        identity_of(EXAMPLE | {"answer": object()}, ("answer",), 7)


async def test_training_examples_come_with_their_identities(tmp_path: Path) -> None:
    environment = process(tmp_path, code=HOSTILE, hash_keys=("task", "prompt"))
    await environment.prompts("eval")
    assert environment.identities == []
    await environment.prompts("train")
    hostile = {"task": "hostile", "prompt": [{"role": "user", "content": "hi"}]}
    assert environment.identities == [identity_of(hostile, ("task", "prompt"), 0)]
    await environment.close()


async def test_a_prompt_that_is_none_says_what_is_expected(tmp_path: Path) -> None:
    environment = process(tmp_path, prompt=5)
    with pytest.raises(EnvironmentFailed, match="example 0 has prompt = 5, expected a text or a list of messages"):
        await environment.prompts("train")
    await environment.close()


def test_half_of_a_surrogate_pair_is_refused_with_the_examples_number() -> None:
    for prompt in ("a \ud83d b", [{"role": "user", "content": "\ud83d"}]):
        with pytest.raises(ValueError, match=r"example 7 has prompt = .*\\ud83d.* expected whole characters; mend it"):
            messages_of({"prompt": prompt}, 7)
    assert messages_of({"prompt": "\U0001f600"}, 7) == [{"role": "user", "content": "\U0001f600"}]


def test_an_answer_that_cannot_be_sent_is_told_as_one_that_was_raised() -> None:
    async def score(completion: str, example: object) -> Score:
        return Score(reward=1.0, accuracy=1.0, metrics={"\ud83d": 1.0})

    loop = asyncio.new_event_loop()
    host = Host(loop)
    host.environment = cast(
        Any, SimpleNamespace(dataset=lambda split: [{"prompt": "hi"}], rubric=SimpleNamespace(score=score))
    )
    host.answer(Dataset(split="train"))
    told = msgspec.msgpack.decode(host.answer(ScoreOne(split="train", index=0, completion="x"))[HEADER.size :])
    loop.close()
    assert told["reason"] == "env_error"
    assert "surrogates not allowed" in told["message"]


async def test_a_dataset_that_blocks_or_is_empty_stops_the_run(tmp_path: Path) -> None:
    environment = process(tmp_path, timeout_s=3)
    with pytest.raises(EnvironmentFailed, match=r"dataset\('slow'\).*longer than reward_timeout_s = 3 s"):
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
        ("nonsense", "Built in: arithmetic"),
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
    deadline = time.monotonic() + 60
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
    times_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        await asyncio.gather(*(hostile.score(TASK, ["x"] * 16) for _ in range(20)))
        times_s.append(time.perf_counter() - began_s)
    assert 320 / min(times_s) > 500  # the best, since the machine may do much else


def test_too_many_failures_stop_the_run_with_the_last_message() -> None:
    rate = FailureRate(window=4, limit=0.5)
    failure = Failure(reason="env_error", message="Traceback: boom")
    for outcome in (failure, None, failure, None, None, failure, failure):
        rate.record("env", outcome)
    with pytest.raises(EnvironmentFailed, match=r"env: 3 of the last 4 rollouts failed(.|\n)*Traceback: boom"):
        rate.record("env", failure)


def test_an_environment_that_always_fails_is_found_out_beside_others_that_do_not() -> None:
    rate = FailureRate(window=4, limit=0.5)
    failure = Failure(reason="env_error", message="boom")

    def step() -> None:
        for env in ("one", "two"):
            rate.record(env, None)
        rate.record("broken", failure)

    step()
    step()
    with pytest.raises(EnvironmentFailed, match="environment broken: 3 of the last 3 rollouts failed"):
        step()


def test_an_environment_that_is_late_again_and_again_hangs_whatever_the_limit() -> None:
    rate = FailureRate(window=100, limit=1.0, max_late_in_a_row=3)
    late, skipped = Failure(reason="env_timeout", message="30 s"), Failure(reason="env_not_tried", message="")
    for outcome in (late, late, None, late, Failure(reason="env_error", message=""), late, skipped, late, skipped):
        rate.record("env", outcome)
    rate.record("other", late)
    with pytest.raises(EnvironmentFailed, match="environment env hangs, 3 times in a row: 30 s"):
        rate.record("env", late)


def test_the_first_failure_of_a_kind_is_logged_with_its_message_and_then_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times_s = iter((0.0, 1.0, 59.0, 61.0, 62.0, 63.0))
    rate = FailureRate(window=100, limit=1.0, clock=lambda: next(times_s))
    failure, other = Failure(reason="env_error", message="the moon"), Failure(reason="env_crashed", message="gone")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            rate.record("env", failure)
        rate.record("env", other)
    assert caplog.messages == [
        "environment env: a first rollout failed (env_error): the moon",
        "environment env: 4 rollouts have failed by now (env_error)",
        "environment env: a first rollout failed (env_crashed): gone",
    ]


async def test_the_rest_of_a_group_is_not_tried_after_two_deadlines_in_a_row(tmp_path: Path) -> None:
    environment = process(tmp_path, timeout_s=3)
    began_s = time.monotonic()
    results = await environment.score(TASK, ["ok", "block", "block", "block", "ok"])
    reasons = [result.reason if isinstance(result, Failure) else "scored" for result in results]
    assert reasons == ["scored", "env_timeout", "env_timeout", "env_not_tried", "env_not_tried"]
    assert time.monotonic() - began_s < 60
    assert isinstance((await environment.score(TASK, ["ok"]))[0], Score)
    await environment.close()


async def test_outcomes_are_recorded_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    outcomes: list[str | None] = []

    def record(label: str, failure: Failure | None) -> None:
        outcomes.append(None if failure is None else failure.reason)
        if failure is not None:
            raise EnvironmentFailed("enough")

    environment = EnvironmentProcess(label="hostile", env_id=f"{path}:Hostile", args={}, timeout_s=20, record=record)
    with pytest.raises(EnvironmentFailed, match="enough"):
        await environment.score(TASK, ["ok", "raise", "block"])
    assert outcomes == [None, "env_error"]
    # Nothing that the process still owed is taken for the answer to another request.
    [score] = await environment.score(TASK, ["ok"])
    assert isinstance(score, Score)
    await environment.close()


async def test_a_process_that_does_not_start_is_a_failed_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    environment = process(tmp_path)
    with pytest.raises(EnvironmentFailed, match=r"environment hostile did not start: .* exit code 1"):
        await environment.score(TASK, ["ok"])
    with pytest.raises(EnvironmentFailed, match=r"environment hostile did not start: .* exit code 1"):
        await environment.prompts("train")


async def test_a_process_that_starts_too_slowly_names_the_limit_that_applied(
    tmp_path: Path,
) -> None:
    environment = process(tmp_path)
    environment._start_timeout_s = 0.001
    with pytest.raises(EnvironmentFailed, match=r"did not start: .* longer than 0\.001 s, before any code") as error:
        await environment.prompts("train")
    assert "reward_timeout_s" not in str(error.value)


@pytest.mark.parametrize("env_id", ["reverse-text", "mine:Mine", "mine.py:Mine"])
async def test_a_file_in_the_working_directory_stands_in_for_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_id: str
) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "helpers.py").write_text("PROMPT = 'hi'")
    code = HOSTILE.replace("Hostile", "Mine").replace("import os, time", "import os, time, helpers")
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    environment = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=20)
    assert await environment.prompts("train")
    await environment.close()
