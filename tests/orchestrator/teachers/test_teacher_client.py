"""Asking a teacher over HTTP, and everything that it may do instead of answering."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import unused_port

from orchestrator.teachers.client import MAX_PAUSE_S, HttpTeacher, pause_s
from orchestrator.teachers.endpoints import CompletionsEndpoint, PolicyEndpoint
from orchestrator.teachers.scoring import Scored, TeacherClient, TeacherFailure, TeacherRefused
from orchestrator.teachers.vocabulary import Vocabulary, probes
from tests.orchestrator.teachers.serving import (
    CODEC,
    OURS,
    FakeTeacher,
    Fault,
    answering,
    cut,
    endless,
    hang,
    hang_up,
    in_turn,
)
from transport.records import Int32

QUICK: dict[str, Any] = {"timeout_s": 5.0, "retries": 2, "first_pause_s": 0.001}


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeTeacher]:
    server = await FakeTeacher().start()
    yield server
    await server.stop()


def teacher(*servers: str, **more: Any) -> HttpTeacher:
    return HttpTeacher(servers, CompletionsEndpoint(model="large"), **QUICK | more)


async def scored(by: HttpTeacher, *rows: Int32, temperature: float = 1.0) -> list[Scored]:
    try:
        return await by.score(rows, [temperature] * len(rows))
    finally:
        await by.close()


async def failure(by: HttpTeacher, **more: Any) -> TeacherFailure:
    """The failure of a row, after a look at what is counted."""
    [found] = await scored(by, ids(5, 6, 7), **more)
    assert isinstance(found, TeacherFailure)
    assert by.counts.failed == Counter({found.reason: 1})
    assert found.message.startswith("the teacher ")
    return found


async def test_rows_are_scored_token_by_token(server: FakeTeacher) -> None:
    by: TeacherClient = teacher(server.url + "/v1")
    found = await by.score([ids(5, 6, 7), ids(5, 8)], [1.0, 1.0])
    await by.close()
    assert [one.tolist() for one in found if isinstance(one, np.ndarray)] == [
        pytest.approx([0, -0.06, -0.07]),
        pytest.approx([0, -0.08]),
    ]


async def test_a_version_is_scored_by_our_own_server(server: FakeTeacher) -> None:
    [found] = await scored(HttpTeacher([server.url], PolicyEndpoint(version=3)), ids(5, 6))
    assert isinstance(found, np.ndarray)
    assert found.tolist() == pytest.approx([0, -0.06])
    assert server.asked == [{"version": 3, "token_ids": [5, 6]}]


async def test_equal_rows_cost_one_request_and_beginnings_none(server: FakeTeacher) -> None:
    by = teacher(server.url)
    found = await scored(by, ids(5, 6), ids(5, 6, 7), ids(5, 6, 7))
    lengths = [len(one) for one in found if isinstance(one, np.ndarray)]
    assert (len(server.asked), lengths, by.counts.num_tokens) == (1, [2, 3, 3], 3)
    assert by.metrics() == {
        "teacher/rows": 3,
        "teacher/tokens": 3,
        "teacher/requests": 1,
        "teacher/retries": 0,
        "teacher/failed": 0,
    }


async def test_requests_at_a_time_are_bounded_over_all_calls(server: FakeTeacher) -> None:
    async def slowly(request: web.Request) -> None:
        await asyncio.sleep(0.01)

    server.fault, by = slowly, teacher(server.url, num_parallel=3)
    await asyncio.gather(*(by.score([ids(n, m) for m in range(5)], [1.0] * 5) for n in range(2)))
    await by.close()
    assert (len(server.asked), server.most_running) == (10, 3)


async def test_requests_go_to_the_least_loaded_server(server: FakeTeacher) -> None:
    other = await FakeTeacher().start()
    await scored(teacher(server.url, other.url), *(ids(5, token) for token in range(10)))
    await other.stop()
    assert (len(server.asked), len(other.asked)) == (5, 5)


async def test_the_key_goes_with_every_request_and_into_no_message(server: FakeTeacher) -> None:
    server.fault = answering(401, text='{"error": {"message": "who are you?"}}')
    found = await failure(teacher(server.url, api_key="secret"))
    assert found.reason == "refused"
    assert "answered 401: who are you?; set the variable that api_key_var names" in found.message
    assert server.keys == ["Bearer secret"]
    assert "secret" not in found.message


# --- faults that may pass ---


@pytest.mark.parametrize("fault", [answering(503), answering(429), answering(500), cut, hang_up])
async def test_what_may_pass_is_tried_again(server: FakeTeacher, fault: Fault) -> None:
    server.fault, by = in_turn(fault), teacher(server.url)
    [found] = await scored(by, ids(5, 6))
    assert isinstance(found, np.ndarray)
    assert (by.counts.num_requests, by.counts.num_retries, by.counts.failed.total()) == (2, 1, 0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(answering(429), "busy"), (answering(408), "busy"), (answering(500, text="oops"), "error"), (cut, "cut_off")],
)
async def test_what_does_not_pass_ends_after_the_tries(server: FakeTeacher, fault: Fault, reason: str) -> None:
    server.fault = fault
    found = await failure(teacher(server.url))
    assert (found.reason, len(server.asked)) == (reason, 3)
    assert found.message.startswith(f"the teacher large at {server.url}: 3 tries, the last: ")


async def test_a_teacher_that_is_down_is_tried_until_the_deadline_and_named() -> None:
    by = teacher(f"http://127.0.0.1:{unused_port()}", timeout_s=0.2)
    found = await failure(by)
    assert found.reason == "down"
    assert by.counts.num_requests > 3  # retries is 2
    assert "no answer within 0.2 s: the last of " in found.message
    assert "Cannot connect to host 127.0.0.1" in found.message


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_teacher_that_is_down_behind_its_proxy_is_waited_for_too(server: FakeTeacher, status: int) -> None:
    server.fault = in_turn(*[answering(status)] * 6)  # retries is 2
    [found] = await scored(teacher(server.url), ids(5, 6))
    assert isinstance(found, np.ndarray)
    server.fault = answering(status)
    away = await failure(teacher(server.url, timeout_s=0.2))
    assert away.reason == "down"
    assert f"/v1/completions answered {status}" in away.message


async def test_a_teacher_that_comes_back_answers_what_waited_for_it(server: FakeTeacher) -> None:
    await server.stop()
    asking = asyncio.create_task(scored(teacher(server.url), ids(5, 6)))
    await asyncio.sleep(0.05)
    await server.start()
    [found] = await asking
    assert isinstance(found, np.ndarray)


async def test_what_one_server_answers_wrongly_is_asked_of_another(server: FakeTeacher) -> None:
    broken = await FakeTeacher().start()
    broken.fault = answering(200, text="<html>")
    by = teacher(broken.url, server.url)
    found = await scored(by, *(ids(5, token) for token in range(6)))
    await broken.stop()
    assert all(isinstance(one, np.ndarray) for one in found)
    assert (len(server.asked), len(broken.asked)) == (6, 3)


async def test_what_all_servers_answer_wrongly_fails_with_the_last_ones_reason(server: FakeTeacher) -> None:
    broken = await FakeTeacher().start()
    server.fault = broken.fault = answering(200, text="<html>")
    found = await failure(teacher(broken.url, server.url))
    await broken.stop()
    assert (found.reason, len(server.asked), len(broken.asked)) == ("nonsense", 1, 1)


async def test_a_dead_servers_rows_go_to_another(server: FakeTeacher) -> None:
    by = teacher(f"http://127.0.0.1:{unused_port()}", server.url)
    found = await scored(by, *(ids(5, token) for token in range(4)))
    assert all(isinstance(one, np.ndarray) for one in found)


async def test_servers_may_come_later(server: FakeTeacher) -> None:
    in_service: list[str] = []
    by = HttpTeacher(lambda: in_service, CompletionsEndpoint(model="large"), timeout_s=0.2)
    [found] = await by.score([ids(5, 6)], [1.0])
    assert isinstance(found, TeacherFailure)
    assert "none of its servers is in service" in found.message
    in_service.append(server.url)
    assert isinstance((await scored(by, ids(5, 6)))[0], np.ndarray)


async def test_a_slow_teacher_is_given_up_after_the_time_of_each_try(server: FakeTeacher) -> None:
    server.fault = hang
    found = await failure(teacher(server.url, try_s=0.05, retries=1))
    assert (found.reason, len(server.asked)) == ("slow", 2)
    assert "2 tries, the last: no answer within 0.05 s" in found.message


async def test_rows_that_wait_for_their_turn_end_at_the_deadline_too(server: FakeTeacher) -> None:
    server.fault, by = hang, teacher(server.url, timeout_s=0.1, num_parallel=1)
    found = await scored(by, ids(5, 6), ids(5, 7), ids(5, 8))
    assert [one.reason for one in found if isinstance(one, TeacherFailure)] == ["slow"] * 3
    assert by.counts.failed == Counter(slow=3)


async def test_a_queue_that_is_longer_than_the_deadline_is_worked_off(server: FakeTeacher) -> None:
    async def slow(request: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(0.02)
        return None

    server.fault, by = slow, teacher(server.url, timeout_s=0.3, num_parallel=1)
    found = await scored(by, *(ids(5, 6 + number) for number in range(40)))
    assert not [one for one in found if isinstance(one, TeacherFailure)]


async def test_a_deadline_during_the_tries_tells_what_went_wrong(server: FakeTeacher) -> None:
    server.fault = answering(429, headers={"Retry-After": "60"})
    found = await failure(teacher(server.url, timeout_s=0.1))
    assert found.reason == "busy"
    assert "no answer within 0.1 s: the last of 1 tries: /v1/completions answered 429" in found.message


async def test_one_row_that_fails_leaves_the_others_their_scores(server: FakeTeacher) -> None:
    async def fault(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=400) if 7 in json.loads(await request.read())["prompt"] else None

    server.fault, by = fault, teacher(server.url)
    found = await scored(by, ids(5, 6), ids(5, 7), ids(5, 7), ids(5, 8))
    assert [isinstance(one, np.ndarray) for one in found] == [True, False, False, True]
    assert by.counts.failed == Counter(refused=2)


@pytest.mark.parametrize(
    ("num_failed", "asked_s", "draw", "expected"),
    [
        (1, 0.0, 1.0, 0.001),
        (3, 0.0, 1.0, 0.004),  # 0.001 · 2²
        (3, 0.0, 0.0, 0.002),  # the half of it
        (1, 2.5, 0.0, 2.5),
        (1, 3600.0, 0.0, MAX_PAUSE_S),
        (500, 0.0, 1.0, MAX_PAUSE_S),
    ],
)
def test_pauses_grow_and_are_bounded(num_failed: int, asked_s: float, draw: float, expected: float) -> None:
    assert pause_s(num_failed, first_s=0.001, asked_s=asked_s, draw=draw) == pytest.approx(expected)


# --- faults that do not pass ---


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [
        (answering(200, text="<html>"), "nonsense", "cannot be read"),
        (answering(200, text='{"choices": [{"prompt_logprobs": null}]}'), "nonsense", "has no prompt_logprobs"),
        (
            answering(200, text='{"choices": [{"prompt_logprobs": [null, {"1": {"logprob": -1}}]}]}'),
            "other_tokens",
            "2",
        ),
        (endless, "nonsense", "longer than"),
        (answering(307, headers={"Location": "http://127.0.0.1:9/"}), "refused", "answered 307"),
        (answering(400, text='{"object": "error", "message": "too long"}'), "refused", "answered 400: too long"),
        (answering(404, text='{"error": "no model"}'), "refused", "answered 404: no model"),
        (answering(422, text="[1]"), "refused", "answered 422: [1]"),
    ],
)
async def test_what_will_not_pass_is_not_tried_again(
    server: FakeTeacher, fault: Fault, reason: str, message: str
) -> None:
    server.fault = fault
    found = await failure(teacher(server.url))
    assert (found.reason, len(server.asked)) == (reason, 1)
    assert message in found.message


async def test_what_does_not_speak_http_is_named() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 welcome to the mail\r\n\r\n")
        writer.close()

    port = unused_port()
    async with await asyncio.start_server(speak, "127.0.0.1", port):
        found = await failure(teacher(f"http://127.0.0.1:{port}"))
    assert found.reason == "nonsense"
    assert "does not answer as HTTP would" in found.message


async def test_another_temperature_asks_openais_routes_nothing(server: FakeTeacher) -> None:
    found = await failure(teacher(server.url), temperature=0.7)
    assert (found.reason, server.asked) == ("temperature", [])


async def test_a_server_of_ours_that_knows_no_temperature_fails_for_it(server: FakeTeacher) -> None:
    server.knows_temperature = False
    found = await failure(HttpTeacher([server.url], PolicyEndpoint(version=3)), temperature=0.7)
    assert found.reason == "temperature"
    assert "unknown field `temperature`" in found.message


async def test_a_row_that_the_teacher_cannot_read_is_not_sent(server: FakeTeacher) -> None:
    by = teacher(server.url)
    await by.inspect()
    found = await scored(by, ids(*range(7)), ids(*range(20, 28)))
    assert isinstance(found[0], np.ndarray)
    assert isinstance(found[1], TeacherFailure)
    assert found[1].reason == "too_long"
    assert "a row has 8 tokens, and it scores at most 7; lower seq_len" in found[1].message


@pytest.mark.parametrize(("row", "temperature"), [((5,), 1.0), ((5, 6), 0.0), ((5, 6), float("nan"))])
async def test_what_cannot_be_scored_by_anyone_is_an_error(row: tuple[int, ...], temperature: float) -> None:
    with pytest.raises(ValueError, match="expected at least 2 and above 0"):
        await scored(teacher("http://127.0.0.1:9"), ids(*row), temperature=temperature)


# --- before the run ---


async def test_a_teacher_that_is_not_there_is_refused_before_the_run(server: FakeTeacher) -> None:
    async with asyncio.timeout(5):
        small = HttpTeacher([server.url], CompletionsEndpoint(model="small"))
        with pytest.raises(TeacherRefused, match=r"the teacher small at .*: it does not serve 'small'; .* \['large'\]"):
            await small.inspect()
        await small.close()
        gone = teacher(f"http://127.0.0.1:{unused_port()}", timeout_s=0.1)
        with pytest.raises(TeacherRefused, match=r"no answer within 0.1 s: .*ClientConnectorError") as caught:
            await gone.inspect()
        await gone.close()
    assert caught.value.reason == "down"


async def test_a_server_with_our_tokenizer_passes_and_another_is_refused(server: FakeTeacher) -> None:
    by = teacher(server.url)
    await by.check_vocabulary(probes(OURS, CODEC))
    server.vocabulary = Vocabulary(tokens={**OURS.tokens, 258: "<|stop|>"}, control=OURS.control)
    with pytest.raises(TeacherRefused, match=r"reads token 258 \('<\|stop\|>'\) where .* token 258 \('<\|im_end\|>'\)"):
        await by.check_vocabulary(probes(OURS, CODEC))
    await by.close()


async def test_a_server_whose_tokenizer_cannot_be_seen_is_refused_with_what_to_do(server: FakeTeacher) -> None:
    server.tokenizes, by = False, teacher(server.url)
    with pytest.raises(TeacherRefused, match=r"cannot be told: .*404.*; name the folder of the teacher's tokenizer"):
        await by.check_vocabulary(probes(OURS, CODEC))
    await by.close()


@pytest.mark.parametrize(
    ("servers", "more"),
    [(["127.0.0.1:8000"], {}), ([], {}), (["http://a"], {"retries": -1}), (["http://a"], {"num_parallel": 0})],
)
async def test_settings_that_cannot_be_are_refused(servers: list[str], more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        teacher(*servers, **more)
