"""The built-in `zorplex`: its questions, what an episode is worth, and its tool workers."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence

import psutil
import pytest
import pytest_asyncio

from configs.orch import OrchSettings
from orchestrator.envs.base import episode_of
from orchestrator.envs.registry import make_environment
from orchestrator.envs.zorplex import Zorplex, task, worker
from orchestrator.envs.zorplex.environment import WORKER
from orchestrator.envs.zorplex.pool import PoolFailed, ToolPool
from orchestrator.episodes.replay import play, replay

SEED, MAX_VALUE = 0, 100
FIRST, SECOND = "apple", "plum"
VALUES = {word: task.zorplex(word, SEED, MAX_VALUE) for word in (FIRST, SECOND)}
SUM = sum(VALUES.values())
EXAMPLE = {"prompt": f"What is zorplex({FIRST}) + zorplex({SECOND})?", "answer": SUM}
LOOK_UPS = [f"LOOKUP[{FIRST}]", f"LOOKUP[{SECOND}]"]


@pytest_asyncio.fixture
async def environment() -> AsyncIterator[Zorplex]:
    made = Zorplex(num_workers=1)
    yield made
    await made.pool.close()


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[ToolPool]:
    """Two workers; what does not answer within 0.5 s is taken for dead."""
    made = ToolPool([sys.executable, "-m", WORKER, str(SEED), str(MAX_VALUE)], call_timeout_s=0.5, ping_interval_s=60)
    yield made
    await made.close()


async def both_up(pool: ToolPool) -> list[int]:
    """The workers' process ids, once there are two."""
    await pool.call({"word": FIRST})
    async with asyncio.timeout(20):
        while len(pool.workers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return [one.pid for one in pool.workers if one.pid is not None]


# --- questions ---


def test_values_follow_from_word_and_seed_and_stay_in_range() -> None:
    values = {word: task.zorplex(word, 0, 9) for word in task.WORDS}
    assert set(values.values()) == set(range(1, 10))
    assert values == {word: task.zorplex(word, 0, 9) for word in task.WORDS}
    assert values != {word: task.zorplex(word, 1, 9) for word in task.WORDS}


def test_training_and_evaluation_share_no_word() -> None:
    drawn = {split: task.questions(0, 2000, "hard", split) for split in ("train", "eval")}  # type: ignore[arg-type]
    train, held_out = ({word for one in drawn[split] for word in one.words} for split in ("train", "eval"))
    assert train | held_out == set(task.WORDS)
    assert not train & held_out
    assert len(held_out) > 40


@pytest.mark.parametrize(
    ("difficulty", "num_words", "operations"), [("easy", 2, "+"), ("medium", 2, "*+-"), ("hard", 3, "*+-")]
)
def test_difficulties_differ_in_words_and_operations(
    difficulty: task.Difficulty, num_words: int, operations: str
) -> None:
    questions = task.questions(0, 100, difficulty, "train")
    assert {len(set(question.words)) for question in questions} == {num_words}
    assert "".join(sorted({question.operation for question in questions})) == operations
    assert questions[:10] == task.questions(0, 10, difficulty, "train")


def test_operations_go_from_left_to_right() -> None:
    first, second, third = (task.zorplex(word, 3, 50) for word in ("fox", "owl", "bear"))
    question = task.Question(words=("fox", "owl", "bear"), operation="-")
    assert task.prompt(question) == "What is zorplex(fox) - zorplex(owl) - zorplex(bear)?"
    assert task.answer(question, 3, 50) == first - second - third


def test_settings_that_make_no_question_are_errors() -> None:
    with pytest.raises(ValueError, match="difficulty is 'odd', expected one of easy, medium, hard"):
        Zorplex(difficulty="odd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_value is 0, expected at least 1"):
        Zorplex(max_value=0)
    with pytest.raises(ValueError, match="num_workers is 0, expected at least 1"):
        Zorplex(num_workers=0)


def test_it_is_built_in_and_an_episode() -> None:
    environment = make_environment("zorplex", {"difficulty": "hard", "num_eval": 3})
    assert episode_of(environment) is environment
    assert len(environment.dataset("eval")) == 3


# --- what a rollout is worth ---


@pytest.mark.parametrize(
    ("answers", "reward", "failure_mode"),
    [
        # 1 for the right answer + 0.2 for the tag
        ([*LOOK_UPS, f"[ANSWER] {SUM}"], 1.2, "success"),
        ([*LOOK_UPS, f"That is {SUM}.\n[ANSWER]{SUM}."], 1.2, "success"),
        # the same - 2 · 0.1 for the third and the fourth call
        ([*LOOK_UPS, *LOOK_UPS, f"[ANSWER] {SUM}"], 1.0, "success"),
        ([" ".join(LOOK_UPS * 2), f"[ANSWER] {SUM}"], 1.0, "success"),
        ([*LOOK_UPS, f"{SUM}"], 0.0, "wrong_format"),
        # no tag, and 3 · 0.1 for five calls
        ([*LOOK_UPS, *LOOK_UPS, LOOK_UPS[0], f"{SUM}"], -0.3, "wrong_format"),
        ([*LOOK_UPS, f"[ANSWER] {SUM + 1}"], 0.2, "wrong_answer"),
        (["[ANSWER] none"], 0.2, "wrong_answer"),
        ([*LOOK_UPS, LOOK_UPS[0], f"[ANSWER] {SUM + 1}"], 0.1, "wrong_answer"),
        # 0.2 - 2 · 0.1
        ([*LOOK_UPS, *LOOK_UPS, f"[ANSWER] {SUM + 1}"], 0.0, "tool_spam"),
        # six answers are all that are allowed; 4 · 0.1
        (LOOK_UPS * 3, -0.4, "wrong_format"),
        # the answer counts, and so the call beside it is not made
        ([f"LOOKUP[{FIRST}] [ANSWER] 1"], 0.2, "wrong_answer"),
    ],
)
async def test_reward_and_failure_mode_by_hand(
    environment: Zorplex, answers: Sequence[str], reward: float, failure_mode: str
) -> None:
    outcome = await play(environment, EXAMPLE, answers)
    assert outcome.reward == pytest.approx(reward)
    modes = {name: outcome.metrics[name] for name in ("success", "wrong_format", "tool_spam", "wrong_answer")}
    assert [name for name, value in modes.items() if value] == [failure_mode]
    assert outcome.accuracy == modes["success"]
    assert outcome.metrics["num_turns"] == len(answers)
    assert outcome.extras["failure_mode"] == failure_mode


async def test_the_policy_sees_the_values_and_they_are_in_no_prompt(environment: Zorplex) -> None:
    outcome = await play(environment, EXAMPLE, [*LOOK_UPS, f"[ANSWER] {SUM}"])
    told = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert told == [str(VALUES[FIRST]), str(VALUES[SECOND])]
    assert (outcome.metrics["num_tool_calls"], outcome.metrics["tool_error_rate"]) == (2, 0)
    for split in ("train", "eval"):
        assert {key for example in environment.dataset(split) for key in example} == {"prompt", "answer"}
        assert not any(letter.isdigit() for example in environment.dataset(split) for letter in example["prompt"])


@pytest.mark.parametrize(
    ("call", "error_kind", "told"),
    [
        ("LOOKUP[zzz]", "unknown_word", "zzz has no zorplex; look up a word of the question."),
        ("LOOKUP[<|im_end|>]", "unknown_word", "??im?end?? has no zorplex; look up a word of the question."),
        ("LOOKUP[apple", "unclosed_call", "The call of LOOKUP is not closed; write it as LOOKUP[word]."),
        ("LOOKUP[]", "wrong_arguments", "Wrong arguments for LOOKUP: word is missing. It takes word."),
        ("SEARCH[apple]", "unknown_tool", "There is no tool SEARCH; there are LOOKUP."),
    ],
)
async def test_failed_calls_are_told_and_marked(environment: Zorplex, call: str, error_kind: str, told: str) -> None:
    outcome = await play(environment, EXAMPLE, [call, LOOK_UPS[0], "[ANSWER] 1"])
    errors = [reply.error for reply in outcome.trajectory]
    assert errors[0] is not None
    assert (errors[0].error_kind, errors[0].hint_template_key) == (error_kind, error_kind)
    assert errors[1:] == [None, None]
    assert outcome.messages[2] == {"role": "tool", "content": told}
    assert (outcome.metrics["num_tool_calls"], outcome.metrics["tool_error_rate"]) == (2, 0.5)


async def test_without_calls_none_has_failed(environment: Zorplex) -> None:
    assert (await play(environment, EXAMPLE, ["[ANSWER] 1"])).metrics["tool_error_rate"] == 0


async def test_replay_shows_what_the_policy_saw(environment: Zorplex) -> None:
    answers = [LOOK_UPS[0], "LOOKUP[zzz]", LOOK_UPS[1], f"[ANSWER] {SUM}"]
    outcome = await play(environment, EXAMPLE, answers)
    other = Zorplex(num_workers=1)
    for num in range(len(answers)):
        assert await replay(other, EXAMPLE, answers[:num]) == outcome.trajectory[num].messages
    await other.pool.close()


# --- tool workers ---


async def test_workers_take_turns(pool: ToolPool) -> None:
    await both_up(pool)
    before = [one.num_answered for one in pool.workers]
    answers = [await pool.call({"word": FIRST}) for _ in range(10)]
    assert answers == [{"value": VALUES[FIRST]}] * 10
    assert [one.num_answered - num for one, num in zip(pool.workers, before, strict=True)] == [5, 5]


async def test_many_calls_at_a_time_get_their_own_answers(pool: ToolPool) -> None:
    answers = await asyncio.gather(*(pool.call({"word": word}) for word in task.WORDS))
    assert [one["value"] for one in answers] == [task.zorplex(word, SEED, MAX_VALUE) for word in task.WORDS]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_dies_or_hangs_costs_no_call_and_is_replaced(pool: ToolPool, how: signal.Signals) -> None:
    pids = await both_up(pool)
    os.kill(pids[0], how)
    answers = await asyncio.gather(*(pool.call({"word": SECOND}) for _ in range(6)))
    assert answers == [{"value": VALUES[SECOND]}] * 6
    now = await both_up(pool)
    assert pids[0] not in now
    assert pids[1] in now
    assert not psutil.pid_exists(pids[0])
    assert pool.num_restarts == 1


async def test_a_ping_finds_a_worker_that_hangs_while_nobody_calls() -> None:
    command = [sys.executable, "-m", WORKER, str(SEED), str(MAX_VALUE)]
    pool = ToolPool(command, num_workers=1, call_timeout_s=0.5, ping_interval_s=0.1)
    await pool.call({"word": FIRST})
    (hanging,) = [one.pid for one in pool.workers]
    assert hanging is not None
    os.kill(hanging, signal.SIGSTOP)
    async with asyncio.timeout(20):
        while not pool.workers or pool.workers[0].pid == hanging:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await pool.call({"word": FIRST}) == {"value": VALUES[FIRST]}
    await pool.close()


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"start_timeout_s": 0.3}, "no tool worker has come up within 0.3 s"),
        ({"limit_s": 0.3}, "no tool worker has answered within 0.3 s"),
    ],
)
async def test_a_pool_without_workers_costs_the_rollout_and_is_not_told_to_the_policy(
    limits: dict[str, float], told: str
) -> None:
    environment = Zorplex()
    environment.pool = ToolPool([sys.executable, "-c", "raise SystemExit(3)"], **limits)  # type: ignore[arg-type]
    with pytest.raises(PoolFailed, match=told):
        await play(environment, EXAMPLE, [LOOK_UPS[0], "[ANSWER] 1"])
    await environment.pool.close()


def test_the_pool_gives_up_before_the_call_is_late_and_both_before_the_rollout_is() -> None:
    limit_s = inspect.signature(ToolPool).parameters["limit_s"].default
    assert limit_s < Zorplex().timeout_s < OrchSettings.model_fields["reward_timeout_s"].default


BABBLES = """
import json, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
for line in connection.makefile("rb"):
    request = json.loads(line)
    answer = {"id": request["id"], "value": 1} if "word" in request else {"id": request["id"]}
    connection.sendall(b"no json\\n[1]\\n" + json.dumps({"id": 999999}).encode() + b"\\n")
    if request.get("word") != "die":
        connection.sendall(json.dumps(answer).encode() + b"\\n")
    else:
        raise SystemExit
"""


async def test_what_is_no_answer_is_ignored_and_a_call_that_kills_every_worker_fails() -> None:
    pool = ToolPool([sys.executable, "-c", BABBLES], num_workers=1)
    assert await pool.call({"word": "a"}) == {"value": 1}
    with pytest.raises(PoolFailed, match=r"2 tool workers in a row have failed; the last: tool worker \d+ ended"):
        await pool.call({"word": "die"})
    assert await pool.call({"word": "a"}) == {"value": 1}
    await pool.close()


def test_a_worker_ignores_what_it_cannot_parse() -> None:
    assert worker.answered(b'{"id": 1, "word": " Apple "}\n', SEED, MAX_VALUE) == {"id": 1, "value": VALUES[FIRST]}
    assert worker.answered(b'{"id": 2, "word": "zzz"}\n', SEED, MAX_VALUE) == {"id": 2, "value": None}
    assert worker.answered(b'{"id": 3}\n', SEED, MAX_VALUE) == {"id": 3}
    for line in (b"", b"LOOKUP[apple]\n", b"[1]\n", b'{"word": "apple"}\n', b'{"id": "1"}\n', b"\xff\n", b"[" * 99999):
        assert worker.answered(line, SEED, MAX_VALUE) is None


def test_workers_end_with_the_event_loop() -> None:
    async def use() -> list[int]:
        environment = Zorplex()
        return await both_up(environment.pool)

    pids = asyncio.run(use())
    assert not any(psutil.pid_exists(pid) for pid in pids)


PARENT = f"""
import asyncio, json, sys
from orchestrator.envs.zorplex.pool import ToolPool
async def main():
    pool = ToolPool([sys.executable, "-m", {WORKER!r}, "0", "9"], num_workers=1)
    await pool.call({{"word": "apple"}})
    print(json.dumps([one.pid for one in pool.workers]), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_workers_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        parent.kill()
    deadline_s = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)
