"""User code in workers: whatever it does costs its own rollout, and others run beside it."""

import asyncio
import hashlib
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from grpo.orchestrator.rollouts.records import Failure
from grpo.orchestrator.startup import keys_of_run
from grpo.orchestrator.workers.failures import EnvironmentFailed, EnvironmentKilled, FailureRate
from grpo.orchestrator.workers.protocol import Outcome, StoreCall, encode_checked
from grpo.orchestrator.workers.worker import identity_of
from grpo.transport.importing import load_object

from tests.orchestrator.fakes import settings_for, until
from tests.orchestrator.worker_pools import Clock, pool_for, pool_of, reason, rolled_out, says, scored, scoring, task
from tests.support import runs, until_gone

HOSTILE = """
import asyncio, gc, os, signal, subprocess, sys, threading, time
import zmq.asyncio
from grpo.api import *

kept = []
tasks, threads = asyncio.Barrier(100), threading.Barrier(8)

def reward(completion, example):
    if completion == "raise": raise KeyError("my key")
    if completion == "nan": return float("nan")
    if completion == "spin":
        while True: pass
    if completion == "exit": os._exit(3)
    if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "memory":
        while True: kept.append(bytearray(1 << 20))
    if completion == "flood":
        for _ in range(2000): print("y" * 70)
    if completion == "half": raise ValueError("\\ud83d")
    if completion == "pid": return os.getpid()
    if completion == "seen":
        seen = [dict(os.environ).get(name) for name in ("RUN_KEY", "GRPO_ENV_KEY", "WANDB_API_KEY")]
        return float(seen != [None] * 3 or b"a-secret" in open(f"/proc/{os.getppid()}/environ", "rb").read())
    if completion == "escape":
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    if completion == "garbage":
        for number in range(3, 100):
            try: os.write(number, b"\\xff" * 64)
            except OSError: pass
    if completion == "sleep": time.sleep(0.3)
    if completion == "meet in threads": threads.wait()
    return 1.0

async def exits():
    await asyncio.sleep(0.1)
    os._exit(3)

async def waits(completion):
    if completion == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if completion == "hold":
        print("holds", file=open(f"{__file__}.holds", "a"))
        time.sleep(1000)
    if completion == "meet": await tasks.wait()
    if completion == "pause": await asyncio.sleep(0.2)
    if completion == "exit later": await exits()
    if completion == "exit in a task": await asyncio.gather(exits())
    if completion == "forge":
        [socket] = [one for one in gc.get_objects() if isinstance(one, zmq.asyncio.Socket)]
        await socket.send(b"\\xc1\\xc1")
        await asyncio.sleep(1000)
    return 1.0

class Hostile(Environment):
    rubric = Rubric([reward, waits], weights=[1.0, 0.0])
    def __init__(self, prompt="hi"):
        self.prompt = prompt
    def dataset(self, split):
        if split == "slow": time.sleep(1000)
        if split == "empty": return []
        if split == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if split == "exits": os._exit(3)
        return [{"prompt": self.prompt}]

class Talk(MultiTurnEpisode, Environment):
    rubric = Rubric([lambda state: float(state.turn)])
    def dataset(self, split):
        return [{"prompt": "hi"}]
    async def respond(self, state, ctx):
        if state.last_text == "exit": os._exit(3)
        return None if state.last_text == "bye" else "go on"
"""


async def test_what_user_code_does_costs_that_rollout_only(tmp_path: Path) -> None:
    reasons = {
        "raise": "env_error",
        "half": "env_error",
        "nan": "reward_not_finite",
        "kill": "env_crashed",
        "exit later": "env_crashed",
        "exit in a task": "env_crashed",
        "memory": "env_memory",
        "forge": "env_error",
        "flood": "",
    }
    async with pool_of(tmp_path, HOSTILE, "Hostile", memory_bytes=512 << 20) as pool:
        for completion, expected in reasons.items():
            outcomes = await asyncio.gather(*(scored(pool, text) for text in ("ok", completion, "sleep", "pause")))
            assert [reason(one) for one in outcomes] == ["", expected, "", ""], completion


@pytest.mark.parametrize("completion", ["stubborn", "spin"])
async def test_code_that_takes_too_long_is_dropped(tmp_path: Path, completion: str) -> None:
    async with pool_of(tmp_path, HOSTILE, "Hostile", timeout_s=0.3) as pool:
        assert reason(await scored(pool, completion)) == "env_timeout"


async def test_all_rollouts_of_a_worker_that_ends_begin_once_more_alone(tmp_path: Path) -> None:
    texts = ["exit later", "pause", "sleep", "kill", "pause", "exit in a task", "sleep", "pause"]
    async with pool_of(tmp_path, HOSTILE, "Hostile") as pool:
        outcomes = await asyncio.gather(*(scored(pool, text) for text in texts))
        expected = ["env_crashed" if text in ("exit later", "kill", "exit in a task") else "" for text in texts]
        assert [reason(one) for one in outcomes] == expected
        assert pool.num_restarted == len(texts)
        assert reason(await scored(pool, "ok")) == ""
        assert pool.num_restarted == len(texts)


async def test_who_waited_for_a_model_when_the_worker_ended_begins_again_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.pool.MAX_ALONE", 1)
    async with pool_of(tmp_path, HOSTILE, "Talk") as pool:
        crashed, together = asyncio.Event(), asyncio.Barrier(4)

        async def wait() -> None:
            await crashed.wait()
            await together.wait()

        others = [asyncio.create_task(pool.run(task(), seed=0, begin=lambda: says("bye", wait=wait))) for _ in range(4)]
        await until(lambda: pool.num_in_environment == 0)
        assert reason(await rolled_out(pool, "exit")) == "env_crashed"
        crashed.set()
        assert [reason(one) for one in await asyncio.gather(*others)] == [""] * 4


@pytest.mark.parametrize("served", [False, True])
async def test_a_worker_that_stands_still_is_ended_and_who_holds_it_up_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr("grpo.orchestrator.workers.session.time", clock)
    held = tmp_path / "environment.py.holds"

    def num_held() -> int:
        return len(held.read_text().split()) if held.exists() else 0

    async def put_clock_forward() -> None:
        for _ in range(9):
            clock.ahead_s += 8
            if served:  # the server goes on to answer heartbeats, whatever its worker does
                now_s = clock.monotonic()
                await until(lambda now_s=now_s: all(one.over or one._reached_s >= now_s for one in pool._all()))

    monkeypatch.setattr("grpo.orchestrator.workers.session.ALIVE_INTERVAL_S", 0.05)
    async with pool_of(tmp_path, HOSTILE, "Hostile", served=served) as pool:
        holds, *others = (asyncio.create_task(scored(pool, text)) for text in ("hold", "pause", "pause"))
        await until(lambda: num_held() == 1)
        await put_clock_forward()
        assert [reason(one) for one in await asyncio.gather(*others)] == ["", ""]
        await until(lambda: num_held() == 2)
        await put_clock_forward()
        assert reason(await holds) == "env_timeout"


async def test_who_breaks_what_its_worker_speaks_through_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.session.STILL_GRACE_S", 0.5)
    begin = Mock(side_effect=lambda place: says())
    async with pool_of(tmp_path, HOSTILE, "Hostile", timeout_s=1.0) as pool:
        [outcome] = await pool.score(scoring("garbage"), begin=begin)
    assert reason(outcome) in ("env_timeout", "env_error", "env_crashed")
    assert begin.call_count == 2


async def test_what_user_code_prints_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.process.PRINT_BURST_BYTES", 10_000)
    monkeypatch.setattr("grpo.orchestrator.workers.process.PRINT_BYTES_PER_S", 0)
    async with pool_of(tmp_path, HOSTILE, "Hostile") as pool:
        assert reason(await scored(pool, "flood")) == ""
    assert 5_000 < capfd.readouterr().err.count("y") <= 10_000
    assert "left out" in caplog.text


async def test_async_rewards_of_many_groups_run_at_the_same_time_and_plain_ones_in_threads(tmp_path: Path) -> None:
    async with pool_of(tmp_path, HOSTILE, "Hostile") as pool:
        for completion, num in (("meet", 100), ("meet in threads", 8)):  # each waits for all of them
            outcomes = await asyncio.gather(*(scored(pool, completion) for _ in range(num)))
            assert {reason(one) for one in outcomes} == {""}


async def test_single_answers_are_spread_over_all_workers(tmp_path: Path) -> None:
    async with pool_of(tmp_path, HOSTILE, "Hostile", num_workers=2) as pool:
        outcomes = await asyncio.gather(*(scored(pool, "pid") for _ in range(8)))
        assert len({one.accuracy for one in outcomes if isinstance(one, Outcome)}) == 2


async def test_waiting_for_a_model_is_not_the_environments_time(tmp_path: Path) -> None:
    async with pool_of(tmp_path, HOSTILE, "Talk", timeout_s=1.0) as pool:
        slow = says("bye", wait=lambda: asyncio.sleep(1.1))
        assert reason(await pool.run(task(), seed=0, begin=lambda: slow)) == ""


async def test_user_code_sees_no_key_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_KEY", "GRPO_ENV_KEY"):
        monkeypatch.setenv(name, "a-secret")
    async with pool_of(tmp_path, HOSTILE, "Hostile", hidden={"RUN_KEY"}) as pool:
        outcome = await scored(pool, "seen")
        assert isinstance(outcome, Outcome)
        assert outcome.accuracy == 0


def test_the_keys_of_a_run_are_those_that_its_programs_read_and_its_settings_name() -> None:
    settings = settings_for(Path("x"), client={"api_key_var": "MY_KEY"})
    assert {"MY_KEY", "WANDB_API_KEY", "VLLM_API_KEY", "GRPO_ENV_KEY"} <= keys_of_run(settings)


async def test_closing_ends_the_worker_and_what_it_started_in_sessions_of_its_own(tmp_path: Path) -> None:
    async with pool_of(tmp_path, HOSTILE, "Hostile") as pool:
        pids = [
            outcome.accuracy for one in ("pid", "escape") if isinstance(outcome := await scored(pool, one), Outcome)
        ]
        assert all(runs(int(pid)) for pid in pids)
    assert not any(runs(int(pid)) for pid in pids)


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.orchestrator.test_workers import HOSTILE
from tests.orchestrator.worker_pools import pool_of, scored

async def main():
    async with pool_of(Path(sys.argv[1]), HOSTILE, "Hostile") as pool:
        print(int((await scored(pool, "pid")).accuracy), int((await scored(pool, "escape")).accuracy), flush=True)
        await scored(pool, "hold")

asyncio.run(main())
"""


def test_killing_the_orchestrator_ends_the_worker_and_what_it_started_even_while_it_blocks(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until_gone(pids)


# --- what cannot work at all ---


@pytest.mark.parametrize(("split", "message"), [("empty", "empty"), ("slow", "reward_timeout_s")])
async def test_a_dataset_that_blocks_or_is_empty_stops_the_run(tmp_path: Path, split: str, message: str) -> None:
    async with pool_of(tmp_path, HOSTILE, "Hostile", timeout_s=0.3 if split == "slow" else 60.0) as pool:
        with pytest.raises(EnvironmentFailed, match=message):
            await pool.prompts(split)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(("split", "how"), [("killed", "SIGKILL"), ("exits", "exit code 3")])
async def test_a_process_that_was_killed_before_it_said_anything_may_be_started_again(
    tmp_path: Path, split: str, how: str, served: bool
) -> None:
    async with pool_of(tmp_path, HOSTILE, "Hostile", served=served) as pool:
        with pytest.raises(EnvironmentFailed, match=how) as failed:
            await pool.prompts(split)
    assert isinstance(failed.value, EnvironmentKilled) is (split == "killed")


MINE = """
import helpers
from grpo.api import *

class Mine(Environment):
    rubric = Rubric([lambda state: 1.0])
    def dataset(self, split):
        return [{"prompt": helpers.PROMPT}]
"""


@pytest.mark.parametrize("env_id", ["mine:Mine", "mine.py:Mine"])
async def test_a_file_in_the_working_directory_stands_in_for_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_id: str
) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "helpers.py").write_text("PROMPT = 'hi'")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    async with pool_for(env_id) as pool:
        assert await pool.prompts("train")


def test_a_file_is_imported_once_and_two_of_one_name_do_not_collide(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text("class E: pass\n")
    one, again, other = (load_object(f"{tmp_path / folder}/env.py:E", setting="x") for folder in "aab")
    assert one is again
    assert one is not other
    assert sys.modules[one.__module__].E is one


# --- examples ---


def test_what_user_code_sends_is_bounded() -> None:
    long = StoreCall(store="s", operation="add", arguments={"data": "x" * (1 << 26)})
    with pytest.raises(ValueError, match="bytes"):
        encode_checked(long)


def test_an_identity_depends_on_the_fields_that_are_named_and_is_the_same_everywhere() -> None:
    example = {"task": "t", "prompt": [{"role": "user", "content": "hi"}], "answer": 3}
    as_json = b'{"answer":3,"task":"t"}'
    assert identity_of(example, ("task", "answer"), 0) == hashlib.blake2b(as_json, digest_size=12).hexdigest()
    for fields, changes in ((("task", "id"), {}), (("answer",), {"answer": object()})):
        with pytest.raises(ValueError, match=r"example 7|buffer\.hash_keys"):
            identity_of(example | changes, fields, 7)


MANY = """
from collections.abc import Sequence
from grpo import Environment, Rubric

class Numbers(Sequence):
    def __len__(self):
        return 9000
    def __getitem__(self, number):
        return {"prompt": f"{number} " + "x" * 1000} | ({"solution": f"s{number}"} if number % 2 else {})

class Many(Environment):
    rubric = Rubric([lambda state: 1.0])
    def dataset(self, split):
        return Numbers()
"""


async def test_prompts_come_in_parts_and_are_read_by_index(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    async with pool_for(f"{tmp_path / 'many.py'}:Many", hash_keys=("task", "prompt")) as pool:
        prompts = await pool.prompts("train")
        assert (len(prompts), len(pool.solutions), len({*pool.identities.tolist()})) == (9000, 9000, 9000)
        for index in (0, 1, 4711, 8999):
            text = f"{index} " + "x" * 1000
            assert prompts[index] == ({"role": "user", "content": text},)
            assert pool.solutions[index] == (f"s{index}" if index % 2 else "")
            example = {"prompt": [{"role": "user", "content": text}], "task": "e"}
            assert pool.identities[index].decode() == identity_of(example, ("task", "prompt"), index)
        assert prompts[-1] == prompts[8999:][0]
        with pytest.raises(IndexError):
            prompts[9000]
        assert await pool.prompts("eval")


# --- how many may fail ---


def test_too_many_failures_stop_the_run_with_the_last_message() -> None:
    failures_alone = FailureRate(window=4, limit=1.0)  # stop a run whatever the limit
    rate = FailureRate(window=4, limit=0.5)
    failure = Failure(reason="env_error", message="Traceback: boom")
    for outcome in (failure, None, failure, None, None, failure, failure):
        rate.record("env", outcome)
        rate.record("other", None)
    with pytest.raises(EnvironmentFailed, match="boom"):
        rate.record("env", failure)
    for _ in range(31):
        failures_alone.record("env", failure)
    with pytest.raises(EnvironmentFailed, match="boom"):
        failures_alone.record("env", failure)
