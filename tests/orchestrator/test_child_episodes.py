"""A process that rolls out episodes, as the orchestrator sees it."""

import asyncio
import contextlib
import inspect
import itertools
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from orchestrator.workers.child_marker import Marker
from orchestrator.workers.child_output import Allowance, forward
from orchestrator.workers.child_stream import MAX_BUFFERED_BYTES, Outbox
from orchestrator.workers.playing import shortened
from orchestrator.workers.spawned import spawn
from orchestrator.workers.wire import (
    Answer,
    Asked,
    Beat,
    Begin,
    Called,
    Cancel,
    Dataset,
    Ended,
    Failed,
    Load,
    Loaded,
    MarkedError,
    Played,
    PlayedStep,
    Prompts,
    Raised,
    Refused,
    Request,
    RoleInfo,
    Sampled,
    Scored,
    ScoreOne,
    StoreAnswer,
    Stored,
    frame,
)

LIMIT_S = 30.0
in_one_process = pytest.mark.asyncio(loop_scope="module")
EPISODES = """
import asyncio, os, subprocess, sys, time
from grpo.api import *

kept, late = [], []

def score(state, extras):
    if state.example["prompt"] == "nan":
        return float("nan")
    return float(len(state.trajectory))

class Sub(SingleTurnEpisode):
    roles = [Role(id="solver", max_tokens=9)]
    rubric = Rubric([lambda completion, example: float(completion == example["answer"])])

class Play(MultiTurnEpisode, Environment):
    rubric = Rubric([score])
    roles = [Role(id="policy", system_prompt="Be brief.", temperature=0.5)]
    episodes = {"solve": Sub()}
    stores = {"questions": 10}
    max_turns = 2

    def __init__(self, prompts):
        self.prompts = prompts

    def dataset(self, split):
        if split == "broken":
            raise OSError("no such file")
        return [{"prompt": prompt} for prompt in self.prompts]

    def extras(self, state):
        if state.example["prompt"] == "spawn":
            return {"late": late}
        return {"texts": [reply.text for reply in state.trajectory]}

    async def respond(self, state, arena):
        prompt = state.example["prompt"]
        if prompt == "raise":
            raise KeyError("my key")
        if prompt == "exit":
            sys.exit(4)
        if prompt == "exit in a task":
            await asyncio.create_task(self.exit())
        if prompt == "os._exit":
            print("last words", file=sys.stderr)
            os._exit(3)
        if prompt == "block":
            time.sleep(100)
        if prompt == "print":
            while True:
                print("y" * 70)
        if prompt == "memory":
            while True:
                kept.append(bytearray(1 << 20))
        if prompt == "stubborn":
            while True:
                try:
                    await arena.call("policy", [{"role": "user", "content": "on"}])
                except asyncio.CancelledError:
                    return None
        if prompt == "leave":
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(self.late(arena)))
            return None
        if prompt == "spawn":
            await arena.spawn("solve", [{"prompt": "a?", "answer": "a"}, {"prompt": "b?", "answer": "b"}])
            return None
        if prompt == "stores":
            store = arena.stores["questions"]
            state.data["id"] = await store.add({"q": 1}, weight=0.5)
            await store.set_weight("7", 2)
            drawn = await store.sample(2, weighted=True)
            return f"{state.data['id']} {drawn} {await store.size()}"
        if prompt == "ask":
            return await arena.ask([{"role": "user", "content": "which?"}])
        state.mark_error("vague", "be_precise", "what?")
        return "Go on."

    async def exit(self):
        sys.exit(5)

    async def late(self, arena):
        try:
            await arena.call("policy", [{"role": "user", "content": "too late"}])
        except CallFailed as error:
            late.append(str(error))

def weigh(completion, example):
    return float(len(bytearray(1 << int(completion))))

class Single(Environment):
    rubric = Rubric([weigh])
    def dataset(self, split):
        return [{"prompt": "hi"}]
"""

PROMPTS = (
    "hi",
    "raise",
    "nan",
    "exit",
    "exit in a task",
    "os._exit",
    "block",
    "print",
    "memory",
    "stubborn",
    "leave",
    "spawn",
    "stores",
    "ask",
)

Rule = Callable[[Called | Asked | Stored], Request | None]


def echo(call: Called | Asked | Stored) -> Request | None:
    """Answers with what was asked last."""
    if isinstance(call, Stored):
        return StoreAnswer(
            call=call.call, result={"add": "7", "sample": [["7", {"q": 1}]], "size": 3}.get(call.operation)
        )
    text = str(call.messages[-1]["content"])
    return Sampled(call=call.call, text=text.removesuffix("?"), finish_reason="stop", num_tokens=len(text))


class Orchestrator:
    """Has one process, and answers its calls by a rule."""

    def __init__(self, rule: Rule = echo) -> None:
        self.rule = rule
        self.calls: list[Called | Asked | Stored] = []
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[Ended | Failed]] = {}
        self._others: asyncio.Queue[Answer] = asyncio.Queue()

    async def start(self) -> None:
        self.process, self._stream = await spawn()
        self._reading = asyncio.create_task(self._read())
        assert await self.other() == Loaded()

    async def load(self, env_id: str, *, memory_bytes: int | None = None, **args: Any) -> Answer:
        self.send(Load(env_id=env_id, args=args, episodes=True, memory_bytes=memory_bytes))
        return await self.other()

    def begin(self, prompt: str, *, split: str = "train", index: int | None = None, score: bool = True) -> int:
        number = next(self._numbers)
        self._ends[number] = asyncio.get_running_loop().create_future()
        place = PROMPTS.index(prompt) if index is None else index
        messages = [{"role": "user", "content": prompt}]
        self.send(Begin(rollout=number, split=split, index=place, prompt=messages, seed=7, score=score))
        return number

    async def end_of(self, number: int) -> Ended | Failed:
        return await asyncio.wait_for(self._ends[number], LIMIT_S)

    async def roll_out(self, prompt: str, **options: Any) -> Ended | Failed:
        return await self.end_of(self.begin(prompt, **options))

    async def other(self) -> Answer:
        return await asyncio.wait_for(self._others.get(), LIMIT_S)

    def send(self, request: Request) -> None:
        self._stream.writer.write(frame(request))

    def answer(self, place: int) -> None:
        """Answers a call that nobody has answered yet, by its place."""
        request = echo(self.calls[place])
        assert request is not None
        self.send(request)

    async def close(self) -> None:
        self._reading.cancel()
        await self._stream.close(5)
        await self.process.end()
        self.process.forget()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        with contextlib.suppress(EOFError):
            while True:
                self._take(decoder.decode(await self._stream.receive()))

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Called | Asked | Stored):
            self.calls.append(answer)
            if (request := self.rule(answer)) is not None:
                self.send(request)
        elif isinstance(answer, Ended | Failed):
            self._ends[answer.rollout].set_result(answer)
        elif not isinstance(answer, Beat):
            self._others.put_nowait(answer)


@pytest.fixture(scope="module")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("envs") / "plays.py"
    path.write_text(EPISODES)
    return str(path)


@contextlib.asynccontextmanager
async def playing(env_file: str, **load: Any) -> AsyncIterator[Orchestrator]:
    """An orchestrator with a process of its own."""
    orchestrator = Orchestrator()
    await orchestrator.start()
    try:
        assert isinstance(await orchestrator.load(f"{env_file}:Play", prompts=PROMPTS, **load), Loaded)
        yield orchestrator
    finally:
        await orchestrator.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(env_file: str) -> AsyncIterator[Orchestrator]:
    """One process for all tests that leave it as it was."""
    async with playing(env_file) as orchestrator:
        yield orchestrator


@pytest.fixture
def orchestrator(shared: Orchestrator) -> Orchestrator:
    """As if nothing had been called yet."""
    shared.rule = echo
    shared.calls.clear()
    return shared


def steps(result: Ended | Failed) -> list[int]:
    assert isinstance(result, Ended), result
    return [step.call for step in result.played.steps]


async def printed(capfd: pytest.CaptureFixture[str], text: str) -> str:
    """All that is printed up to and with `text`."""
    deadline_s, so_far = time.monotonic() + LIMIT_S, capfd.readouterr().err
    while text not in so_far:
        assert time.monotonic() < deadline_s, so_far[-2000:]
        await asyncio.sleep(0.01)
        so_far += capfd.readouterr().err
    return so_far


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


# --- what an episode does, as frames ---


async def test_loading_tells_roles_and_stores_and_a_second_mode_gives_the_prompts(env_file: str) -> None:
    orchestrator = Orchestrator()
    await orchestrator.start()
    orchestrator.send(Load(env_id=f"{env_file}:Play", args={"prompts": ["a", "b"]}))
    assert await orchestrator.other() == Loaded(
        episodic=True,
        roles=[RoleInfo(id="policy", temperature=0.5), RoleInfo(id="solver", max_tokens=9)],
        stores={"questions": 10},
    )
    orchestrator.send(Dataset(split="train"))
    assert await orchestrator.other() == Prompts(
        prompts=[[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    )
    await orchestrator.close()


async def test_an_environment_without_an_episode_says_so_and_plays_none(env_file: str) -> None:
    orchestrator = Orchestrator()
    await orchestrator.start()
    raised = await orchestrator.load(f"{env_file}:Single")
    assert isinstance(raised, Raised)
    assert "Single has no episode to roll out, only a rubric for single answers" in raised.message
    await orchestrator.close()


async def test_memory_that_a_single_answer_takes_costs_that_one(env_file: str) -> None:
    orchestrator = Orchestrator()
    await orchestrator.start()
    orchestrator.send(Load(env_id=f"{env_file}:Single", args={}, memory_bytes=100 << 20))
    assert await orchestrator.other() == Loaded(roles=[RoleInfo(id="policy")])
    orchestrator.send(Dataset(split="train"))
    await orchestrator.other()
    for exponent in (10, 28, 10):
        orchestrator.send(ScoreOne(split="train", index=0, completion=str(exponent)))
    before, failed, after = [await orchestrator.other() for _ in range(3)]
    assert before == after == Scored(reward=1024.0, accuracy=1024.0, metrics={"weigh": 1024.0})
    assert isinstance(failed, Raised)
    assert failed.reason == "env_memory"
    assert "MemoryError" in failed.message
    await orchestrator.close()


@in_one_process
async def test_a_conversation_goes_on_with_what_is_new_in_it(orchestrator: Orchestrator) -> None:
    ended = await orchestrator.roll_out("hi")
    assert isinstance(ended, Ended)
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    first, second = orchestrator.calls
    assert isinstance(first, Called)
    assert isinstance(second, Called)
    assert (first.role, first.messages) == ("policy", told)
    assert (second.conversation, second.messages) == (first.conversation, [{"role": "user", "content": "Go on."}])
    error = MarkedError(error_kind="vague", hint_template_key="be_precise", message="what?")
    assert ended.played == Played(
        steps=[PlayedStep(call=first.call, error=error), PlayedStep(call=second.call, error=error)],
        rewards={"policy": 2.0},
        accuracy=2.0,
        metrics={"score": 2.0},
        extras={"texts": ["hi", "Go on."]},
    )


@in_one_process
async def test_sub_episodes_are_in_their_parents_rollout_and_have_conversations_of_their_own(
    orchestrator: Orchestrator,
) -> None:
    ended = await orchestrator.roll_out("spawn")
    assert isinstance(ended, Ended)
    calls = [call for call in orchestrator.calls if isinstance(call, Called)]
    assert {call.rollout for call in calls} == {ended.rollout}
    assert [(call.role, call.conversation) for call in calls] == [("policy", 0), ("solver", 1), ("solver", 2)]
    assert steps(ended) == [calls[0].call]
    assert [child.rewards for child in ended.played.children] == [{"solver": 1.0}, {"solver": 1.0}]
    assert [child.steps for child in ended.played.children] == [[PlayedStep(call=call.call)] for call in calls[1:]]


@in_one_process
async def test_what_nobody_scores_has_no_rewards(orchestrator: Orchestrator) -> None:
    ended = await orchestrator.roll_out("spawn", score=False)
    assert isinstance(ended, Ended)
    assert (ended.played.rewards, ended.played.accuracy, ended.played.metrics) == ({"policy": 0.0}, 0.0, {})
    assert [child.rewards for child in ended.played.children] == [{"solver": 0.0}] * 2
    assert len(steps(await orchestrator.roll_out("nan", score=False))) == 2


@in_one_process
async def test_stores_are_the_orchestrators(orchestrator: Orchestrator) -> None:
    await orchestrator.roll_out("stores")
    stored = [(call.operation, call.arguments) for call in orchestrator.calls if isinstance(call, Stored)]
    assert stored[:4] == [
        ("add", {"data": {"q": 1}, "weight": 0.5}),
        ("set_weight", {"id": "7", "weight": 2.0}),
        ("sample", {"num": 2, "weighted": True, "replace": True}),
        ("size", {}),
    ]
    answer = [call.messages for call in orchestrator.calls if isinstance(call, Called)][1]
    assert answer == [{"role": "user", "content": "7 [('7', {'q': 1})] 3"}]


@in_one_process
async def test_what_is_asked_beside_the_policy_is_no_step(orchestrator: Orchestrator) -> None:
    ended = await orchestrator.roll_out("ask")
    asked = next(call for call in orchestrator.calls if isinstance(call, Asked))
    assert (asked.model, asked.temperature, asked.messages) == ("base", 0, [{"role": "user", "content": "which?"}])
    assert asked.call not in steps(ended)


@in_one_process
async def test_a_context_that_is_full_ends_a_conversation_or_refuses_the_prompt(orchestrator: Orchestrator) -> None:
    def full(call: Called | Asked | Stored) -> Request | None:
        again = isinstance(call, Called) and call.messages[-1]["content"] == "Go on."
        if again or len(orchestrator.calls) == 1:
            return Refused(call=call.call, reason="context_full", message="512 of 512 tokens")
        return echo(call)

    orchestrator.rule = full
    refused, ended = await orchestrator.roll_out("hi"), await orchestrator.roll_out("hi")
    assert refused == Failed(rollout=refused.rollout, reason="context_full", message="512 of 512 tokens")
    assert isinstance(ended, Ended)
    assert ended.played.truncated
    assert steps(ended) == [orchestrator.calls[1].call]


# --- what goes wrong ---


@in_one_process
@pytest.mark.parametrize(
    ("prompt", "reason", "message"),
    [
        ("raise", "env_error", "KeyError: 'my key'"),
        ("nan", "reward_not_finite", "score returned nan, expected a finite number"),
        ("exit", "env_error", "SystemExit: 4"),
        ("exit in a task", "env_error", "UserExit: SystemExit(5)"),
    ],
)
async def test_what_user_code_raises_costs_its_rollout_alone(
    orchestrator: Orchestrator, prompt: str, reason: str, message: str
) -> None:
    numbers = [orchestrator.begin(text) for text in ("hi", prompt)]
    before, failed = [await orchestrator.end_of(number) for number in numbers]
    after = await orchestrator.roll_out("hi")
    assert len(steps(before)) == len(steps(after)) == 2
    assert isinstance(failed, Failed)
    assert failed.reason == reason
    assert message in failed.message


@in_one_process
async def test_a_call_that_comes_to_nothing_is_an_error_in_the_rollout(orchestrator: Orchestrator) -> None:
    orchestrator.rule = lambda call: Refused(call=call.call, reason="failed", message="no server is left")
    failed = await orchestrator.roll_out("hi")
    assert isinstance(failed, Failed)
    assert failed.reason == "env_error"
    assert failed.message.endswith("CallFailed: no server is left\n")


@in_one_process
async def test_a_rollout_that_is_cancelled_ends_and_others_do_not(orchestrator: Orchestrator) -> None:
    orchestrator.rule = lambda call: None
    waits, stubborn, goes_on = (orchestrator.begin(prompt) for prompt in ("hi", "stubborn", "hi"))
    await until(lambda: len(orchestrator.calls) == 3)
    orchestrator.answer(1)
    await until(lambda: len(orchestrator.calls) == 4)
    for number in (waits, stubborn, 999):
        orchestrator.send(Cancel(rollout=number))
    for number in (waits, stubborn):
        assert await orchestrator.end_of(number) == Failed(rollout=number, reason="cancelled", message="")
    orchestrator.rule = echo
    orchestrator.answer(2)
    assert len(steps(await orchestrator.end_of(goes_on))) == 2


@in_one_process
async def test_a_rollout_that_is_cancelled_before_it_begins_ends_too(orchestrator: Orchestrator) -> None:
    numbers = [orchestrator.begin("hi") for _ in range(20)]
    for number in numbers:
        orchestrator.send(Cancel(rollout=number))
    ends = [await orchestrator.end_of(number) for number in numbers]
    assert any(isinstance(end, Failed) and end.reason == "cancelled" for end in ends)


@in_one_process
async def test_what_a_rollout_leaves_behind_can_call_nobody(orchestrator: Orchestrator) -> None:
    left = await orchestrator.roll_out("leave")
    deadline_s, late = time.monotonic() + LIMIT_S, list[str]()
    while not late:
        assert time.monotonic() < deadline_s
        ended = await orchestrator.roll_out("spawn")
        assert isinstance(ended, Ended)
        late = ended.played.extras["late"]
    assert late == ["the rollout is over, and something that it started goes on; await all tasks in it"]
    assert len([call for call in orchestrator.calls if call.rollout == left.rollout]) == 1


@in_one_process
async def test_a_dataset_that_is_another_one_after_a_restart_is_an_error(orchestrator: Orchestrator) -> None:
    other = await orchestrator.roll_out("ho", index=0)
    gone = await orchestrator.roll_out("hi", index=len(PROMPTS))
    broken = await orchestrator.roll_out("hi", split="broken")
    assert isinstance(other, Failed)
    assert "it must be the same at every call: seed what it draws at random" in other.message
    assert isinstance(gone, Failed)
    assert f"dataset('train') has {len(PROMPTS)} examples now and had more before" in gone.message
    assert isinstance(broken, Failed)
    assert "OSError: no such file" in broken.message


@in_one_process
async def test_a_request_that_belongs_to_the_other_mode_is_refused(orchestrator: Orchestrator) -> None:
    orchestrator.send(ScoreOne(split="train", index=0, completion=""))
    raised = await orchestrator.other()
    assert raised == Raised(reason="env_error", message="a process that rolls out episodes was sent a ScoreOne")
    assert len(steps(await orchestrator.roll_out("hi"))) == 2


@in_one_process
async def test_five_hundred_rollouts_run_at_once(orchestrator: Orchestrator) -> None:
    orchestrator.rule = lambda call: None
    numbers = [orchestrator.begin("hi") for _ in range(500)]
    await until(lambda: len(orchestrator.calls) == 500)
    orchestrator.rule = echo
    began_s = time.perf_counter()
    for place in range(500):
        orchestrator.answer(place)
    ends = [await orchestrator.end_of(number) for number in numbers]
    assert time.perf_counter() - began_s < 10  # under 1 s where the machine does nothing else
    assert {len(steps(end)) for end in ends} == {2}


# --- what ends the process ---


async def test_who_blocks_the_others_is_known_also_once_the_process_is_killed(env_file: str) -> None:
    async with playing(env_file) as orchestrator:
        orchestrator.rule = lambda call: None
        for _ in range(5):
            orchestrator.begin("hi")
        blocking = orchestrator.begin("block")
        await until(lambda: len(orchestrator.calls) == 6)
        assert orchestrator.process.running() is None
        orchestrator.answer(5)
        await until(lambda: orchestrator.process.running() == blocking)
        orchestrator.answer(0)
        await asyncio.sleep(0.1)
        await orchestrator.process.end()
        assert orchestrator.process.running() == blocking


async def test_who_ended_the_process_is_known_and_what_it_printed_is_in_the_log(
    env_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with playing(env_file) as orchestrator:
        number = orchestrator.begin("os._exit")
        await asyncio.wait_for(orchestrator.process.exited(), LIMIT_S)
        assert orchestrator.process.running() == number
        assert await orchestrator.process.end() == 3
        await printed(capfd, "last words")


async def test_memory_without_end_is_that_rollouts_and_ends_the_process(env_file: str) -> None:
    async with playing(env_file, memory_bytes=100 << 20) as orchestrator:
        failed = await orchestrator.roll_out("memory")
        assert isinstance(failed, Failed)
        assert failed.reason == "env_memory"
        assert "MemoryError" in failed.message
        await asyncio.wait_for(orchestrator.process.exited(), LIMIT_S)
        assert await orchestrator.process.end() == 70


async def test_output_without_end_is_cut_short(env_file: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with playing(env_file) as orchestrator:
        began_s = time.monotonic()
        number = orchestrator.begin("print")
        await until(lambda: orchestrator.process.running() == number)
        await asyncio.sleep(0.3)
        await orchestrator.process.end()
        took_s = time.monotonic() - began_s
        text = await printed(capfd, "bytes of output left out: more than 65536 a second]")
    assert text.startswith("y" * 70)
    assert len(text) < (256 << 10) + (took_s + 1) * (64 << 10)


# --- its parts ---


async def test_a_task_says_whose_it_is_while_it_runs_and_so_do_those_that_it_starts() -> None:
    memory = os.memfd_create("running")
    os.ftruncate(memory, 8)
    marker, loop = Marker(os.dup(memory)), asyncio.get_running_loop()
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        [seen[name]] = struct.unpack("<q", os.pread(memory, 8, 0))

    async def child() -> None:
        await asyncio.sleep(0)
        look("child")

    async def parent() -> None:
        look("begins")
        loop.call_soon(look, "between")
        await asyncio.sleep(0)
        look("goes on")
        await asyncio.gather(child(), asyncio.wait_for(asyncio.create_task(child()), 5))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(5)
        look("thrown into")

    loop.set_task_factory(marker.make_task)
    try:
        task = marker.start(loop, 12, parent())
        await loop.create_task(nothing())
        state = inspect.getcoroutinestate(task.get_coro())  # type: ignore[arg-type]
        await task
    finally:
        loop.set_task_factory(None)
        os.close(memory)
    assert seen == {"begins": 12, "between": -1, "goes on": 12, "child": 12, "thrown into": 12}
    assert state == inspect.CORO_SUSPENDED


async def nothing() -> None:
    """Takes a turn of the event loop."""


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_output_passes_up_to_its_limit_and_a_notice_says_what_did_not() -> None:
    clock = Clock()
    allowance = Allowance(rate=10, burst=100, clock=clock)
    assert allowance.take(b"x" * 90) == b"x" * 90
    assert allowance.notice() == b""
    assert allowance.take(b"y" * 30) == b"y" * 10
    assert allowance.take(b"z") == b""
    clock.now_s = 4.9
    assert allowance.notice() == b""
    assert allowance.take(b"more") == b""
    clock.now_s = 5.0
    assert allowance.notice() == b"\n[25 bytes of output left out: more than 10 a second]\n"
    assert allowance.take(b"again") == b"again"
    assert allowance.last_notice() == b""


def test_output_that_nobody_reads_any_more_stops_nobody() -> None:
    (source, sink), (unread, target) = os.pipe(), os.pipe()
    os.close(unread)
    os.write(sink, b"x")
    os.close(sink)
    owner = os.pidfd_open(os.getpid())
    forward(source, target, owner, Allowance())
    for descriptor in (source, target, owner):
        os.close(descriptor)


async def test_frames_that_nobody_reads_wait_and_so_does_who_sends_more() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = asyncio.get_running_loop()
        outbox = Outbox(ours, loop)
        data = bytes(range(256)) * (MAX_BUFFERED_BYTES // 256 + (1 << 12))
        outbox.send(data)
        outbox.send(b"end")
        waiting = asyncio.create_task(outbox.drain())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        theirs.setblocking(False)
        received = bytearray()
        while len(received) < len(data) + 3:
            received += await loop.sock_recv(theirs, 1 << 20)
        await asyncio.wait_for(waiting, LIMIT_S)
        assert received == data + b"end"
        await outbox.drain()


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = "begin" + "x" * 100_000 + "\ud83d end"
    short = shortened(text)
    assert short.startswith("begin")
    assert short.endswith("? end")
    assert "characters left out" in short
    assert len(short) < 21_000
    assert shortened("all") == "all"
