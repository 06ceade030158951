"""From scored rollouts to pairs, with real HTTP and a ledger between."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpo.configs.auxiliary import ApiSettings, PreferenceSettings
from grpo.orchestrator.auxiliary.preferences import asking
from grpo.orchestrator.auxiliary.preferences.asking import Preferences
from grpo.orchestrator.endpoints import ApiModel, Costs
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.samples import ScoredGroup

from tests.orchestrator.auxiliary.preferences.test_pairs import keep, record
from tests.orchestrator.chat_server import FakeChatServer, Say, completion, says, slow
from tests.orchestrator.fakes import until
from tests.orchestrator.questions import END, TEMPLATE, result

OWN_KEY = "OWN_KEY_OF_A_TEST"
NO_CALL = [{"function": {"name": "f", "arguments": "{"}}]
Build = Callable[..., Preferences]


async def halves(token_ids: Sequence[int]) -> Sequence[float]:
    return [-0.5] * (len(token_ids) - 1)


@pytest_asyncio.fixture
async def build(chats: FakeChatServer, tmp_path: Path) -> AsyncIterator[Build]:
    opened: list[Any] = []

    def made(
        *teachers: dict[str, Any],
        state: Any = None,
        step: int = 0,
        is_trained: Callable[[], bool] = lambda: True,
        **settings: Any,
    ) -> Preferences:
        known = {"select": ["all"], "teachers": teachers or [api(chats, name) for name in "abc"]}
        ledger = Ledger(tmp_path / "ledger.sqlite")

        def open_one(one: ApiSettings, costs: Costs) -> ApiModel:
            own = [chats.base_url.removesuffix("/v1")]
            return ApiModel(one, costs, own_servers=lambda: own, own_key_var=OWN_KEY, own_model="configs/base")

        asked = Preferences(
            PreferenceSettings.model_validate(known | settings),
            ledger,
            halves,
            lambda tools: TEMPLATE,
            open_one,
            base_model="identity-1",
            sequence_len=1000,
            is_trained=is_trained,
            step=step,
            state=state,
        )
        opened.append((asked, ledger))
        return asked

    yield made
    for asked, ledger in opened:
        await asked.close()
        ledger.close()


def api(chats: FakeChatServer, model: str, **settings: Any) -> dict[str, Any]:
    """A teacher that is another model of the server."""
    known = {"name": model, "base_url": chats.base_url, "model": model, "retries": 0, "timeout_s": 60.0}
    return known | {"requests_per_s": 10_000.0} | settings


def metrics_of(asked: Preferences) -> dict[str, float]:
    return asked.figures().since(Figures())


async def drained(asked: Preferences) -> dict[str, float]:
    """The metrics, once nothing is left to be asked."""
    await until(lambda: not asked.num_turns_waiting)
    return metrics_of(asked)


async def test_the_majority_of_three_teachers_against_the_policy_is_a_pair(chats: FakeChatServer, build: Build) -> None:
    chats.does |= {"a": lambda messages: "North.", "b": lambda messages: "south", "c": lambda messages: "north"}
    asked = build()
    group = [result("0/0", "Where?", "south"), result("0/1", "Where?", "North!")]
    asked.offer(group)
    assert asked.before_batch(8) == []
    metrics = await drained(asked)
    [pair] = asked.before_batch(8)
    assert asked.before_batch(8) == []
    assert pair.prompt_ids.tolist() == group[0].rows[0].token_ids[: group[0].rows[0].turns[0].begins].tolist()
    assert (bytes(pair.chosen_ids[:-1].tolist()), pair.rejected_ids.tolist()) == (b"North.", [*b"south", END])
    assert (pair.chosen_ref_logprob, pair.rejected_ref_logprob) == (-3.5, -3.0)  # 7 and 6 tokens of -0.5
    assert pair.source == "2 of 3 teachers: a, c"
    assert len(chats.requests) == 3  # both rollouts were in one state
    expected = {"made": 1, "turns_asked": 2, "turns_seen": 2, "skipped_agrees_with_student": 1, "requests": 3}
    expected |= {"questions_asked": 3, "questions_answered": 3, "questions_cached": 3, "questions_cached/b": 1}
    assert {name: metrics[f"pairs/{name}"] for name in expected} == expected


@pytest.mark.parametrize(
    ("say", "reason"), [(slow, "timeout"), (says(lambda: completion("x", tool_calls=NO_CALL)), "nonsense")]
)
async def test_a_teacher_that_fails_is_counted_named_and_asked_again_for_the_next_turn(
    chats: FakeChatServer, build: Build, caplog: pytest.LogCaptureFixture, say: Say, reason: str
) -> None:
    chats.says["a"].append(say)
    asked = build(api(chats, "a", name="the-wise", timeout_s=2.0), api(chats, "b"))
    asked.offer([result("0/0", "Where?", "Y")])
    metrics = await drained(asked)
    assert metrics[f"pairs/questions_{reason}/the-wise"] == metrics["pairs/skipped_too_few_answers"] == 1
    assert metrics["pairs/made"] == 0
    assert "the-wise" in caplog.text
    asked.offer([result("1/0", "Where?", "Y")])
    metrics = await drained(asked)
    assert metrics["pairs/made"] == metrics["pairs/questions_cached/b"] == 1


async def test_the_costs_have_a_ceiling_over_the_whole_run(
    chats: FakeChatServer, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers = [api(chats, name, price={"prompt": 5, "completion": 50}) for name in "ab"]  # 0.5 + 0.5 a question
    monkeypatch.setattr(asking, "MAX_ASKING", 1)
    asked = build(*teachers, max_cost=4.0)
    for number in range(3):
        asked.offer([result(f"{number}/0", f"{number}", "Y")])
    metrics = await drained(asked)
    assert (metrics["pairs/cost"], metrics["pairs/questions_over_budget"]) == (4.0, 2)
    assert metrics["pairs/cost_per_rollout"] == pytest.approx(4 / 3)
    later = build(*teachers, max_cost=4.0, state=asked.state())
    later.offer([result("9/0", "later", "Y")])
    metrics = await drained(later)
    assert (metrics["pairs/cost"], metrics["pairs/cost_per_rollout"]) == (4.0, 1.0)
    assert len(chats.requests) == 4


@pytest.mark.parametrize(("answer", "reason"), [("No.", "all_disagree"), ("Yes!", "made"), ("Well", "judge_failed")])
async def test_a_judge_says_what_is_the_same(chats: FakeChatServer, build: Build, answer: str, reason: str) -> None:
    chats.does |= {"a": lambda _: "up", "b": lambda _: "above"}
    chats.does["judge"] = lambda messages: "no" if "Y" in messages[0]["content"] else answer
    asked = build(api(chats, "a"), api(chats, "b"), judge=api(chats, "judge"))
    asked.offer([result("0/0", "q", "Y")])
    metrics = await drained(asked)
    assert metrics["pairs/made" if reason == "made" else f"pairs/skipped_{reason}"] == 1
    assert metrics["pairs/judge_asked"] == (2 if reason == "made" else 1)


async def test_a_request_is_what_the_settings_say(
    chats: FakeChatServer, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "k-1")
    monkeypatch.setenv(OWN_KEY, "k-2")
    odd = {"temperature": None, "max_tokens_field": "max_completion_tokens", "extra": {"top_p": 0.5}, "max_tokens": 7}
    asked = build(api(chats, "a", temperature=0.3), api(chats, "b", api_key_var="THE_KEY", **odd), {"name": "own"})
    tools = [{"type": "function", "function": {"name": "go"}}]
    asked.offer([result("0/0", "q", "Y", tools=tools, before=[{"role": "tool", "content": "3"}])])
    await drained(asked)
    a, b, own = sorted(chats.requests, key=lambda one: str(one[1]["model"]))
    assert [one[0].get("Authorization") for one in (a, b, own)] == [None, "Bearer k-1", "Bearer k-2"]
    messages = [{"role": "user", "content": "3"}, {"role": "user", "content": "q"}]
    assert a[1] == {"model": "a", "messages": messages, "tools": tools, "temperature": 0.3, "max_tokens": 1024}
    assert b[1] == {"model": "b", "messages": messages, "tools": tools, "max_completion_tokens": 7, "top_p": 0.5}
    assert own[1]["model"] == "configs/base"


async def test_the_newest_turns_are_asked_about_first_and_the_oldest_make_room(
    chats: FakeChatServer, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_ASKING", 1)
    asked = build(max_waiting=2)
    for number in range(5):
        asked.offer([result(f"{number}/0", f"{number}", "Y")])
    metrics = await drained(asked)
    order = list(dict.fromkeys(body["messages"][0]["content"] for _, body in chats.requests))
    assert order == ["0", "4", "3"]
    assert (metrics["pairs/turns_queue_full"], metrics["pairs/made"]) == (2, 3)


async def test_what_is_too_old_is_not_asked_about(chats: FakeChatServer, build: Build) -> None:
    asked = build(max_off_policy_steps=2, step=9)  # the next batch is 10
    asked.offer([result("0/0", "q", "Y", version=6), result("0/1", "q", "Y", version=7)])
    metrics = await drained(asked)
    assert (metrics["pairs/turns_too_old"], metrics["pairs/made"]) == (1, 1)


async def test_a_batch_takes_the_newest_pairs_and_those_that_fit(build: Build, tmp_path: Path) -> None:
    keep(tmp_path, *map(record, (3, 1, 2, 0)))
    asked = build(max_off_policy_steps=2, max_pairs=1)
    taken = [[pair.prompt_ids.tolist() for pair in asked.before_batch(step)] for step in (3, 4, 5)]
    assert taken == [[[3]], [[2]], []]
    assert metrics_of(asked)["pairs/too_old"] == 2


async def test_what_teachers_agree_on_is_an_advantage_of_what_is_trained(chats: FakeChatServer, build: Build) -> None:
    chats.does |= {"a": lambda _: "c", "b": lambda _: "c.", "d": lambda _: "d"}
    chats.says["e"].append(says(lambda: completion("x", tool_calls=NO_CALL)))
    asked = build(*(api(chats, name) for name in "abde"), advantage_weight=0.3, is_trained=lambda: False)
    group = ScoredGroup([result("0/0", "q", "c"), result("0/1", "q", "z")], withheld={"0/1": "gibberish"})
    await asked.before_credit(group)
    assert {key: added.tolist() for key, added in group.added.items()} == {("0/0", 0): [pytest.approx(0.1)] * 2}
    evidence = group.evidence["0/0", 0]
    assert (evidence.consensus, evidence.teachers) == (pytest.approx(1 / 3), {"a": "c", "b": "c.", "d": "d"})
    assert (asked.num_turns_waiting, asked.figures().counts["evidence/asked"]) == (0, 1)


async def test_only_groups_that_are_trained_are_asked_about(chats: FakeChatServer, build: Build) -> None:
    asked = build()
    await asked.before_credit(ScoredGroup([result("0/0", "q", "Y")], withheld={"0/0": "gibberish"}))
    assert asked.num_turns_waiting == 0
    await asked.before_credit(ScoredGroup([result("0/0", "q", "Y"), result("0/1", "q", "Z")], withheld={"0/0": "x"}))
    assert asked.num_turns_waiting == 2
