"""Whole runs whose teachers fail in every way: each fault has its message and its metric, the run goes on, and the
trainer takes the batches."""

import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import unused_port

from configs.loss import LossSettings
from orchestrator.disagreement import teachers as teachers_module
from orchestrator.disagreement.pacing import Clock, Rest
from orchestrator.disagreement.records import PAIRS_FILE, read_pairs
from tests.orchestrator.disagreement.teachers import (
    FakeTeachers,
    Say,
    cut,
    hung_up,
    slow,
    status,
    teachers_serving,
    text,
)
from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.test_channels import run
from trainer.batch import check_step, check_totals
from transport.records import MicroBatch

STEPS, BATCH_SIZE, VOCABULARY = 4, 16, 259
LOSS = {"adv_tau": 0.0, "beta_replay": 0.5}
"""Pairs are all that is learned from."""
FAULTS: dict[str, tuple[Say | None, str, str]] = {
    "nobody is there": (None, "unreachable", "Cannot connect to host"),
    "slow": (slow, "timeout", "no answer within 0.2 s"),
    "nonsense": (text("<html>It works!</html>"), "nonsense", "no chat completion (no JSON): <html>"),
    "cut half-way": (cut, "unreachable", "ClientPayloadError"),
    "hung up": (hung_up, "unreachable", "Server disconnected"),
    "failing": (status(500, "out of memory"), "server_error", "status 500: out of memory"),
    "key refused": (status(401, "who are you?"), "unauthorized", "status 401: who are you?"),
    "busy": (status(429, "later"), "rate_limited", "status 429: later"),
}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(lambda prompt, version: "abc").start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def teachers() -> AsyncIterator[FakeTeachers]:
    async with teachers_serving() as serving:
        yield serving


def named(teachers: FakeTeachers, names: str, **settings: Any) -> list[dict[str, Any]]:
    known = {
        "base_url": teachers.base_url,
        "timeout": 0.2,
        "retries": 0,
        "failure_threshold": 1000,
        "requests_per_s": 1000,
    }
    return [{"name": name, "model": name, **known, **settings} for name in names]


def faulty(teachers: FakeTeachers, names: str, say: Say | None) -> list[dict[str, Any]]:
    """Those, with the fault in every answer."""
    if say is None:
        return named(teachers, names, base_url=f"http://127.0.0.1:{unused_port()}/v1")
    for name in names:
        teachers.says[name] += [say] * 1000
    return named(teachers, names)


async def steps_of(
    folder: Path, server: FakeServer, asked: Sequence[dict[str, Any]], **disagreement: Any
) -> tuple[list[tuple[MicroBatch, ...]], list[dict[str, float]]]:
    """The batches, which are whole, and their metrics; all turns are asked about before the next batch is sampled."""
    settings = {"teachers": asked, "select": ["all"], **disagreement}
    told: dict[str, Any] = {"preferences": settings, "max_steps": STEPS, "batch_size": BATCH_SIZE}
    batches, steps = await run(folder, server, LOSS, step_s=0.25, **told)
    assert len(batches) == len(steps) == STEPS
    loss = LossSettings.model_validate(LOSS)
    for step in batches.values():
        assert sum(len(batch.rollout_ids) for batch in step) == BATCH_SIZE
        check_totals(step, check_step(step, sequence_len=128, vocab_size=VOCABULARY, settings=loss), loss)
    return list(batches.values()), steps


def total(steps: Sequence[dict[str, float]], name: str) -> float:
    return sum(step.get(f"pairs/{name}", 0.0) for step in steps)


def pairs_in(batches: Sequence[tuple[MicroBatch, ...]]) -> int:
    return sum(len(batch.pairs) for step in batches for batch in step)


@pytest.mark.parametrize("fault", FAULTS)
async def test_without_teachers_that_answer_the_run_goes_on_without_pairs(
    tmp_path: Path, server: FakeServer, teachers: FakeTeachers, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    say, reason, message = FAULTS[fault]
    with caplog.at_level(logging.WARNING):
        batches, steps = await steps_of(tmp_path, server, faulty(teachers, "ab", say))
    assert pairs_in(batches) == 0
    assert total(steps, f"questions_{reason}") == total(steps, f"questions_{reason}/a") * 2 > 0
    assert total(steps, "skipped_too_few_answers") > 0
    assert total(steps, "made") == total(steps, "questions_answered") == 0
    told = [record.getMessage() for record in caplog.records if "teacher" in record.getMessage()]
    assert any("teacher b did not answer: http://127.0.0.1:" in line and message in line for line in told), told
    assert len(told) == len(set(told)), "the same is not said again for each question"
    assert not (tmp_path / PAIRS_FILE).exists()


async def test_two_teachers_are_enough_where_the_third_fails_in_one_way_after_the_other(
    tmp_path: Path, server: FakeServer, teachers: FakeTeachers
) -> None:
    teachers.says["c"] += [say for say, _, _ in FAULTS.values() if say is not None]
    asked = [*named(teachers, "ab", timeout=5.0), *named(teachers, "c")]
    batches, steps = await steps_of(tmp_path, server, asked)
    assert pairs_in(batches) > 0
    for reason in {reason for say, reason, _ in FAULTS.values() if say is not None}:
        assert total(steps, f"questions_{reason}/c") == total(steps, f"questions_{reason}") > 0
    sources = [record.source for record in read_pairs(tmp_path / PAIRS_FILE)]
    assert set(sources) == {"2 of 2 teachers: a, b", "3 of 3 teachers: a, b, c"}


async def test_a_teacher_that_comes_back_is_asked_again(
    tmp_path: Path, server: FakeServer, teachers: FakeTeachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_two_versions(*, after: int, cooldown_s: float, clock: Clock) -> Rest:
        return Rest(after=after, cooldown_s=2, clock=lambda: float(len(server.loads)))

    monkeypatch.setattr(teachers_module, "Rest", of_two_versions)
    for name in "ab":
        teachers.says[name] += [status(503)] * 2
    asked = named(teachers, "ab", failure_threshold=2, timeout=5.0)
    batches, steps = await steps_of(tmp_path, server, asked, max_concurrent=1)
    assert total(steps, "questions_server_error/a") == 2
    assert total(steps, "questions_resting/a") > 0
    assert max(step["pairs/teachers_resting"] for step in steps) == 2
    assert steps[-1]["pairs/teachers_resting"] == 0
    assert pairs_in(batches) > 0


async def test_a_budget_that_is_spent_ends_the_asking_and_says_so(
    tmp_path: Path, server: FakeServer, teachers: FakeTeachers, caplog: pytest.LogCaptureFixture
) -> None:
    asked = named(teachers, "ab", price={"completion": 100.0}, max_tokens=10_000)  # 1 a question
    with caplog.at_level(logging.WARNING):
        batches, steps = await steps_of(tmp_path, server, asked, max_cost=6.5)
    assert steps[-1]["pairs/cost"] == 6.0
    assert len(teachers.requests) == 6
    assert total(steps, "questions_over_budget") > 0
    assert 0 < pairs_in(batches) <= 3 * 4  # each question is that of a group of 4
    assert "what is left of the budget does not cover another question" in caplog.text


async def test_a_reference_that_fails_and_answers_that_nobody_could_train_cost_their_pairs(
    tmp_path: Path, server: FakeServer, teachers: FakeTeachers, caplog: pytest.LogCaptureFixture
) -> None:
    server.scored = float("-inf")
    teachers.does |= dict.fromkeys("ab", lambda messages: "x" * (200 if "e" in messages[0]["content"][9:] else 2))
    with caplog.at_level(logging.WARNING):
        batches, steps = await steps_of(tmp_path, server, named(teachers, "ab", timeout=5.0))
    assert pairs_in(batches) == 0
    assert total(steps, "skipped_reference_failed") > 0
    assert total(steps, "skipped_too_long") > 0
    assert "reference_failed: " in caplog.text
    assert "tokens, room is 128" in caplog.text


async def test_a_teacher_of_another_kind_is_no_chat_server(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the route, as where /v1 is missing in its address."""
    async with teachers_serving() as teachers:
        asked = named(teachers, "ab", base_url=teachers.base_url.removesuffix("/v1"))
        with caplog.at_level(logging.WARNING):
            _, steps = await steps_of(tmp_path, server, asked)
    assert total(steps, "questions_unauthorized") > 0
    assert "/chat/completions: status 404" in caplog.text


async def test_a_teacher_that_never_ends_its_answer_holds_up_nobody(
    tmp_path: Path, server: FakeServer, teachers: FakeTeachers
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    _, steps = await steps_of(tmp_path, server, faulty(teachers, "ab", endless))
    assert total(steps, "questions_nonsense") + total(steps, "questions_timeout") > 0
