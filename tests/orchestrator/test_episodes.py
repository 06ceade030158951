"""Rubrics, advantages, credit and episodes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.advantage import length_weighted
from orchestrator.episodes.credit import GroupCredit
from orchestrator.episodes.policy import Backends
from orchestrator.episodes.roles import RoleAdapters
from orchestrator.episodes.rolling import SingleTurn
from orchestrator.episodes.rubric import RewardNotFinite, Rubric
from orchestrator.episodes.tree import FailedRollout, GenerateResult
from orchestrator.episodes.types import Completion, Failure, Messages, SamplingParams, Score, Task
from orchestrator.filters import Filter, Gibberish
from orchestrator.monitoring.metrics import ScoredGroup
from orchestrator.samples import finish_group, judge_group, training_samples


def length(completion: str, example: object) -> float:
    return len(completion)


async def patient(completion: str, example: object) -> float:
    await asyncio.sleep(0)
    return 1.0


async def test_a_rubric_is_the_weighted_sum_of_plain_and_async_functions() -> None:
    # 0.5 · 4 + 2 · 1 = 4
    score = await Rubric([length, patient], weights=[0.5, 2]).score("four", {})
    assert score == Score(reward=4.0, accuracy=4.0, metrics={"length": 4.0, "patient": 1.0})


async def test_accuracy_may_be_another_function_than_those_that_reward() -> None:
    score = await Rubric([length], accuracy=patient).score("four", {})
    assert (score.reward, score.accuracy) == (4, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "much"])
async def test_a_reward_that_is_no_number_is_an_error(value: object) -> None:
    def odd(completion: str, example: object) -> object:
        return value

    with pytest.raises(RewardNotFinite, match="odd returned"):
        await Rubric([odd]).score("", {})  # type: ignore[list-item]


def test_rubrics_that_cannot_be_meant_are_errors() -> None:
    with pytest.raises(ValueError, match="give at least one"):
        Rubric([])
    with pytest.raises(ValueError, match="1 weights for 2 reward functions"):
        Rubric([length, patient], weights=[1])
    with pytest.raises(ValueError, match="different names"):
        Rubric([length, length])


class Parrot:
    """Answers with the number of the choice."""

    context_len = 64

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        num: int,
        version: int | None,
        seed: int | None,
    ) -> list[Completion]:
        return [Completion(token_ids=[10 + n], logprobs=[-0.1 * n], finish_reason="stop") for n in range(num)]


class Letters:
    def prompt_ids(self, messages: Messages) -> Sequence[int]:
        return [1, 2]

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        return [str(completion.token_ids[0] - 10) for completion in completions]


class Numbers:
    """The answer is its own reward; 1 cannot be scored."""

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score | Failure]:
        return [
            Failure(reason="env_error", message="no ones") if text == "1" else Score(reward=float(text), accuracy=0)
            for text in completions
        ]


TASK = Task(env="e", split="train", index=0, messages=({"role": "user", "content": "hi"},))
BACKENDS = Backends(policy=Parrot(), renderer=Letters(), scorer=Numbers())


async def test_a_group_is_sampled_scored_and_credited_and_what_fails_fails_alone() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=4)
    results = await SingleTurn(params).generate(BACKENDS, TASK, group="9", num=4, version=5)
    assert isinstance(results[1], FailedRollout)
    assert results[1].rollout.id == "9/1"
    scored = [result for result in results if isinstance(result, GenerateResult)]
    samples = training_samples(scored, GroupCredit(), group="9")
    # Rewards 0, 2 and 3 have the mean 5/3.
    assert [sample.advantages for sample in samples] == pytest.approx([-5 / 3, 1 / 3, 4 / 3])
    assert [sample.rollout_id for sample in samples] == ["9/0", "9/2", "9/3"]
    assert samples[1].token_ids.tolist() == [1, 2, 12]
    assert samples[1].loss_mask.tolist() == [False, False, True]
    assert samples[1].inference_logprobs.tolist() == pytest.approx([0, 0, -0.2])
    assert samples[1].temperatures == 0.7
    assert samples[1].policy_versions == ((5, 3),)


async def test_an_answer_is_asked_of_its_roles_adapter_and_trains_it() -> None:
    asked: list[SamplingParams] = []

    class Listener(Parrot):
        async def generate(self, prompt_token_ids: Sequence[int], **given: Any) -> list[Completion]:
            asked.append(given["params"])
            return await super().generate(prompt_token_ids, **given)

    backends = replace(BACKENDS, policy=Listener())
    names, of_roles = ("a", "b"), {"policy": "b"}
    for adapters in (RoleAdapters(), RoleAdapters(names=names), RoleAdapters(names=names, of_roles=of_roles)):
        results = await SingleTurn(PARAMS, adapters).generate(backends, TASK, group="9", num=4, version=5)
        scored = [result for result in results if isinstance(result, GenerateResult)]
        places = {sample.adapter for sample in training_samples(scored, GroupCredit(), group="9")}
        assert places == {adapters.place("policy")}
    assert [params.adapter for params in asked] == [None, "a", "b"]


async def test_each_token_of_a_sample_has_the_version_that_sampled_it_and_the_prompt_that_of_the_first() -> None:
    [one, other] = await group_of(2)
    step = one.rollout.steps[0]
    completion = Completion(
        token_ids=[12, 13, 14, 15], logprobs=[-0.1] * 4, finish_reason="stop", versions=((5, 1), (6, 2), (8, 1))
    )
    rollout = replace(one.rollout, steps=(replace(step, completion=completion),))
    assert rollout.versions == [5, 6, 8]
    assert other.rollout.versions == [5]
    group = finish_group([replace(one, rollout=rollout), other], GroupCredit(), group="9")
    assert [sample.policy_versions for sample in group.samples] == [((5, 3), (6, 2), (8, 1)), ((5, 3),)]
    assert group.oldest_version == 5
    newer = replace(other.rollout.steps[0], version=7)
    later = replace(other, rollout=replace(other.rollout, steps=(newer,)))
    assert finish_group([later], GroupCredit(), group="9").oldest_version == 7
    assert [ScoredGroup(results=[], step=10).lag(one) for one in (other, later)] == [4, 2]


async def group_of(num: int) -> list[GenerateResult]:
    """`num` rollouts with the rewards 2, 3, … whose only tokens are 12, 13, …"""
    results = await SingleTurn(PARAMS).generate(BACKENDS, TASK, group="9", num=num + 2, version=5)
    return [result for result in results[2:] if isinstance(result, GenerateResult)]


PARAMS = SamplingParams(temperature=0.7, max_tokens=4)
LAST_OF_THREE = Gibberish(token_id_threshold=13, logprob_offset=-2.4, vocab_size=16)
"""Finds token 14, whose log-probability of -0.4 is below -log(16) + 2.4 = -0.373."""


async def test_another_advantage_function_gets_the_rewards_and_the_numbers_of_sampled_tokens() -> None:
    one, other = await group_of(2)
    # As if the second had answered with three tokens: (2·1 + 3·3) / 4 = 2.75.
    step = other.rollout.steps[0]
    longer = replace(step, completion=Completion(token_ids=[13] * 3, logprobs=[-0.3] * 3, finish_reason="stop"))
    long = replace(other, rollout=replace(other.rollout, steps=(longer,)))
    advantages = GroupCredit(advantage=length_weighted).compute([one, long])
    assert advantages == {("9/2", 0): -0.75, ("9/3", 0): 0.25}


async def test_a_withheld_rollout_gives_no_sample_but_counts_in_the_baseline() -> None:
    results = await group_of(3)
    enforced = Filter(name="gibberish", detector=LAST_OF_THREE, enforce=True)

    group = finish_group(results, GroupCredit(), judge_group(results, [enforced]), group="9")

    assert group.results == results
    assert group.found == ["gibberish"]
    assert group.withheld == {"9/4": "gibberish"}
    assert group.trained == ["9/2", "9/3"]
    # Rewards 2, 3 and 4 have the mean 3, with the withheld one.
    assert [sample.advantages for sample in group.samples] == [-1, 0]


async def test_a_rollout_in_which_a_filter_only_detects_something_is_trained() -> None:
    found = Filter(name="gibberish", detector=LAST_OF_THREE, enforce=False)
    results = await group_of(3)
    group = finish_group(results, GroupCredit(), judge_group(results, [found]), group="9")
    assert group.found == ["gibberish"]
    assert group.trained == ["9/2", "9/3", "9/4"]
