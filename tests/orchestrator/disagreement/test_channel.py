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
from orchestrator.disagreement.ready import ReadyPairs
from orchestrator.disagreement.records import read_pairs
from orchestrator.episodes.conversation import single_row
from orchestrator.episodes.records import Completion, EpisodeResult, Step, Task
from orchestrator.episodes.templates import ChatTemplate
from tests.orchestrator.chat_templates import renderer
from tests.orchestrator.disagreement.teachers import FakeTeachers, cut, drained, slow, status, teachers_serving

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
        known |= {"base_model": "identity-1", "ready": ReadyPairs(max_ready=99, max_off_policy_steps=None)}
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


def result(
    group: int, number: int, question: str, answer: str, reward: float = 0.0, tools: Any = None
) -> EpisodeResult:
    messages = ({"role": "user", "content": question},)
    ids = [*answer.encode(), END]
    step = Step(
        role="policy",
        temperature=1.0,
        completion=Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop"),
        text=answer,
        version=7,
        tools=tools,
    )
    task = Task(env="e", split="train", index=group, messages=messages)
    prompt = TEMPLATE.renderer.ids_of(TEMPLATE.render(messages))
    row = single_row(prompt, step.completion, opening=TEMPLATE.opening_ids, version=7, temperature=1.0)
    return EpisodeResult(id=f"{group}/{number}", task=task, steps=(step,), rows=(row,), rewards={"policy": reward})


async def test_the_majority_of_three_teachers_against_the_student_is_a_pair(
    fake: FakeTeachers, build: Build, tmp_path: Path
) -> None:
    fake.does |= {"a": lambda messages: "North.", "b": lambda messages: "south", "c": lambda messages: "north"}
    channel = build()
    group = [result(0, 0, "Where?", "south"), result(0, 1, "Where?", "North!")]
    assert channel.offer(group) == 2
    assert channel.take(9, 8) == []
    await drained(channel)
    [pair] = channel.take(9, 8)
    assert channel.take(9, 8) == []
    prompt = list(group[0].rollout.steps[0].prompt_token_ids)
    assert pair.prompt_ids.tolist() == prompt
    assert (bytes(pair.chosen_ids[:-1].tolist()), pair.rejected_ids.tolist()) == (b"North.", [*b"south", END])
    assert (pair.chosen_ref_logprob, pair.rejected_ref_logprob) == (-3.5, -3.0)  # 7 and 6 tokens of -0.5
    assert pair.source == "2 of 3 teachers: a, c"
    assert len(fake.requests) == 3  # both were asked about in one
    [kept] = read_pairs(tmp_path / "pairs.jsonl")
    assert (kept.chosen, kept.rejected, kept.rollout_id, kept.env) == ("North.", "south", "0/0", "e")
    assert (kept.versions, kept.messages) == ([[7, 6]], [{"role": "user", "content": "Where?"}])
    assert (kept.base_model, kept.tools) == ("identity-1", None)
    assert kept.pair.chosen_ids.tolist() == pair.chosen_ids.tolist()
    metrics = channel.metrics()
    assert {key: value for key, value in metrics.items() if value} == {
        "pairs/turns_seen": 2,
        "pairs/turns_asked": 2,
        "pairs/made": 1,
        "pairs/skipped_agrees_with_student": 1,
        "pairs/questions_asked": 3,
        "pairs/questions_answered": 3,
        "pairs/questions_cached": 3,
        "pairs/requests": 3,
        **{f"pairs/questions_{what}/{name}": 1 for what in ("asked", "answered", "cached") for name in "abc"},
    }
    again = channel.metrics()
    assert again.keys() == metrics.keys()
    assert not any(again.values())


async def test_two_teachers_are_enough_when_the_third_is_down_slow_or_cut(fake: FakeTeachers, build: Build) -> None:
    channel = build(
        fake.endpoint("a"), fake.endpoint("b"), fake.endpoint("c", timeout_s=0.2, num_retries=0, failure_threshold=9)
    )
    fake.says["c"] += [status(500), slow, cut]
    assert sum(channel.offer([result(n, 0, f"Where {n}?", "Y")]) for n in range(3)) == 3
    await drained(channel)
    assert [pair.source for pair in channel.take(9, 8)] == ["2 of 2 teachers: a, b"] * 3
    metrics = channel.metrics()
    assert {key: metrics[f"pairs/questions_{key}/c"] for key in ("server_error", "timeout", "unreachable")} == {
        "server_error": 1,
        "timeout": 1,
        "unreachable": 1,
    }
    problems = channel.problems()
    assert problems.keys() == {"questions_server_error", "questions_timeout", "questions_unreachable"}
    assert problems["questions_timeout"].startswith(f"teacher c did not answer: {fake.base_url}/chat/completions: no")


async def test_turns_are_asked_about_with_the_tools_that_could_be_called(
    fake: FakeTeachers, build: Build, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]
    channel = build()
    channel.offer([result(0, 0, "Where?", "Y"), result(0, 1, "Where?", "Y", tools=tools)])
    await drained(channel)
    assert sorted(str(body.get("tools")) for _, body in fake.requests) == sorted(["None"] * 3 + [str(tools)] * 3)
    assert sorted(str(kept.tools) for kept in read_pairs(tmp_path / "pairs.jsonl")) == sorted(["None", str(tools)])


async def test_a_spent_budget_ends_the_pairs_with_its_reason(fake: FakeTeachers, build: Build) -> None:
    paid = {"price": Price(completion=100.0), "max_tokens": 10_000}  # 1 a question
    channel = build(*(fake.endpoint(name, **paid) for name in "ab"), ceiling=2.5, num_parallel=1)
    for n in range(3):
        channel.offer([result(n, 0, f"Where {n}?", "Y")])
    await drained(channel)
    metrics = channel.metrics()
    assert metrics["pairs/made"] == 1
    assert metrics["pairs/skipped_too_few_answers"] == 2
    assert metrics["pairs/cost"] == 2.0
    assert metrics["pairs/cost_per_rollout"] == 2.0
    assert metrics["pairs/questions_over_budget"] == 4
    assert channel.budget.close_trace("0/0") == 0.0, "it was closed when its last turn was done"


async def test_what_does_not_fit_is_counted(fake: FakeTeachers, build: Build) -> None:
    ready = ReadyPairs(max_ready=1, max_off_policy_steps=None)
    channel = build(max_waiting=1, num_parallel=1, ready=ready)
    assert [channel.offer([result(n, 0, f"Where {n}?", "Y")]) for n in range(4)] == [1] * 4
    metrics = channel.metrics()
    assert (metrics["pairs/turns_waiting"], metrics["pairs/turns_queue_full"]) == (2, 2)
    await drained(channel)
    metrics = channel.metrics()
    assert (metrics["pairs/turns_asked"], metrics["pairs/ready"], metrics["pairs/not_taken"]) == (2, 1, 1)
    asked = [body["messages"][0]["content"] for _, body in fake.requests]
    assert asked == ["Where 0?"] * 3 + ["Where 3?"] * 3, "the newest of those that waited"
    channel = build(sequence_len=10)
    channel.offer([result(9, 0, "Where?", "Y")])
    await drained(channel)
    assert channel.metrics()["pairs/skipped_too_long"] == 1
    assert "tokens, room is 10" in channel.problems()["skipped_too_long"]
    assert channel.problems() == {}


async def test_what_is_too_old_for_any_batch_is_not_asked_about_or_not_trained_and_counted(
    fake: FakeTeachers, build: Build
) -> None:
    channel = build(ready=ReadyPairs(max_ready=99, max_off_policy_steps=2))
    channel.offer([result(0, 0, "Where?", "Y")])  # of version 7
    await drained(channel)
    assert channel.take(9, 11) == []  # its lag is 11 - 1 - 7 = 3
    channel.offer([result(1, 0, "Where else?", "Y")])
    await drained(channel)
    metrics = channel.metrics()
    assert (metrics["pairs/too_old"], metrics["pairs/turns_too_old"], metrics["pairs/turns_asked"]) == (1, 1, 1)
    assert len(fake.requests) == 3


async def test_faults_beside_teachers_cost_the_pair_or_its_line_and_nothing_else(
    fake: FakeTeachers, build: Build, tmp_path: Path
) -> None:
    class Down:
        async def logprobs(self, token_ids: Sequence[int]) -> Sequence[float]:
            raise ConnectionError("gone")

    channel = build(reference=Down())
    channel.offer([result(0, 0, "Where?", "Y")])
    await drained(channel)
    assert channel.metrics()["pairs/skipped_reference_failed"] == 1
    assert channel.problems() == {
        "skipped_reference_failed": "a preference is not trained: reference_failed: ConnectionError: gone"
    }
    channel = build(path=tmp_path / "nowhere" / "pairs.jsonl")
    channel.offer([result(0, 0, "Where?", "Y")])
    await drained(channel)
    metrics = channel.metrics()
    assert (metrics["pairs/not_written"], metrics["pairs/made"], len(channel.take(9, 8))) == (1, 1, 1)


async def test_a_fault_of_this_program_costs_one_turn(fake: FakeTeachers, build: Build) -> None:
    channel = build(strategies=["first_divergence"])
    no_tools = [{"type": "function"}]
    channel.offer([result(0, 0, "Where?", "Y", tools=[{"type": "function", "function": {"name": object()}}])])
    assert channel.metrics()["pairs/not_read"] == 1
    channel = build(agreement=agreement_of("tool_calls"))
    channel.offer([result(0, 0, "Where?", "Y", tools=no_tools)])
    channel.offer([result(0, 0, "Where?", "Y")])
    await drained(channel)
    metrics = channel.metrics()
    assert (metrics["pairs/broken"], metrics["pairs/made"]) == (1, 1)
    assert channel.problems()["broken"].startswith("ValueError: a tool is {'type': 'function'}")


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
