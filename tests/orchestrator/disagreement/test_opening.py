"""From settings to a channel that asks whom they name, and to the model that writes hints."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from configs.channels import ApiSettings, PreferenceSettings
from orchestrator.disagreement.asked import NoAnswer
from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.opening import open_channel, open_hint_model
from orchestrator.disagreement.records import read_pairs
from tests.orchestrator.disagreement.teachers import FakeTeachers, drained, status, teachers_serving
from tests.orchestrator.disagreement.test_channel import TEMPLATE, Reference, result

KEY_VAR, OWN_KEY_VAR = "TEACHER_TEST_KEY", "OWN_TEST_KEY"


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTeachers]:
    async with teachers_serving() as serving:
        yield serving


def channel_of(
    settings: dict[str, Any], servers: Sequence[str] = (), path: Path | None = None, **other: Any
) -> DisagreementChannel:
    known: dict[str, Any] = {"seed": 0, "sequence_len": 1000, "reference": Reference(), **other}
    return open_channel(
        PreferenceSettings.model_validate(settings),
        own_servers=lambda: servers,
        own_api_key_var=OWN_KEY_VAR,
        base_model_name="configs/some/model",
        base_model="identity-1",
        template_of=lambda tools: TEMPLATE,
        path=path,
        **known,
    )


def teacher(fake: FakeTeachers, name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "base_url": fake.base_url, "model": name, "requests_per_s": 1000.0, **settings}


def teachers(fake: FakeTeachers, **settings: Any) -> list[dict[str, Any]]:
    return [teacher(fake, name, **settings) for name in "abc"]


async def pairs_of(channel: DisagreementChannel, *groups: Any) -> list[str]:
    """What was preferred."""
    try:
        for group in groups:
            channel.offer(group)
        await drained(channel)
        return [bytes(pair.chosen_ids[:-1].tolist()).decode() for pair in channel.take(99, 8)]
    finally:
        await channel.close()


async def test_whom_the_settings_name_is_asked_as_they_say(
    fake: FakeTeachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VAR, "k-1")
    fake.does |= {"b": lambda messages: "x!", "c": lambda messages: "Z"}
    one = teacher(fake, "a", api_key_var=KEY_VAR, temperature=None, max_tokens=7, extra={"top_p": 0.5})
    one |= {"max_tokens_field": "max_completion_tokens"}
    settings = {"teachers": [one, *teachers(fake)[1:]], "select": ["all"]}
    path = tmp_path / "pairs.jsonl"
    assert await pairs_of(channel_of(settings, path=path), [result(0, 0, "Where?", "Y")]) == ["X"]
    asked = {body["model"]: (headers, body) for headers, body in fake.requests}
    headers, body = asked["a"]
    assert headers["Authorization"] == "Bearer k-1"
    assert {key: body[key] for key in body if key != "messages"} == {
        "model": "a",
        "max_completion_tokens": 7,
        "top_p": 0.5,
    }
    assert "Authorization" not in asked["b"][0]
    assert asked["b"][1]["temperature"] == 0.0
    [kept] = read_pairs(path)
    assert (kept.source, kept.base_model) == ("2 of 3 teachers: a, b", "identity-1")


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"select": ["low_reward"]}, 2),
        ({"select": ["low_reward"], "low_reward_below": 0.1}, 1),
        ({"select": ["all"]}, 3),
        ({"select": ["all"], "agreement": "exact"}, 0),
        ({"select": ["all"], "num_agreeing": 3}, 0),
        ({"select": ["errors"]}, 0),
        ({"select": ["all"], "max_cost": 0.5}, 0),
        ({"select": ["all"], "max_cost_per_rollout": 0.5}, 0),
        ({"select": ["all"], "max_waiting": 1, "max_concurrent": 1}, 2),
    ],
)
async def test_settings_decide_what_is_asked_and_what_becomes_a_pair(
    fake: FakeTeachers, settings: dict[str, Any], chosen: int
) -> None:
    fake.does |= {"a": lambda messages: "x", "b": lambda messages: "X!", "c": lambda messages: "Z"}
    cost = {"price": {"completion": 100.0}, "max_tokens": 10_000}  # 1 a question
    group = [result(0, n, f"Where {n}?", "Y", reward) for n, reward in enumerate((0.0, 0.2, 1.0))]
    asked = channel_of({"teachers": teachers(fake, **cost), **settings})
    assert len(await pairs_of(asked, group)) == chosen


@pytest.mark.parametrize(("most", "newest"), [(0, 8), (2, 10), (None, 999)])
async def test_pairs_are_trained_until_they_are_as_old_as_is_set(
    fake: FakeTeachers, most: int | None, newest: int
) -> None:
    settings = {"teachers": teachers(fake), "select": ["all"], "max_off_policy_steps": most}
    late = newest if most is None else newest + 1
    for step, num in ((newest, 1), (late, most is None)):
        channel = channel_of(settings)
        channel.offer([result(0, 0, "Where?", "Y")])  # of version 7, which batch 8 follows at once
        await drained(channel)
        assert len(channel.take(99, step)) == num
        await channel.close()


async def test_a_share_of_the_turns_and_the_first_ones_of_a_rollout(fake: FakeTeachers) -> None:
    groups = [[result(n, 0, f"Where {n}?", "Y")] for n in range(40)]
    few = await pairs_of(channel_of({"teachers": teachers(fake), "select": ["all"], "fraction": 0.5}), *groups)
    assert 10 < len(few) < 30
    again = await pairs_of(
        channel_of({"teachers": teachers(fake), "select": ["all"], "fraction": 0.5}, seed=1), *groups
    )
    assert len(again) != 40


async def test_own_servers_are_asked_in_turn_for_the_base_model(
    fake: FakeTeachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with teachers_serving() as second:
        servers = [fake.base_url.removesuffix("/v1"), second.base_url]
        own = {"name": "base"}
        settings = {"teachers": [own, teacher(fake, "b")], "select": ["all"], "max_concurrent": 1}
        groups = [[result(n, 0, f"Where {n}?", "Y")] for n in range(4)]
        assert len(await pairs_of(channel_of(settings, servers), *groups)) == 4
        model = "configs/some/model"
        assert (fake.num_requests(model), second.num_requests(model)) == (2, 2)
        assert "Authorization" not in second.requests[0][0]
        monkeypatch.setenv(OWN_KEY_VAR, "k-2")
        settings = {"teachers": [{"name": "policy", "model": "policy"}, teacher(fake, "b")], "select": ["all"]}
        await pairs_of(channel_of(settings, [second.base_url]), *groups)
        assert second.requests[-1][0]["Authorization"] == "Bearer k-2"
        assert second.requests[-1][1]["model"] == "policy"


async def test_without_any_server_of_our_own_the_teacher_is_unreachable(fake: FakeTeachers) -> None:
    settings = {"teachers": [{"name": "base", "retries": 0}, *teachers(fake)], "select": ["all"]}
    channel = channel_of(settings)
    assert await pairs_of(channel, [result(0, 0, "Where?", "Y")]) == ["X"]
    assert channel.metrics()["pairs/questions_unreachable/base"] == 1
    told = channel.problems()["questions_unreachable"]
    assert told == "teacher base did not answer: the run's own servers: none of them is in service"


def test_a_missing_key_and_a_judge_with_a_teachers_name_are_errors(fake: FakeTeachers) -> None:
    with pytest.raises(ValueError, match=f"{KEY_VAR} is not set, expected the key of teacher a"):
        channel_of({"teachers": [teacher(fake, "a", api_key_var=KEY_VAR), teacher(fake, "b")]})
    with pytest.raises(ValueError, match=r"preferences.judge.name is 'a', which a teacher is called too"):
        channel_of({"teachers": teachers(fake), "agreement": "judge", "judge": teacher(fake, "a")})


async def test_what_was_spent_counts_after_a_resumption(fake: FakeTeachers) -> None:
    cost = {"price": {"completion": 100.0}, "max_tokens": 10_000}
    settings = {"teachers": teachers(fake, **cost), "select": ["all"], "max_cost": 6.5}
    first = channel_of(settings)
    assert len(await pairs_of(first, [result(0, 0, "Where?", "Y")])) == 1
    state = first.budget.state()
    second = channel_of(settings, budget_state=state)
    assert len(await pairs_of(second, [result(1, 0, "Where 1?", "Y")], [result(2, 0, "Where 2?", "Y")])) == 1
    assert second.metrics()["pairs/cost"] == 6.0


# --- the judge ---


def judged(fake: FakeTeachers, **settings: Any) -> dict[str, Any]:
    judge = teacher(fake, "judge", price={"completion": 100.0}, retries=0)
    return {"teachers": teachers(fake), "select": ["all"], "agreement": "judge", "judge": judge, **settings}


async def test_a_judge_is_asked_whether_answers_are_the_same(fake: FakeTeachers) -> None:
    fake.does |= {"a": lambda messages: "seven", "b": lambda messages: "7", "c": lambda messages: "8"}
    fake.does["judge"] = lambda messages: "**Yes.**" if same(messages[0]["content"]) else "No, they differ."

    def same(question: str) -> bool:
        return {"seven", "7"} <= set(question.split("\n"))

    channel = channel_of(judged(fake))
    assert await pairs_of(channel, [result(0, 0, "Where?", "Y"), result(0, 1, "Where?", "Y")]) == ["seven", "seven"]
    metrics = channel.metrics()
    assert (metrics["pairs/judge_answered"], metrics["pairs/judge_requests"]) == (3, 3), "what it said is remembered"
    assert metrics["pairs/cost"] == 3.0


@pytest.mark.parametrize(
    ("says", "reason", "told"),
    [
        ("Perhaps.", "answered", "judge was asked for yes or no, and said 'Perhaps.'"),
        ("Yes and no", "answered", "judge was asked for yes or no, and said 'Yes and no'"),
        (None, "server_error", "judge did not answer: server_error: "),
    ],
)
async def test_a_judge_that_does_not_say_skips_the_turn(
    fake: FakeTeachers, says: str | None, reason: str, told: str
) -> None:
    fake.does |= {"a": lambda messages: "seven", "b": lambda messages: "7", "judge": lambda messages: says or ""}
    if says is None:
        fake.says["judge"] += [status(500)] * 3
    channel = channel_of(judged(fake))
    assert await pairs_of(channel, [result(0, 0, "Where?", "Y")]) == []
    metrics = channel.metrics()
    assert (metrics["pairs/skipped_judge_failed"], metrics[f"pairs/judge_{reason}"]) == (1, 1)
    assert told in channel.problems()["skipped_judge_failed"]


async def test_the_judge_is_paid_by_the_rollout(fake: FakeTeachers) -> None:
    fake.does |= {"a": lambda messages: "seven", "b": lambda messages: "7", "judge": lambda messages: "no"}
    settings = judged(fake, max_cost_per_rollout=0.5)
    settings["judge"]["max_tokens"] = 10_000  # 1 a question
    channel = channel_of(settings)
    assert await pairs_of(channel, [result(0, 0, "Where?", "Y")]) == []
    assert channel.metrics()["pairs/judge_over_budget"] == 1


# --- who writes hints ---


async def test_a_model_that_writes_hints_answers_with_its_text_and_counts(fake: FakeTeachers) -> None:
    settings = ApiSettings.model_validate(teacher(fake, "writer", price={"completion": 100.0}, retries=0))
    model = open_hint_model(settings, own_servers=lambda: (), own_api_key_var=OWN_KEY_VAR, base_model_name="m", seed=0)
    fake.does["writer"] = lambda messages: f"Mind {messages[-1]['content']}."
    try:
        asked = [{"role": "user", "content": "the gap"}]
        assert list(await asyncio.gather(model(asked), model(asked))) == ["Mind the gap."] * 2
        fake.says["writer"].append(status(400, "no such model"))
        with pytest.raises(NoAnswer, match=r"writer did not answer: refused: .*status 400: no such model"):
            await model([{"role": "user", "content": "the step"}])
        metrics = model.metrics()
        assert metrics == {
            "hints/model_asked": 2,
            "hints/model_answered": 1,
            "hints/model_cached": 1,
            "hints/model_refused": 1,
            "hints/model_requests": 2,
            "hints/model_cost": 1.0,
        }
        assert model.metrics() == {**dict.fromkeys(metrics, 0.0), "hints/model_cost": 1.0}
    finally:
        await model.close()
