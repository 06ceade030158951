"""Teachers that answer, and all the ways in which they do not."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from orchestrator.disagreement import teachers as teachers_module
from orchestrator.disagreement.actions import Action, Call
from orchestrator.disagreement.asking import Asker, BoundedQueue
from orchestrator.disagreement.budget import Budget, Price
from orchestrator.disagreement.teachers import Answered, NotAnswered, TeacherEndpoint, retry_after_s
from tests.orchestrator.disagreement.teachers import (
    FakeTeachers,
    Say,
    completion,
    cut,
    hung_up,
    says,
    slow,
    status,
    teachers_serving,
    text,
)
from tests.orchestrator.fakes import until

HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTeachers]:
    async with teachers_serving() as serving:
        yield serving


class Asking:
    """An asker that is closed at the end of a test, with its budget and its clock."""

    def __init__(self) -> None:
        self.askers: list[Asker] = []
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self, *endpoints: TeacherEndpoint, ceiling: float | None = None, **settings: Any) -> Asker:
        self.budget = Budget({one.name: one.price for one in endpoints}, ceiling=ceiling)
        self.askers.append(Asker(endpoints, budget=self.budget, clock=self.clock, sleep=self.sleep, **settings))
        return self.askers[-1]

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def asking() -> AsyncIterator[Asking]:
    made = Asking()
    yield made
    for asker in made.askers:
        await asker.close()


async def ask(asker: Asker, messages: list[dict[str, Any]] = HI, trace: str = "0/0") -> list[Answered | NotAnswered]:
    return list((await asker.ask(messages, trace=trace)).by_teacher.values())


async def one(asker: Asker, content: str = "hi") -> Answered | NotAnswered:
    [answer] = await ask(asker, [{"role": "user", "content": content}])
    return answer


# --- well ---


async def test_all_teachers_are_asked_the_same_and_answer_at_once(fake: FakeTeachers, asking: Asking) -> None:
    together = asyncio.Barrier(3)

    async def wait_for_others(request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(5):
            await together.wait()
        return completion("Z")

    for name in "abc":
        fake.says[name].append(wait_for_others)
    asker = asking(*map(fake.endpoint, "abc"))
    answers = await asker.ask(HI, trace="0/0")
    assert answers.actions == {name: Action(text="Z") for name in "abc"}
    bodies = [body for _, body in fake.requests]
    assert sorted(body["model"] for body in bodies) == ["a", "b", "c"]
    shared: dict[str, Any] = {"messages": HI, "max_tokens": 1024, "temperature": 0.0}
    assert all({key: body[key] for key in body if key != "model"} == shared for body in bodies)
    assert asker.num["answered"] == asker.num["asked"] == 3


async def test_keys_come_from_the_environment_by_name(
    fake: FakeTeachers, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="the environment variable A_KEY is not set, expected the key of teacher a"):
        fake.endpoint("a", api_key_var="A_KEY")
    monkeypatch.setenv("A_KEY", "sk-secret")
    fake.says["a"].append(status(401, "wrong key: sk-secret"))
    asker = asking(fake.endpoint("a", api_key_var="A_KEY"), fake.endpoint("b"))
    denied, _ = await ask(asker)
    assert isinstance(denied, NotAnswered)
    assert denied.reason == "unauthorized"
    assert denied.message.endswith("status 401: wrong key: ***")
    keys = {body["model"]: headers.get("Authorization") for headers, body in fake.requests}
    assert keys == {"a": "Bearer sk-secret", "b": None}


async def test_tools_and_what_an_api_wants_otherwise_are_told(fake: FakeTeachers, asking: Asking) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    fake.says["a"].append(says(lambda: completion(None, finish_reason="tool_calls", tool_calls=[call])))
    odd = {"temperature": None, "max_tokens_field": "max_completion_tokens", "extra": {"reasoning_effort": "low"}}
    asker = asking(fake.endpoint("a", **odd), fake.endpoint("b", tool_role="tool"))
    messages = [*HI, {"role": "assistant", "content": "ADD[1]"}, {"role": "tool", "content": "3"}]
    schema = {"type": "function", "function": {"name": "add"}}
    answers = await asker.ask(messages, [schema], trace="0/0")
    assert answers.actions["a"] == Action(text="", tool_calls=(Call(name="add", arguments={"a": 1}),))
    to = {body["model"]: body for _, body in fake.requests}
    assert to["a"].keys() == {"model", "messages", "tools", "max_completion_tokens", "reasoning_effort"}
    assert to["a"]["tools"] == [schema]
    assert [to[name]["messages"][2]["role"] for name in "ab"] == ["user", "tool"]


# --- not well ---

FAULTS: dict[str, tuple[Say, str, str]] = {
    "500": (status(500, "oops"), "server_error", "status 500: oops$"),
    "429": (status(429), "rate_limited", "status 429"),
    "403": (status(403), "unauthorized", "status 403"),
    "404": (status(404, "no such model"), "unauthorized", "no such model"),
    "400": (status(400, "too long"), "refused", "too long"),
    "302": (status(302, Location="http://127.0.0.1:9/"), "nonsense", "status 302"),
    "no json": (text("<html>Busy</html>"), "nonsense", "no chat completion \\(no JSON\\): <html>"),
    "no object": (text("[1]"), "nonsense", "no object"),
    "deep": (text("[" * 100_000), "nonsense", "no JSON"),
    "no choices": (text('{"choices": []}'), "nonsense", "no chat completion"),
    "no text": (says(lambda: completion(7)), "nonsense", "its content is a int"),
    "half a pair": (text('{"choices": [{"message": {"content": "\\ud800"}}]}'), "nonsense", "surrogates"),
    "bad call": (
        says(lambda: completion("", tool_calls=[{"function": {"name": "add", "arguments": "{"}}])),
        "nonsense",
        "no chat completion",
    ),
    "an error with 200": (text('{"error": {"code": 502}}'), "server_error", "502"),
    "cut": (cut, "unreachable", "Client(Payload|Connection|OS)"),
    "hung up": (hung_up, "unreachable", "ServerDisconnected|ClientOSError"),
    "cut short": (says(lambda: completion("X", finish_reason="length")), "cut_short", "max_tokens"),
    "filtered": (says(lambda: completion("", finish_reason="content_filter")), "withheld", "content_filter"),
    "refusal": (says(lambda: completion(None, refusal="I will not")), "withheld", "I will not"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_fault_of_a_teacher_is_a_value_with_its_reason(
    fake: FakeTeachers, asking: Asking, fault: str
) -> None:
    say, reason, message = FAULTS[fault]
    fake.says["a"] += [say] * 9
    asker = asking(fake.endpoint("a", num_retries=0), fake.endpoint("b"))
    bad, good = await ask(asker)
    assert isinstance(bad, NotAnswered)
    assert bad.reason == reason
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad.message)
    assert isinstance(good, Answered)
    assert asker.num[f"{reason}/a"] == asker.num[reason] == asker.num["answered/b"] == 1


@pytest.mark.parametrize("fault", ["500", "429", "no json", "cut", "hung up", "an error with 200"])
async def test_what_may_pass_is_tried_again(fake: FakeTeachers, asking: Asking, fault: str) -> None:
    fake.says["a"] += [FAULTS[fault][0]] * 2
    assert isinstance(await one(asking(fake.endpoint("a", num_retries=2))), Answered)
    assert fake.num_requests("a") == 3
    assert len(asking.slept) == 2


@pytest.mark.parametrize("fault", ["400", "403", "302", "cut short", "filtered"])
async def test_what_does_not_pass_is_not_tried_again(fake: FakeTeachers, asking: Asking, fault: str) -> None:
    fake.says["a"].append(FAULTS[fault][0])
    assert isinstance(await one(asking(fake.endpoint("a"))), NotAnswered)
    assert fake.num_requests("a") == 1


async def test_nobody_there_is_a_value_too(fake: FakeTeachers, asking: Asking) -> None:
    asker = asking(fake.endpoint("a", base_url="http://127.0.0.1:9/v1", num_retries=1))
    answer = await one(asker)
    assert isinstance(answer, NotAnswered)
    assert (answer.reason, answer.cost, asker.num_requests) == ("unreachable", 0.0, 2)


async def test_a_slow_teacher_holds_nobody_longer_than_its_deadline(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"].append(slow)
    asker = asking(fake.endpoint("a", timeout_s=0.1), fake.endpoint("b"))
    async with asyncio.timeout(3):
        late, good = await ask(asker)
    assert isinstance(late, NotAnswered)
    assert (late.reason, late.message) == ("timeout", f"{fake.base_url}/chat/completions: no answer within 0.1 s")
    assert isinstance(good, Answered)


async def test_an_endless_answer_is_given_up(
    fake: FakeTeachers, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers_module, "MAX_ANSWER_BYTES", 1000)
    fake.says["a"].append(text(json.dumps({"choices": "x" * 2000})))
    answer = await one(asking(fake.endpoint("a")))
    assert isinstance(answer, NotAnswered)
    assert (answer.reason, fake.num_requests("a")) == ("nonsense", 1)


async def test_retry_after_holds_all_questions_to_that_provider(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"].append(status(429, Retry_After="2"))
    assert isinstance(await one(asking(fake.endpoint("a"))), Answered)
    assert sum(asking.slept) == pytest.approx(2.0)


async def test_retry_after_beyond_the_deadline_is_not_waited_for(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"].append(status(429, Retry_After="3600"))
    asker = asking(fake.endpoint("a", failure_threshold=2))
    first, second, third = [await one(asker, content) for content in "xyz"]
    assert [getattr(answer, "reason", None) for answer in (first, second, third)] == [
        "rate_limited",
        "over_rate",
        "over_rate",
    ]
    assert (fake.num_requests("a"), asking.slept, asker.num_resting) == (1, [], 0)
    asking.now_s += 3600
    assert isinstance(await one(asker, "x"), Answered)


def test_retry_after_is_a_number_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    for header, seconds in ((date, 90.0), ("1.5", 1.5), ("-1", 0), ("soon", 0), ("nan", 0), ("inf", 86400), (None, 0)):
        assert retry_after_s(header, now_s=now.timestamp()) == seconds


async def test_a_rate_spreads_requests(fake: FakeTeachers, asking: Asking) -> None:
    asker = asking(fake.endpoint("a", requests_per_s=4.0, burst=2))
    for n in range(5):
        await one_of(asker, n)
    assert asking.slept == pytest.approx([0.25] * 3)


async def test_a_rate_that_allows_nothing_before_the_deadline_is_not_waited_for(
    fake: FakeTeachers, asking: Asking
) -> None:
    asker = asking(fake.endpoint("a", requests_per_s=0.1, burst=1, failure_threshold=1))
    answers = [await one(asker, content) for content in "xyz"]
    assert [getattr(answer, "reason", "answered") for answer in answers] == ["answered", "over_rate", "over_rate"]
    assert (fake.num_requests("a"), asking.slept, asker.num_resting) == (1, [], 0)


async def test_a_provider_that_fails_in_a_row_rests_and_is_tried_again(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"] += [status(500)] * 3
    asker = asking(fake.endpoint("a", num_retries=0, failure_threshold=2, cooldown_s=60.0), fake.endpoint("b"))
    for n in range(4):
        await one_of(asker, n)
    assert (fake.num_requests("a"), fake.num_requests("b"), asker.num_resting) == (2, 4, 1)
    assert (asker.num["server_error/a"], asker.num["resting/a"]) == (2, 2)
    asking.now_s += 60
    await one_of(asker, 4)  # fails again: rests twice as long
    asking.now_s += 60
    await one_of(asker, 5)
    assert fake.num_requests("a") == 3
    asking.now_s += 60
    await one_of(asker, 6)
    await one_of(asker, 7)
    assert (fake.num_requests("a"), asker.num_resting, asker.num["answered/a"]) == (5, 0, 2)


async def one_of(asker: Asker, n: int) -> None:
    await asker.ask([{"role": "user", "content": str(n)}], trace="0/0")


async def test_a_question_that_is_refused_is_no_fault_of_the_provider(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"] += [status(400)] * 3
    asker = asking(fake.endpoint("a", failure_threshold=1))
    for n in range(4):
        await one_of(asker, n)
    assert (asker.num["refused"], asker.num["answered"]) == (3, 1)


async def test_messages_that_are_no_json_are_a_value_too(fake: FakeTeachers, asking: Asking) -> None:
    answer = (await asking(fake.endpoint("a")).ask([{"role": "user", "content": object()}], trace="0/0")).by_teacher[
        "a"
    ]
    assert isinstance(answer, NotAnswered)
    assert answer.reason == "broken"


# --- what is known ---


async def test_a_state_is_asked_about_once_also_by_siblings_at_the_same_time(
    fake: FakeTeachers, asking: Asking
) -> None:
    price = Price(prompt=10.0, completion=100.0)
    asker = asking(fake.endpoint("a", price=price), fake.endpoint("b"))
    answers = await asyncio.gather(*(asker.ask(HI, trace=f"0/{n}") for n in range(4)))
    answers.append(await asker.ask([{"content": "hi", "role": "user"}], trace="1/0"))
    assert [answer.cost for answer in answers] == [2.0, 0.0, 0.0, 0.0, 0.0]  # 0.1 million · 10 + 0.01 million · 100
    assert all(answer.actions == answers[0].actions for answer in answers)
    assert len(fake.requests) == 2
    assert (asker.num["asked"], asker.num["cached"]) == (2, 8)
    await asker.ask(HI, [{"type": "function", "function": {"name": "add"}}], trace="1/0")
    assert len(fake.requests) == 4


async def test_whoever_did_not_answer_is_asked_again(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"].append(status(400))
    asker = asking(fake.endpoint("a"), fake.endpoint("b"))
    await ask(asker)
    assert all(isinstance(answer, Answered) for answer in await ask(asker))
    assert (fake.num_requests("a"), fake.num_requests("b")) == (2, 1)


async def test_one_who_gives_up_waiting_leaves_the_answer_to_the_others(fake: FakeTeachers, asking: Asking) -> None:
    gate, asked = asyncio.Event(), asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        asked.set()
        await gate.wait()
        return completion("X")

    fake.says["a"].append(waits)
    asker = asking(fake.endpoint("a"))
    first, second, third = (asyncio.create_task(asker.ask(HI, trace=f"0/{n}")) for n in range(3))
    async with asyncio.timeout(5):
        await asked.wait()
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        gate.set()
        assert (await third).actions == {"a": Action(text="X")}
    assert (await asker.ask(HI, trace="0/9")).actions == {"a": Action(text="X")}
    assert fake.num_requests("a") == 1


# --- what it costs ---


async def test_the_budget_ends_the_asking_and_not_the_run(fake: FakeTeachers, asking: Asking) -> None:
    paid = fake.endpoint("a", price=Price(prompt=10.0, completion=100.0), max_tokens=10_000)
    asker = asking(paid, fake.endpoint("own"), ceiling=5.0)
    for n in range(5):
        await one_of(asker, n)
    assert (asking.budget.total, fake.num_requests("a"), fake.num_requests("own")) == (4.0, 2, 5)
    assert asker.num["over_budget/a"] == 3


@pytest.mark.parametrize(
    ("fault", "cost"), [("500", 0.0), ("429", 0.0), ("400", 0.0), ("cut short", 2.0), ("cut", None), ("no json", None)]
)
async def test_what_fails_costs_what_it_may_have_cost(
    fake: FakeTeachers, asking: Asking, fault: str, cost: float | None
) -> None:
    fake.says["a"].append(FAULTS[fault][0])
    price = Price(prompt=10.0, completion=100.0)
    asker = asking(fake.endpoint("a", price=price, num_retries=0, max_tokens=1000))
    answer = await one(asker)
    [(headers, _)] = fake.requests
    at_most = int(headers["Content-Length"]) * 10 / 1e6 + 1000 * 100 / 1e6
    assert answer.cost == asking.budget.total == pytest.approx(at_most if cost is None else cost)


async def test_what_is_late_counts_at_its_most(fake: FakeTeachers, asking: Asking) -> None:
    fake.says["a"].append(slow)
    asker = asking(fake.endpoint("a", price=Price(completion=1e6), max_tokens=7, timeout_s=0.05))
    assert (await one(asker)).cost == asking.budget.total == 7.0


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "localhost:8000"}, "teacher a has base_url 'localhost:8000', expected an address"),
        ({"timeout_s": 0}, "teacher a has timeout_s 0, num_retries 3 and max_tokens 1024"),
        ({"first_pause_s": 2.0, "max_pause_s": 1.0}, "teacher a has pauses of 2.0 to 1.0 s"),
        ({"extra": {"max_tokens": 5}}, "teacher a has max_tokens in extra"),
    ],
)
def test_settings_that_cannot_be_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TeacherEndpoint(**({"name": "a", "base_url": "http://localhost", "model": "m"} | settings))


async def test_teachers_have_different_names(fake: FakeTeachers) -> None:
    for names in ([], ["a", "a"]):
        with pytest.raises(ValueError, match=r"teachers are called \[.*\], expected one or more, with different names"):
            Asker([fake.endpoint(name) for name in names], budget=Budget({}))


# --- the queue ---


async def test_the_newest_comes_next_the_oldest_makes_room_and_is_counted_and_what_raises_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, done, left_out = BoundedQueue(max_waiting=2, num_parallel=2), list[int](), list[int]()
    gate = asyncio.Event()

    def work(n: int) -> Any:
        async def run() -> None:
            await gate.wait()
            done.append(n)
            if n == 1:
                raise ValueError("no")

        return run

    for n in range(6):
        queue.offer(work(n), partial(left_out.append, n))
    assert (len(queue), left_out) == (4, [2, 3]), "two are begun, and the newest two wait"
    gate.set()
    await until(lambda: not len(queue))
    assert done == [0, 1, 5, 4]
    assert queue.num == {"queue_full": 2, "broken": 1}
    assert "ValueError" in caplog.text


async def test_a_closed_queue_gives_up_and_takes_nothing() -> None:
    queue, done, left_out = BoundedQueue(max_waiting=2, num_parallel=1), list[int](), list[int]()

    async def work() -> None:
        await asyncio.sleep(60)
        done.append(1)

    for n in range(3):
        queue.offer(work, partial(left_out.append, n))
    await asyncio.sleep(0)
    await queue.close()
    queue.offer(work, partial(left_out.append, 3))
    assert (done, len(queue), queue.num["given_up"], left_out) == ([], 0, 4, [3])
    with pytest.raises(ValueError, match="0 may wait for 1, expected at least 1 each"):
        BoundedQueue(max_waiting=0, num_parallel=1)
