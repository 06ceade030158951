"""Who is waited for, who is blamed, and who begins again among the episodes of one process, which a script stands in
for."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from orchestrator.episodes.types import Failure, Task
from orchestrator.workers.hosting import Answerer, EpisodeHost, EpisodeProcess
from orchestrator.workers.wire import (
    HEADER,
    NOBODY,
    Answer,
    Beat,
    Begin,
    Called,
    Ended,
    Failed,
    Load,
    Loaded,
    Played,
    Request,
    Sampled,
    frame,
)

from orchestrator.workers import hosting
from orchestrator.workers.failures import EnvironmentFailed, FailureRate
from orchestrator.workers.process import EnvironmentPool

PLAYED = Played(steps=[], rewards={}, accuracy=0.0, metrics={})
TASK = Task(env="e", split="train", index=0, messages=({"role": "user", "content": "hi"},))
LIMIT_S = 20.0
Play = Callable[["Script"], None]


class Script:
    """A link to a process that does what `plays` says at each rollout's beginning, and beats by a test's word."""

    def __init__(self, plays: Play) -> None:
        self._plays, self._decoder = plays, msgspec.msgpack.Decoder(Request)
        self.begun: list[int] = []
        """Rollouts of the process that runs now, by their numbers."""
        self.most = self.num_started = 0
        """How many ran at a time; processes."""
        self.code_of: int | None = None
        self.is_lost = False
        self.how = "has been ended"
        self.silent = False
        """Whether Python does not come up in time."""
        self.ends_at_once = False
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self.begun, self.code_of, self.is_lost, self._frames = [], None, False, asyncio.Queue()
        self.num_started += 1
        if self.ends_at_once:
            self.ends(None)
        elif not self.silent:
            self.say(Loaded())

    def say(self, answer: Answer) -> None:
        self._frames.put_nowait(frame(answer)[HEADER.size :])

    def send(self, data: bytes) -> None:
        request = self._decoder.decode(data[HEADER.size :])
        if isinstance(request, Load):
            self.say(Loaded())
        elif isinstance(request, Begin):
            self.begun.append(request.rollout)
            self.most = max(self.most, len(self.begun))
            self._plays(self)

    async def drain(self) -> None: ...

    async def receive(self) -> bytes:
        if (body := await self._frames.get()) is None:
            self._frames.put_nowait(None)
            raise EOFError("0 bytes read on a total of 4 expected bytes")
        return body

    def blocks(self, code_of: int) -> None:
        """From now on this rollout's code does not let go."""
        self.code_of = code_of
        self._beating = asyncio.create_task(self._beats(code_of))

    async def _beats(self, running: int) -> None:
        while True:
            self.say(Beat(running=running, num_steps=7))
            await asyncio.sleep(0.01)

    def ends(self, code_of: int | None, *, is_lost: bool = False) -> None:
        """The process ends while this rollout's code runs."""
        self.code_of, self.is_lost = code_of, is_lost
        if self._beating is not None:
            self._beating.cancel()
        self._frames.put_nowait(None)

    async def ended(self) -> str:
        return self.how

    async def running(self) -> int | None:
        return self.code_of

    def lost(self) -> bool:
        return self.is_lost

    async def kill(self) -> None:
        self.ends(self.code_of)

    async def close(self) -> None: ...


class Stage:
    """A host all of whose processes do what `plays` says."""

    def __init__(self, plays: Play, *, timeout_s: float = 0.2, start_timeout_s: float = 5.0) -> None:
        self.plays, self.timeout_s, self.start_timeout_s = plays, timeout_s, start_timeout_s
        self.links: list[Script] = []
        """The first is of the process for all."""
        self.answer: Answerer = self._at_once
        self.host = EpisodeHost(self._make, Loaded(episodic=True))

    def _make(self) -> EpisodeProcess:
        process = EpisodeProcess(
            label="e", env_id="e", args={}, timeout_s=self.timeout_s, start_timeout_s=self.start_timeout_s
        )
        process._link = Script(self.plays)
        self.links.append(process._link)
        return process

    @staticmethod
    async def _at_once(call: hosting.Call) -> hosting.Reply:
        return Sampled(call=call.call, text="", finish_reason="stop", num_tokens=0)

    def begin(self) -> asyncio.Task[Played | Failure]:
        return asyncio.create_task(self.host.play(TASK, seed=0, begin=lambda: self.answer))

    async def outcomes(self, num: int) -> list[str]:
        """Of so many rollouts that begin at once."""
        async with asyncio.timeout(LIMIT_S):
            ended = await asyncio.gather(*(self.begin() for _ in range(num)))
        return sorted(one.reason if isinstance(one, Failure) else "" for one in ended)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "CANCEL_GRACE_S", 0.1)


def end_all(link: Script) -> None:
    for number in link.begun:
        link.say(Ended(rollout=number, played=PLAYED))
    link.begun.clear()


# --- code of a rollout that is over ---


async def test_what_a_rollout_leaves_behind_cannot_hold_up_the_others_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plays(link: Script) -> None:
        if link.num_started == 1 and len(link.begun) == 2:
            first = link.begun[0]
            link.say(Ended(rollout=first, played=PLAYED))
            link.blocks(first)
        elif link.num_started == 2:
            end_all(link)

    stage = Stage(plays)
    assert await stage.outcomes(2) == ["", ""]
    assert stage.host.num_restarted == 1
    assert [message for message in caplog.messages if "code of a rollout that is over has held up" in message]
    await stage.host.close()


async def test_a_rollout_that_was_cancelled_and_does_not_let_go_cannot_either() -> None:
    def plays(link: Script) -> None:
        if link.num_started == 1 and len(link.begun) == 2:
            link.blocks(link.begun[0])
        elif link.num_started == 2:
            end_all(link)

    stage = Stage(plays, timeout_s=1.0)
    cancelled, other = stage.begin(), stage.begin()
    async with asyncio.timeout(LIMIT_S):
        while not stage.links[0].begun[1:]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cancelled.cancel()
        assert await other == PLAYED
    await stage.host.close()


async def test_a_rollout_whose_last_beat_is_old_is_not_taken_for_one_that_does_not_let_go() -> None:
    """It has ended since, and nothing was heard for a while."""

    def plays(link: Script) -> None:
        if len(link.begun) == 2:
            link.say(Beat(running=link.begun[0], num_steps=7))
            link.say(Ended(rollout=link.begun[0], played=PLAYED))
            asyncio.get_running_loop().call_later(0.5, link.say, Ended(rollout=link.begun[1], played=PLAYED))

    stage = Stage(plays)
    assert await stage.outcomes(2) == ["", ""]
    assert stage.host.num_restarted == 0
    await stage.host.close()


async def test_nor_is_one_whose_last_code_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next beat the process has last told of code that is over."""
    monkeypatch.setattr(hosting, "WATCH_INTERVAL_S", 0.02)

    def plays(link: Script) -> None:
        if len(link.begun) == 2:
            asyncio.get_running_loop().create_task(long_code(link))

    async def long_code(link: Script) -> None:
        link.blocks(link.begun[0])
        await asyncio.sleep(0.5)  # CANCEL_GRACE_S is 0.1
        assert link._beating is not None
        link._beating.cancel()
        link.say(Ended(rollout=link.begun[0], played=PLAYED))
        await asyncio.sleep(0.3)
        link.say(Beat(running=NOBODY, num_steps=8))
        link.say(Ended(rollout=link.begun[1], played=PLAYED))

    stage = Stage(plays, timeout_s=5.0)
    assert await stage.outcomes(2) == ["", ""]
    assert stage.host.num_restarted == 0
    await stage.host.close()


# --- who is to blame ---


async def test_those_who_were_there_when_another_spent_the_process_are_not_under_suspicion() -> None:
    """Three times, which is more than where nobody knows whose fault it was."""

    def plays(link: Script) -> None:
        if len(link.begun) == 9 - link.num_started:
            if link.num_started == 4:
                end_all(link)
                return
            hog = link.begun.pop()
            link.say(Failed(rollout=hog, reason="env_memory", message="MemoryError"))
            asyncio.get_running_loop().call_later(0.02, link.ends, hog)  # it is no rollout of the process any more

    stage = Stage(plays)
    assert await stage.outcomes(8) == [""] * 5 + ["env_memory"] * 3
    assert stage.host.num_restarted == 7 + 6 + 5
    assert not any(link.num_started for link in stage.links[1:])
    await stage.host.close()


async def test_after_many_crashes_a_few_run_at_a_time_and_nobody_alone() -> None:
    num_crashes = hosting.MAX_TOGETHER + 1
    crashed: list[int] = []

    def plays(link: Script) -> None:
        expected = hosting.NUM_FEW if len(crashed) >= hosting.MAX_TOGETHER else 20 - len(crashed)
        if len(link.begun) == expected and len(crashed) < num_crashes:
            crashed.append(link.begun[-1])
            link.ends(link.begun[-1])
        elif len(crashed) == num_crashes:
            end_all(link)

    stage = Stage(plays, timeout_s=5.0)
    assert await stage.outcomes(20) == [""] * 15 + ["env_crashed"] * 5
    assert sorted(link.most for link in stage.links) == [0, hosting.NUM_FEW, 20]
    await stage.host.close()


async def test_a_connection_that_is_lost_three_times_is_nobodys_fault() -> None:
    def plays(link: Script) -> None:
        if len(link.begun) == 3:
            if link.num_started == 4:
                end_all(link)
            else:
                link.ends(None, is_lost=True)

    stage = Stage(plays)
    assert await stage.outcomes(3) == [""] * 3
    assert not any(link.num_started for link in stage.links[1:])
    await stage.host.close()


async def test_where_nobody_knows_whose_fault_it_was_each_begins_alone() -> None:
    ended: list[int] = []

    def plays(link: Script) -> None:
        if len(link.begun) == 3:
            ended.append(link.num_started)
            link.ends(None)
        elif len(ended) == hosting.MAX_UNEXPLAINED:
            end_all(link)

    stage = Stage(plays)
    assert await stage.outcomes(3) == [""] * 3
    assert sorted(link.most for link in stage.links)[-2:] == [1, 3]
    await stage.host.close()


# --- late ---


async def test_rollouts_that_are_late_at_one_moment_are_one_sign_that_the_environment_hangs() -> None:
    def plays(link: Script) -> None:
        link.blocks(NOBODY)

    stage, rate = Stage(plays, timeout_s=0.3), FailureRate(window=100, limit=1.0, max_late_in_a_row=2)
    async with asyncio.timeout(LIMIT_S):
        first = await asyncio.gather(*(stage.begin() for _ in range(8)))
        for late in first:
            assert isinstance(late, Failure)
            rate.record("e", late)
        second = await stage.begin()
    assert isinstance(second, Failure)
    with pytest.raises(EnvironmentFailed, match="environment e hangs, 2 times in a row"):
        rate.record("e", second)
    await stage.host.close()


# --- what is said ---


async def test_whose_code_is_waited_for_is_known_while_no_server_is_asked() -> None:
    def plays(link: Script) -> None:
        link.say(Called(rollout=link.begun[-1], call=0, role="policy", conversation=0, messages=[]))

    stage, pool, sampled = Stage(plays, timeout_s=5.0), EnvironmentPool([]), asyncio.Event()
    pool.hosts["e"] = stage.host
    asked = asyncio.Event()

    async def answer(call: hosting.Call) -> hosting.Reply:
        asked.set()
        await sampled.wait()
        return await stage._at_once(call)

    stage.answer = answer
    assert pool.scoring == []
    playing = stage.begin()
    async with asyncio.timeout(LIMIT_S):
        await asked.wait()
        assert pool.scoring == []
        sampled.set()
        while not pool.scoring:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert pool.scoring == ["e"]
        end_all(next(link for link in stage.links if link.begun))
        await playing
    assert pool.scoring == []
    await stage.host.close()


async def test_a_process_that_ends_at_once_or_comes_up_too_slowly_is_said_to_do_so() -> None:
    stage = Stage(end_all, start_timeout_s=0.05)
    for link in stage.links:
        link.silent, link.how = True, "ended its process with exit code 1"
    with pytest.raises(EnvironmentFailed) as slow:
        await stage.begin()
    for link in stage.links:
        link.ends_at_once = True
    with pytest.raises(EnvironmentFailed) as ended:
        await stage.begin()
    assert str(slow.value) == "environment e did not start: it took longer than 0.05 s, before any code of its own"
    assert str(ended.value) == "environment e did not start: environment e ended its process with exit code 1"
