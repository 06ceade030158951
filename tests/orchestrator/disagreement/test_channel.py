"""From scored rollouts to pairs, with real HTTP between."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from orchestrator.disagreement.actions import agreement_of
from orchestrator.disagreement.asking import Asker
from orchestrator.disagreement.budget import Budget, Price
from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.choosing import Chooser
from orchestrator.disagreement.records import read_pairs
from orchestrator.episodes.templates import ChatTemplate
from orchestrator.episodes.tree import GenerateResult
from orchestrator.episodes.types import Completion, Rollout, Step, Task
from tests.orchestrator.chat_templates import renderer
from tests.orchestrator.disagreement.teachers import FakeTeachers, cut, slow, status, teachers_serving

TEMPLATE = ChatTemplate.of(renderer(None))
END = 258


class Reference:
    async def logprobs(self, token_ids: Sequence[int]) -> Sequence[float]:
        return [-0.5] * len(token_ids)


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTeachers]:
    async with teachers_serving() as serving:
        yield serving


Build = Callable[..., DisagreementChannel]


@pytest_asyncio.fixture
async def build(fake: FakeTeachers, tmp_path: Path) -> AsyncIterator[Build]:
    askers: list[Asker] = []
    channels: list[DisagreementChannel] = []

    def made(
        *endpoints: Any, strategies: Sequence[str] = ("all",), ceiling: float | None = None, **settings: Any
    ) -> Any:
        endpoints = endpoints or tuple(map(fake.endpoint, "abc"))
        budget = Budget({one.name: one.price for one in endpoints}, ceiling=ceiling)
        askers.append(Asker(endpoints, budget=budget))
        known: dict[str, Any] = {"sequence_len": 1000, "path": tmp_path / "pairs.jsonl", "budget": budget}
        channels.append(
            DisagreementChannel(
                askers[-1],
                Chooser(strategies),
                settings.pop("agreement", agreement_of("normalised")),
                settings.pop("reference", Reference()),
                lambda tools: TEMPLATE,
                **(known | settings),
            )
        )
        return channels[-1]

    yield made
    for channel in channels:
        await channel.close()
    for asker in askers:
        await asker.close()


def result(group: int, number: int, question: str, answer: str, reward: float = 0.0) -> GenerateResult:
    messages = ({"role": "user", "content": question},)
    ids = [*answer.encode(), END]
    step = Step(
        role="policy",
        temperature=1.0,
        prompt_token_ids=TEMPLATE.renderer.ids_of(TEMPLATE.render(messages)),
        completion=Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop"),
        text=answer,
        version=7,
    )
    task = Task(env="e", split="train", index=group, messages=messages)
    rollout = Rollout(id=f"{group}/{number}", task=task, steps=(step,))
    return GenerateResult(rollout=rollout, rewards={"policy": reward})


async def test_the_majority_of_three_teachers_against_the_student_is_a_pair(
    fake: FakeTeachers, build: Build, tmp_path: Path
) -> None:
    fake.does |= {"a": lambda messages: "North.", "b": lambda messages: "south", "c": lambda messages: "north"}
    channel = build()
    group = [result(0, 0, "Where?", "south"), result(0, 1, "Where?", "North!")]
    assert channel.offer(group) == 2
    assert channel.take(9) == []
    assert await channel.drain(5)
    [pair] = channel.take(9)
    assert channel.take(9) == []
    prompt = list(group[0].rollout.steps[0].prompt_token_ids)
    assert pair.prompt_ids.tolist() == prompt
    assert (bytes(pair.chosen_ids[:-1].tolist()), pair.rejected_ids.tolist()) == (b"North.", [*b"south", END])
    assert (pair.chosen_ref_logprob, pair.rejected_ref_logprob) == (-3.5, -3.0)  # 7 and 6 tokens of -0.5
    assert pair.source == "2 of 3 teachers: a, c"
    assert len(fake.requests) == 3  # both were asked about in one
    [kept] = read_pairs(tmp_path / "pairs.jsonl")
    assert (kept.chosen, kept.rejected, kept.rollout_id, kept.env) == ("North.", "south", "0/0", "e")
    assert (kept.versions, kept.messages) == ([[7, 6]], [{"role": "user", "content": "Where?"}])
    assert kept.pair.chosen_ids.tolist() == pair.chosen_ids.tolist()
    metrics = channel.metrics()
    assert {key: value for key, value in metrics.items() if value} == {
        "rollout/pairs_turns_seen": 2,
        "rollout/pairs_turns_asked": 2,
        "rollout/pairs": 1,
        "rollout/pairs_skipped_agrees_with_student": 1,
        "rollout/teacher_asked": 3,
        "rollout/teacher_answered": 3,
        "rollout/teacher_cached": 3,
        "rollout/teacher_requests": 3,
        **{f"rollout/teacher_{what}/{name}": 1 for what in ("asked", "answered", "cached") for name in "abc"},
    }
    again = channel.metrics()
    assert again.keys() == metrics.keys()
    assert not any(again.values())


async def test_two_teachers_are_enough_when_the_third_is_down_slow_or_cut(fake: FakeTeachers, build: Build) -> None:
    channel = build(
        fake.endpoint("a"), fake.endpoint("b"), fake.endpoint("c", timeout_s=0.2, num_retries=0, rests_after=9)
    )
    fake.says["c"] += [status(500), slow, cut]
    assert sum(channel.offer([result(n, 0, f"Where {n}?", "Y")]) for n in range(3)) == 3
    assert await channel.drain(5)
    assert [pair.source for pair in channel.take(9)] == ["2 of 2 teachers: a, b"] * 3
    metrics = channel.metrics()
    assert {key: metrics[f"rollout/teacher_{key}/c"] for key in ("server_error", "timeout", "unreachable")} == {
        "server_error": 1,
        "timeout": 1,
        "unreachable": 1,
    }


async def test_a_spent_budget_ends_the_pairs_with_its_reason(fake: FakeTeachers, build: Build) -> None:
    paid = {"price": Price(completion=100.0), "max_tokens": 10_000}  # 1 a question
    channel = build(*(fake.endpoint(name, **paid) for name in "ab"), ceiling=2.5, num_parallel=1)
    for n in range(3):
        channel.offer([result(n, 0, f"Where {n}?", "Y")])
    assert await channel.drain(5)
    metrics = channel.metrics()
    assert metrics["rollout/pairs"] == 1
    assert metrics["rollout/pairs_skipped_too_few_answers"] == 2
    assert metrics["rollout/teacher_cost"] == 2.0
    assert metrics["rollout/teacher_cost_per_trace"] == 2.0
    assert metrics["rollout/teacher_over_budget"] == 4
    assert channel.budget.close_trace("0/0") == 0.0, "it was closed when its last turn was done"


async def test_what_does_not_fit_is_counted(fake: FakeTeachers, build: Build) -> None:
    channel = build(max_waiting=1, num_parallel=1, max_ready=1)
    assert [channel.offer([result(n, 0, f"Where {n}?", "Y")]) for n in range(4)] == [1, 1, 0, 0]
    assert channel.metrics()["rollout/teacher_turns_waiting"] == 2
    assert await channel.drain(5)
    metrics = channel.metrics()
    assert (metrics["rollout/pairs_ready"], metrics["rollout/pairs_not_taken"]) == (1, 1)
    channel = build(sequence_len=10)
    channel.offer([result(9, 0, "Where?", "Y")])
    assert await channel.drain(5)
    assert channel.metrics()["rollout/pairs_skipped_too_long"] == 1
    assert "tokens, room is 10" in channel.newest_problem


async def test_faults_beside_teachers_cost_the_pair_or_its_line_and_nothing_else(
    fake: FakeTeachers, build: Build, tmp_path: Path
) -> None:
    class Down:
        async def logprobs(self, token_ids: Sequence[int]) -> Sequence[float]:
            raise ConnectionError("gone")

    channel = build(reference=Down())
    channel.offer([result(0, 0, "Where?", "Y")])
    assert await channel.drain(5)
    assert channel.metrics()["rollout/pairs_skipped_reference_failed"] == 1
    assert channel.newest_problem == "ConnectionError: gone"
    channel = build(path=tmp_path / "nowhere" / "pairs.jsonl")
    channel.offer([result(0, 0, "Where?", "Y")])
    assert await channel.drain(5)
    metrics = channel.metrics()
    assert (metrics["rollout/pairs_not_written"], metrics["rollout/pairs"], len(channel.take(9))) == (1, 1, 1)


async def test_a_fault_of_this_program_costs_one_turn(fake: FakeTeachers, build: Build) -> None:
    channel = build()
    no_tools = [{"type": "function"}]
    channel.offer([result(0, 0, "Where?", "Y")], tools=[{"type": "function", "function": {"name": object()}}])
    assert channel.metrics()["rollout/pairs_not_read"] == 1
    channel = build(agreement=agreement_of("tool_calls"))
    channel.offer([result(0, 0, "Where?", "Y")], tools=no_tools)
    channel.offer([result(0, 0, "Where?", "Y")])
    assert await channel.drain(5)
    metrics = channel.metrics()
    assert (metrics["rollout/pairs_broken"], metrics["rollout/pairs"]) == (1, 1)
    assert channel.newest_problem.startswith("ValueError: a tool is {'type': 'function'}")


async def test_strategies_look_at_siblings(fake: FakeTeachers, build: Build) -> None:
    group = [result(0, n, "Where?", answer, reward) for n, (answer, reward) in enumerate([("Y", 1.0), ("Z", 0.0)])]
    same = [result(0, n, "Where?", "Y", 1.0) for n in range(3)]
    assert build(strategies=["low_reward"]).offer(group) == 1
    assert build(strategies=["first_divergence"]).offer(group) == 2
    assert build(strategies=["low_reward", "first_divergence", "errors"]).offer(same) == 0
    assert fake.requests == []


async def test_more_must_agree_than_there_are_is_an_error(build: Build) -> None:
    with pytest.raises(ValueError, match="at_least is 4 with 3 teachers, of whom no more can agree"):
        build(at_least=4)
