"""Rubrics, advantages, credit and episodes."""

import asyncio
from collections.abc import Sequence

import pytest

from orchestrator.advantage import group_relative
from orchestrator.episodes.arena import Arena
from orchestrator.episodes.credit import GRPOCredit
from orchestrator.episodes.episode import FailedRollout, GenerateResult, SingleTurnEpisode
from orchestrator.episodes.rubric import RewardNotFinite, Rubric
from orchestrator.episodes.types import Completion, Failure, Messages, Role, Score, Task
from orchestrator.samples import training_samples


def test_advantages_are_rewards_minus_their_mean() -> None:
    # mean(1, 0, 0, 3) = 1
    assert group_relative([1, 0, 0, 3]) == [0, -1, -1, 2]


def test_equal_rewards_give_no_advantage() -> None:
    assert group_relative([0.5, 0.5]) == [0, 0]


def test_an_empty_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="without rewards"):
        group_relative([])


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

    async def generate(
        self, prompt_token_ids: Sequence[int], *, role: Role, num: int, version: int, seed: int | None
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
ARENA = Arena(policy=Parrot(), renderer=Letters(), scorer=Numbers())


async def test_a_group_is_sampled_scored_and_credited_and_what_fails_fails_alone() -> None:
    role = Role(id="policy", temperature=0.7, max_tokens=4)
    results = await SingleTurnEpisode(role).generate(ARENA, TASK, group="9", num=4, version=5)
    assert isinstance(results[1], FailedRollout)
    assert results[1].rollout.id == "9/1"
    scored = [result for result in results if isinstance(result, GenerateResult)]
    samples = training_samples(scored, GRPOCredit(), group="9")
    # Rewards 0, 2 and 3 have the mean 5/3.
    assert [sample.advantages for sample in samples] == pytest.approx([-5 / 3, 1 / 3, 4 / 3])
    assert [sample.rollout_id for sample in samples] == ["9/0", "9/2", "9/3"]
    assert samples[1].token_ids.tolist() == [1, 2, 12]
    assert samples[1].loss_mask.tolist() == [False, False, True]
    assert samples[1].inference_logprobs.tolist() == pytest.approx([0, 0, -0.2])
    assert samples[1].temperatures == 0.7
    assert samples[1].policy_versions == ((5, 3),)
